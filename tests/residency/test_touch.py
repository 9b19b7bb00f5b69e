"""Pages are made ahead of the reads, beside them, without harm to what they bring; closing does not wait."""

import random
import sys
import time
from pathlib import Path

import pytest

from stoker.errors import StokerError
from stoker.native.io import Arena, ReadQueue
from stoker.residency.touch import STEP_BYTES, Toucher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")


def test_all_pages_are_there_when_it_is_done() -> None:
    with Arena(5 * STEP_BYTES + 4096) as arena:
        toucher = Toucher(arena)
        toucher.wait()
        assert toucher.touched_bytes == arena.nbytes == arena.pages().resident_bytes
        toucher.stop()


def test_stopping_leaves_the_rest_alone() -> None:
    with Arena(4 << 30) as arena:
        toucher = Toucher(arena)
        while toucher.touched_bytes == 0:
            time.sleep(0.001)
        toucher.stop()
        done = toucher.touched_bytes
        assert 0 < done < arena.nbytes
        assert arena.pages().resident_bytes >= done


def test_reads_beside_it_bring_their_bytes(tmp_path: Path) -> None:
    """Reads land all over the arena while its pages are touched: every byte is the file's, also where both met."""
    record, count = 64 << 10, 512
    data = random.Random(5).randbytes(record * count)
    path = tmp_path / "records"
    path.write_bytes(data)
    with Arena(record * count) as arena, ReadQueue(depth=8) as queue:
        file = queue.open(path)
        toucher = Toucher(arena)
        order = random.Random(6).sample(range(count), count)
        tickets = [queue.submit(file, n * record, record, arena.address + n * record) for n in order]
        for ticket in tickets:
            queue.wait(ticket)
        toucher.wait()
        assert bytes(arena.tensor(0, len(data)).numpy()) == data


def test_a_part_of_an_arena_is_touched_alone() -> None:
    with Arena(8 * STEP_BYTES, huge_pages=False) as arena:
        arena.populate(3 * STEP_BYTES + 4096, STEP_BYTES)
        assert arena.pages().resident_bytes == STEP_BYTES
        arena.populate(0, 0)
        assert arena.pages().resident_bytes == STEP_BYTES
        for offset, nbytes in ((0, 9 * STEP_BYTES), (-1, 4096), (8 * STEP_BYTES, 1)):
            with pytest.raises(StokerError, match="outside the arena"):
                arena.populate(offset, nbytes)
