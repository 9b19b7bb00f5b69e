"""First use of memory: how fast it comes, and how much of the computing stands still meanwhile.

On a virtual machine whose memory was given back, the host has to find each page, and a first prompt fills gigabytes of
slots. What another program has just freed comes first and fast, so much is used, and the median part of it counts;
measure on a machine that has been idle for some seconds. Knows no model.
"""

import statistics
import threading
import time
from collections.abc import Sequence

import psutil
import torch

from stoker.bench.probe_kernels import DENSE, HIDDEN, SomeDense, fill, median_s
from stoker.native import kernels
from stoker.native.io import Arena
from stoker.plan.profile import FirstUse

FRESH_BYTES, LEAST_BYTES = 3 << 29, 256 << 20
PARTS, LEAST_PARTS = 16, 8
MOST_S = 2.0  # parts that a slow host would find later are left out
WEIGHTS_BYTES = 64 << 20
TOKENS = 64  # a product of about a millisecond


def measure(threads: int) -> FirstUse:
    """One thread uses up to a gigabyte and a half for the first time while `threads` compute, then half of that while
    nothing is computed."""
    before, nbytes = kernels.threads(), max(LEAST_BYTES, min(FRESH_BYTES, psutil.virtual_memory().available // 4))
    with torch.inference_mode(), Arena(WEIGHTS_BYTES) as weights:
        fill(weights)
        dense, x, out = SomeDense(weights), torch.randn(TOKENS, HIDDEN), torch.empty(TOKENS, DENSE.rows)
        try:
            kernels.set_threads(threads)
            usual_s = median_s(lambda: dense.product(x, out), seconds=0.3)
            user, alone = _User(nbytes // PARTS, PARTS), _User(nbytes // PARTS, LEAST_PARTS)
            products: list[tuple[float, float]] = []  # begin, end
            user.start()
            while user.is_alive():
                started = time.perf_counter()
                dense.product(x, out)
                products.append((started, time.perf_counter()))
            user.join()
            usual_s = min(usual_s, median_s(lambda: dense.product(x, out), seconds=0.3))
            alone.run()
            for arena in (*user.held, *alone.held):
                arena.close()
            return first_use(user.parts, user.part_bytes, products, usual_s, alone.parts)
        finally:
            kernels.set_threads(before)


class _User(threading.Thread):
    """Uses up to `most` arenas one after the other. parts: (begin, end) of each; held: the arenas."""

    def __init__(self, part_bytes: int, most: int) -> None:
        super().__init__()
        self.part_bytes, self.most = part_bytes, most
        self.parts, self.held = list[tuple[float, float]](), list[Arena]()

    def run(self) -> None:
        end = time.perf_counter() + MOST_S
        while len(self.held) < LEAST_PARTS or (len(self.held) < self.most and time.perf_counter() < end):
            self.held.append(Arena(self.part_bytes))
            started = time.perf_counter()
            self.held[-1].populate()
            self.parts.append((started, time.perf_counter()))


def first_use(
    parts: Sequence[tuple[float, float]],
    part_bytes: int,
    products: Sequence[tuple[float, float]],
    usual_s: float,
    alone: Sequence[tuple[float, float]],
) -> FirstUse:
    """From when each part was used and each product ran (begin, end in s). What was at hand counts for nothing."""
    usual_part_s, alone_s = (statistics.median(end - begin for begin, end in some) for some in (parts, alone))
    found = [(begin, end) for begin, end in parts if end - begin > usual_part_s / 2]
    took_s = sum(end - begin for begin, end in found)
    done = sum(
        max(0.0, min(end, last) - max(begin, first)) / (last - first)
        for begin, end in found
        for first, last in products
    )
    holds = min(1.0, max(0.0, 1 - done * usual_s / took_s))
    return FirstUse(part_bytes / usual_part_s, holds, max(part_bytes / usual_part_s, part_bytes / alone_s))
