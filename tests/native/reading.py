"""What the tests of native reading share: a file of records, and a queue that reads record i to slot i."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stoker.errors import StokerError
from stoker.native.io import Arena, ReadQueue

BLOCK = 4096
RECORD = 16 * BLOCK
RECORDS = 64
SENTINEL = 0x5C
DELAY_NS = 200_000_000  # long enough that a loaded machine submits everything meanwhile

BACKENDS = ["io_uring", "threads"]
MODES = [(backend, direct) for backend in BACKENDS for direct in (True, False)]


def make_queue(depth: int, backend: str, direct: bool = True) -> ReadQueue:
    try:
        return ReadQueue(depth, backend, direct)
    except StokerError as error:
        if backend == "io_uring":
            pytest.skip(f"this kernel allows no io_uring: {error}")
        raise


def content(arena: Arena, slot: int, nbytes: int = RECORD) -> bytes:
    return arena.tensor(slot * RECORD, nbytes).numpy().tobytes()


def untouched(arena: Arena, slot: int) -> bool:
    return bool((arena.tensor(slot * RECORD, RECORD) == SENTINEL).all())


def record(data: bytes, index: int) -> bytes:
    return data[index * RECORD : (index + 1) * RECORD]


class Reader:
    """A queue on the file of records, reading record i to slot i."""

    def __init__(self, queue: ReadQueue, path: Path, arena: Arena) -> None:
        self.queue, self.arena = queue, arena
        self.file = queue.open(path)

    def submit(self, index: int, *, prefetch: bool = False, deadline_ns: int = 0) -> int:
        address = self.arena.address + index * RECORD
        return self.queue.submit(
            self.file, index * RECORD, RECORD, address, prefetch=prefetch, deadline_ns=deadline_ns, tag=index
        )

    def hold(self, index: int) -> int:
        """A read that keeps one place of the queue in flight for DELAY_NS; returns once it has started."""
        self.queue.inject(1, "delay", DELAY_NS)
        ticket = self.submit(index)
        while self.queue.state(ticket) == "pending":
            time.sleep(0.0005)
        return ticket

    def start_order(self, tickets: dict[str, int]) -> list[str]:
        for ticket in tickets.values():
            self.queue.wait(ticket)
        return sorted(tickets, key=lambda name: self.queue.completion(tickets[name]).start_ns)
