"""Stores of tiny random checkpoints, packed once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.checkpoint.source import open_checkpoint
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, plan_pack
from tests.runtime.tiny import make_checkpoint

Packer = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packer:
    """(architecture, bits) -> the store directory; the checkpoint lies beside it as `source`."""
    root = tmp_path_factory.mktemp("tiny")

    def make(architecture: str, bits: int) -> Path:
        source, store = root / architecture / "source", root / architecture / f"bits-{bits}"
        if not source.exists():
            make_checkpoint(architecture, source)
        if not store.exists():
            options = PackOptions(bits=bits, group_size=None if bits == 16 else 32)
            pack(plan_pack(open_checkpoint(source), options), store)
        return store

    return make
