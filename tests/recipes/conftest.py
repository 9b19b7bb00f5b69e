"""The demo model for tests: its dense source and its checkpoint, made once and kept where ./demo keeps them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="the demo recipe reads a GGUF: install the dev extra")

from recipes.demo.source import Source, fetch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small tensors: further threads would mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def source() -> Source:
    return Source(fetch(ROOT / ".cache"))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    directory = ROOT / "models/demo/checkpoint"
    make = [sys.executable, "-m", "recipes.demo.make", str(directory), "--cache", str(ROOT / ".cache")]
    subprocess.run(make, cwd=ROOT, check=True)
    return directory


@pytest.fixture(scope="session")
def demo_store() -> Path:
    """The packed demo model, as ./demo runs it."""
    script = subprocess.run(
        [ROOT / "scripts/demo-store"],
        env={**os.environ, "STOKER_PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return ROOT / script.stdout.strip()
