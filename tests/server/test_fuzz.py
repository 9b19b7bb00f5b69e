"""A small version of scripts/fuzz_server.py, and Schemathesis on the description: no 5xx, no growth, nothing stuck."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.fuzz_server import GROWTH_BYTES, LEAK_BLOCKS, fuzz, growth, leak
from tests.server.running import ROOT, Server


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with Server(tiny_store, "--memory", "1GiB", "--ctx-size", 256) as running:
        yield running


def test_malformed_requests(server: Server) -> None:
    requests = 700
    tally, seen, health = fuzz(server.url, server.process.pid, requests, seed=7)
    assert not tally.bad, "\n".join(tally.bad[:5])
    assert growth(seen) < GROWTH_BYTES, seen
    assert leak([each.python_blocks for each in seen], requests) < 20 * LEAK_BLOCKS, "more than what is first used"
    assert all(model["running"] == model["waiting"] == 0 and model["error"] is None for model in health), health
    assert tally.statuses["200"] > 50 and tally.statuses["400"] > 200, "both sides of the line were tried"


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
