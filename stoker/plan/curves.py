"""Hits against cache size, and what follows from it: how to share slots among layers.

One pass over a stream gives LRU's hits at every size (stack distances, event-atomic). The greedy allocation gives
slots to the pool that gains most per slot. Knows routes; no time, no policy but LRU.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from stoker.errors import OptionError
from stoker.plan.routes import Routes, Stream


def lru_hits_by_size(stream: Stream, experts: int, from_step: int = 0) -> np.ndarray:
    """Hits of a cache of c slots under event-atomic LRU, int64 [experts + 1], for c = 0 .. experts.

    Valid from the largest event's size on (below it, an event does not fit). Events before `from_step` warm up.
    """
    recency: list[int] = []  # most recent first
    distances: list[int] = []
    counted_from = int(np.searchsorted(stream.step, from_step))
    known: set[int] = set()
    for index, event in enumerate(stream.events()):
        if index >= counted_from:
            distances += [recency.index(expert) for expert in event if expert in known]
        known.update(event)
        recency = event + [expert for expert in recency if expert not in event]
    counts = np.bincount(distances, minlength=experts)[:experts]
    return np.concatenate([[0], np.cumsum(counts)])


def greedy_slots(hits_by_size: Sequence[np.ndarray], total: int, floors: Sequence[int], step: int = 4) -> list[int]:
    """Slots a pool, at most `total` in all, each at least its floor and at most its experts.

    Repeatedly extends the pool with the best gain per slot over any multiple of `step` that still fits (curves need not
    be concave). Raises OptionError where the floors alone do not fit.
    """
    slots = list(floors)
    left = total - sum(slots)
    if left < 0:
        raise OptionError("fewer slots than the layers need", where="slots", expected=f">= {sum(slots)}", got=total)
    queue: list[tuple[float, int, int]] = []

    def offer(pool: int) -> None:
        curve, size = hits_by_size[pool], slots[pool]
        most = min(len(curve) - 1 - size, left)
        widths = np.unique(np.append(np.arange(step, most + 1, step), most)) if most > 0 else np.empty(0, int)
        if len(widths):
            gains = (curve[size + widths] - curve[size]) / widths
            best = int(np.argmax(gains))
            heappush(queue, (-float(gains[best]), pool, int(widths[best])))

    for pool in range(len(slots)):
        offer(pool)
    while queue and left > 0:
        _, pool, width = heappop(queue)
        if width <= left:
            slots[pool] += width
            left -= width
        offer(pool)
    return slots


def greedy_for(routes: Routes, total: int, train_steps: int | None = None, step: int = 4) -> list[int]:
    """The greedy allocation of `total` slots from LRU's curves over the first `train_steps` steps (default: half)."""
    train = routes.between(0, train_steps if train_steps is not None else routes.steps // 2)
    curves = [lru_hits_by_size(stream, routes.experts) for stream in train.streams]
    floors = [int(stream.needed.max(initial=1)) for stream in routes.streams]
    return greedy_slots(curves, total, floors, step)
