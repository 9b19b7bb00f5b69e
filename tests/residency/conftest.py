"""Fixtures: three pools of different record sizes in one real file, and a real read queue on each backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.native.io import ReadQueue
from tests.residency.records import RecordFile


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    """Pools of 16, 12 and 24 experts with records of 2, 3 and 4 blocks."""
    return RecordFile.write(tmp_path_factory.mktemp("store") / "experts.bin", (16, 12, 24), (2, 3, 4))


@pytest.fixture(params=["io_uring", "threads"])
def queue(request: pytest.FixtureRequest) -> Iterator[ReadQueue]:
    with ReadQueue(depth=4, backend=request.param) as opened:
        yield opened


@pytest.fixture
def big_store(tmp_path: Path) -> RecordFile:
    """One pool of 24 experts with records of 64 KiB."""
    return RecordFile.write(tmp_path / "big.bin", (24,), (16,))
