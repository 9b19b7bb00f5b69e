"""The demo model for tests: its dense source and its checkpoint, made once and kept where ./demo keeps them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the demo recipe reads a GGUF: install the dev extra")

from recipes.demo.source import Source, fetch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def source() -> Source:
    return Source(fetch(ROOT / ".cache"))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    directory = ROOT / "models/demo/checkpoint"
    make = [sys.executable, "-m", "recipes.demo.make", str(directory), "--cache", str(ROOT / ".cache")]
    subprocess.run(make, cwd=ROOT, check=True)
    return directory
