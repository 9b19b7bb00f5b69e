"""A small real store, packed by `stoker pack` from a random checkpoint with a trained tokenizer; ways to run stoker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generate.stores import pack, write_checkpoint

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("STOKER_")},
    "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb",
}  # fmt: skip


def stoker_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "stoker", *map(str, arguments)]


def stoker(*arguments: object, stdin: str = "", timeout: float = 300, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; stdin is a pipe."""
    return subprocess.run(
        stoker_command(*arguments), input=stdin, capture_output=True, text=True, timeout=timeout,
        env={**ENVIRONMENT, **extra}, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a chat template, 8 bits, 2 layers, 8 experts, 512 tokens of vocabulary."""
    base = tmp_path_factory.mktemp("models")
    return pack(write_checkpoint(base / "checkpoint"), base / "store", "--bits", 8, "--group-size", 32)


@pytest.fixture(scope="session")
def plain_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template, in bf16."""
    base = tmp_path_factory.mktemp("plain")
    return pack(write_checkpoint(base / "checkpoint", chat_template=False), base / "store", "--bits", 16)
