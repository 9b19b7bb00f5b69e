"""How many reads to keep in flight: measured on the store itself at load, in well under a second.

More reads in flight than the device needs for its full rate only make all of them arrive later, and a step can compute
each expert as it lands. Knows records and the read queue; no model.
"""

from __future__ import annotations

import random
import time

from stoker.ids import Extent
from stoker.native.io import Arena, ReadQueue
from stoker.store.reader import Store

DEPTHS = (3, 4, 8, 16)  # with two the device would idle whenever the thread that reads waits for a core
GOOD_ENOUGH = 0.9  # of the best rate
FOR_MANY = 4  # at least, for several answers at once: their many reads are a queue in any case
MEASURE_BYTES = 48 << 20  # at each depth
MEASURE_SECONDS = 0.03
ROUNDS = 3  # the best of each: a neighbour can only slow a read down


def measured_depth(store: Store, *, backend: str = "auto", direct: bool = True) -> tuple[int, float]:
    """(depth, bytes per second): the least depth that comes near enough to the best rate over random records.

    Buffered reads come from the page cache as often as not and say nothing: they get a depth of 4 and no rate.
    """
    if not direct:
        return 4, 0.0
    records = [store.record(pool.id, expert) for pool in store.pools for expert in range(pool.experts)]
    longest = max(extent.length for extent in records)
    chosen = random.Random(0)
    with Arena(DEPTHS[-1] * longest) as arena:
        rates = dict.fromkeys(DEPTHS, 0.0)
        for _ in range(ROUNDS):
            for depth in DEPTHS:
                rates[depth] = max(rates[depth], _rate(records, arena, depth, longest, chosen, backend))
    best = max(rates.values())
    return next(depth for depth in DEPTHS if rates[depth] >= GOOD_ENOUGH * best), best


def _rate(records: list[Extent], arena: Arena, depth: int, longest: int, chosen: random.Random, backend: str) -> float:
    with ReadQueue(depth=depth, backend=backend) as queue:
        files = {extent.file: queue.open(extent.file) for extent in {r.file: r for r in records}.values()}
        started, done = time.perf_counter(), 0
        tickets: list[tuple[int, int]] = []
        while done + len(tickets) * longest < MEASURE_BYTES and time.perf_counter() - started < MEASURE_SECONDS:
            extent = chosen.choice(records)
            slot = arena.address + (done // longest + len(tickets)) % depth * longest
            tickets.append((queue.submit(files[extent.file], extent.offset, extent.length, slot), extent.length))
            if len(tickets) == depth:
                ticket, length = tickets.pop(0)
                queue.wait(ticket)
                done += length
        for ticket, length in tickets:
            queue.wait(ticket)
            done += length
        return done / (time.perf_counter() - started)
