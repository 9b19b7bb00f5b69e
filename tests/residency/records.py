"""A file of records with recognisable bytes and an object with a store's outward form, for the tests of residency.

Every 64-bit word of a record names pool, expert and its own place, so a slot made of two records, or one that is not
whole, shows.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stoker.ids import Extent

BLOCK = 4096


def record_bytes(pool: int, expert: int, nbytes: int) -> bytes:
    words = np.arange(nbytes // 8, dtype=np.uint64)
    return (words + np.uint64((pool * 1009 + expert + 1) << 32)).tobytes()


@dataclass(frozen=True)
class RecordFile:
    """`pools[p]` has `.experts` and `.layout.record_bytes`; records lie pool after pool, behind one block of header."""

    path: Path
    pools: list[Any]
    starts: list[int]

    @staticmethod
    def write(path: Path, experts: Sequence[int], blocks: Sequence[int]) -> "RecordFile":
        pools, starts = [], []
        with path.open("wb") as file:
            file.write(b"\0" * BLOCK)
            for pool, (count, size) in enumerate(zip(experts, blocks, strict=True)):
                starts.append(file.tell())
                pools.append(SimpleNamespace(id=pool, experts=count, layout=SimpleNamespace(record_bytes=size * BLOCK)))
                for expert in range(count):
                    file.write(record_bytes(pool, expert, size * BLOCK))
        return RecordFile(path, pools, starts)

    def record(self, pool: int, expert: int) -> Extent:
        length = self.pools[pool].layout.record_bytes
        assert 0 <= expert < self.pools[pool].experts
        return Extent(str(self.path), self.starts[pool] + expert * length, length)

    def holds(self, pool: int, expert: int, address: int) -> bool:
        """Whether the memory at `address` is the whole record, byte for byte."""
        length = self.pools[pool].layout.record_bytes
        return ctypes.string_at(address, length) == record_bytes(pool, expert, length)
