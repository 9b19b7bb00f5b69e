"""A small version of scripts/fuzz_server.py, and Schemathesis on the description: no 5xx, no growth, nothing stuck."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.fuzz_server import GROWTH_BYTES, fuzz, growth
from tests.server.running import ROOT, Server


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with Server(tiny_store, "--memory", "1GiB", "--ctx-size", 256) as running:
        yield running


def test_malformed_requests(server: Server) -> None:
    tally, resident, health = fuzz(server.url, server.process.pid, 700, seed=7)
    assert not tally.bad, "\n".join(tally.bad[:5])
    assert growth(resident) < GROWTH_BYTES, [each >> 20 for each in resident]
    assert all(model["running"] == model["waiting"] == 0 and model["error"] is None for model in health), health
    assert tally.statuses["200"] > 50 and tally.statuses["400"] > 200, "both sides of the line were tried"


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
