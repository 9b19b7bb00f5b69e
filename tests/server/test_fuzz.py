"""A small version of scripts/fuzz_server.py, and Schemathesis on the description: no 5xx, no growth, nothing stuck."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.fuzz_server import GROWTH_BYTES, LEAK_BLOCKS, fuzz, growth, leak, memory
from stoker.server.registry import TRIM_S
from tests.server.running import PATIENCE_S, ROOT, Server


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with Server(tiny_store, "--memory", "1GiB", "--ctx-size", 256) as running:
        yield running


def settled_blocks(server: Server, at_most: int = 0) -> int:
    """Python's objects when the idle server has collected its cycles: the fewest seen until there are `at_most`."""
    fewest, deadline = sys.maxsize, time.monotonic() + (2 * TRIM_S if not at_most else PATIENCE_S)
    while fewest > at_most and time.monotonic() < deadline:
        time.sleep(1)
        fewest = min(fewest, memory(server.url, server.process.pid).python_blocks)
    return fewest


def test_malformed_requests(server: Server) -> None:
    """The same requests twice: what the second round leaves behind is not something that is used for the first time."""
    requests, pid = 500, server.process.pid
    first, _, _ = fuzz(server.url, pid, requests, seed=7)
    before = settled_blocks(server)
    tally, seen, health = fuzz(server.url, pid, requests, seed=7)
    assert not first.bad + tally.bad, "\n".join((first.bad + tally.bad)[:5])
    assert growth(seen) < GROWTH_BYTES, seen
    limit = before + int(5 * LEAK_BLOCKS * requests)
    assert settled_blocks(server, limit) <= limit, seen
    assert all(model["running"] == model["waiting"] == 0 and model["error"] is None for model in health), health
    assert tally.statuses["200"] > 50 and tally.statuses["400"] > 150, "both sides of the line were tried"


def test_a_leak_is_told_from_a_step() -> None:
    assert leak([0, 10, 20, 30, 40], 400) == pytest.approx(0.1)
    assert leak([0, 50, 50, 50, 50], 400) == 0


def test_every_path_by_its_description(server: Server) -> None:
    command = [
        sys.executable,
        ROOT / "scripts/schema_server.py",
        "--url",
        server.url,
        "--examples",
        "10",
        "--phases",
        "fuzzing",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert server.process.poll() is None
