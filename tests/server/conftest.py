"""Stores to serve: the demo model (real words, a real chat template) and a tiny random one (starts at once)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.generate.stores import pack, write_checkpoint
from tests.server.running import Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_store() -> Path:
    """The packed demo model, as ./demo runs it."""
    pytest.importorskip("gguf", reason="the demo recipe reads a GGUF: install the dev extra")
    script = subprocess.run(
        [ROOT / "scripts/demo-store"],
        env={**os.environ, "STOKER_PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return ROOT / script.stdout.strip()


@pytest.fixture(scope="session")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny_store`, with 16,384 tokens of context: its answers take many seconds and its steps milliseconds."""
    base = tmp_path_factory.mktemp("long")
    checkpoint = write_checkpoint(base / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    return pack(checkpoint, base / "long", "--bits", 8, "--group-size", 32)


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 tokens of vocabulary and of context, with a chat template; its words mean nothing."""
    base = tmp_path_factory.mktemp("models")
    return pack(write_checkpoint(base / "checkpoint"), base / "tiny", "--bits", 8, "--group-size", 32)


@pytest.fixture(scope="session")
def talking(demo_store: Path) -> Iterator[Server]:
    """A server on the demo model with the key `sesame`, for tests that ask little each."""
    with Server(demo_store, "--memory", "1500MiB", "--parallel", 2, "--api-key", "sesame") as running:
        yield running
