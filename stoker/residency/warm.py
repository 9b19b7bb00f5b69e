"""Warm-up: read every expert of the pools that fit whole, before the first step asks, in the order of the disk.

Keeps the read queue full and waits for the oldest read only, so that the device sees one long sequential run.
"""

from collections import deque
from collections.abc import Sequence

from stoker.residency.kept import KeptSlots
from stoker.residency.reads import Reads

AHEAD = 2  # reads kept under way, as a multiple of the queue's depth


def warm(pools: Sequence[KeptSlots], reads: Reads) -> int:
    """Records read. A failed read raises ReadError; what had landed stays and the rest is read when asked for."""
    missing = [
        (reads.extent(slots.pool, expert)[:2], slots, expert)
        for slots in pools
        if slots.capacity >= slots.experts
        for expert in range(slots.experts)
        if expert not in slots.held
    ]
    missing.sort(key=lambda item: item[0])
    under_way: deque[tuple[KeptSlots, int]] = deque()
    for _, slots, expert in missing:
        if len(under_way) >= AHEAD * reads.queue.depth:
            _settle(under_way)
        started = slots.take(expert, set())
        assert started is not None, "a pool that fits whole has a free slot for each missing expert"
        under_way.append((slots, expert))
    while under_way:
        _settle(under_way)
    return len(missing)


def _settle(under_way: deque[tuple[KeptSlots, int]]) -> None:
    slots, expert = under_way.popleft()
    slots.await_whole(expert)
