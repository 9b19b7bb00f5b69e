"""Expert records for training: read in the order in which they are needed, a few ahead, each once a pass.

Owns a small ring of slots, a read queue and the count of bytes; a record is valid until the next one is asked for.
Knows no arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stoker.native.io import Arena, ReadQueue
from stoker.native.kernels import Matrix
from stoker.quant.formats import ExpertLayout, PlacedMatrix
from stoker.store.reader import Store

RING_RECORDS = 6
DEPTH = 2  # the device gives its full rate with two reads in flight


class Records:
    """Reads of one store. bytes_read: what was asked of the device since opening."""

    def __init__(self, store: Store, ring_records: int = RING_RECORDS, *, direct: bool = True) -> None:
        self.store, self.bytes_read = store, 0
        self._record_bytes = max(pool.layout.record_bytes for pool in store.pools)
        self._ring = ring_records
        self._arena = Arena(ring_records * self._record_bytes)
        self._queue = ReadQueue(depth=DEPTH, direct=direct)
        self._files: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    def stream(self, pool: int, experts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(expert, its record as uint8) in the given order. Raises ReadError naming file and extent."""
        waiting: deque[tuple[int, int, int]] = deque()
        free = deque(range(self._ring))
        ahead = iter(experts)

        def submit() -> None:
            while free and (expert := next(ahead, None)) is not None:
                slot = free.popleft()
                waiting.append((expert, slot, self._submit(pool, expert, slot)))

        submit()
        try:
            while waiting:
                expert, slot, ticket = waiting[0]
                self._queue.wait(ticket)
                waiting.popleft()
                yield expert, self._arena.tensor(slot * self._record_bytes, self.store.record(pool, expert).length)
                free.append(slot)
                submit()
        finally:  # a consumer that stopped, or a failed read: nothing may land later in a slot that is given away
            for _, _, ticket in waiting:
                if not self._queue.cancel(ticket):
                    self._queue.wait(ticket)

    def _submit(self, pool: int, expert: int, slot: int) -> int:
        extent = self.store.record(pool, expert)
        if extent.file not in self._files:
            self._files[extent.file] = self._queue.open(extent.file)
        self.bytes_read += extent.length
        address = self._arena.address + slot * self._record_bytes
        return self._queue.submit(self._files[extent.file], extent.offset, extent.length, address, tag=expert)

    def close(self) -> None:
        self._queue.close()
        self._arena.close()


def matrices_of(record: Tensor, layout: ExpertLayout) -> tuple[Matrix, Matrix, Matrix]:
    """gate [F, D], up [F, D] and down [D, F] on the record's own bytes, for dequantising."""
    gate, up, down = (_matrix(record, placed) for placed in (layout.gate, layout.up, layout.down))
    return gate, up, down


def _matrix(record: Tensor, placed: PlacedMatrix) -> Matrix:
    spec = placed.spec

    def part(start: int, nbytes: int) -> Tensor:
        return record[start : start + nbytes]

    scales = part(placed.scales, spec.scales_bytes) if spec.scales_bytes else None
    biases = part(placed.biases, spec.scales_bytes) if spec.scales_bytes else None
    row_bias = None
    if placed.row_bias is not None:
        row_bias = part(placed.row_bias, 4 * spec.rows).view(torch.float32)
    return Matrix(spec, part(placed.codes, spec.codes_bytes), scales, biases, row_bias, activation_bits=16)
