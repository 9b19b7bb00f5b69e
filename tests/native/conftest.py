"""Fixtures of the native tests: each instruction set in turn; a file of random records on the disk, and an arena with a
slot for each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.native import kernels
from stoker.native.io import Arena, drop_cache
from tests.native.isas import available
from tests.native.reading import RECORD, RECORDS, SENTINEL


@pytest.fixture(params=available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.isa()
    kernels.force_isa(request.param)
    yield request.param
    kernels.force_isa(before)


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(7).randbytes(RECORD * RECORDS)


@pytest.fixture(scope="module")
def path(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("io") / "records.bin"
    file.write_bytes(data)
    drop_cache(file)
    return file


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(RECORD * RECORDS) as arena:
        arena.tensor(0, arena.nbytes).fill_(SENTINEL)
        yield arena
