"""The floor of a lossless cache: Belady's MIN with bypass, and MIN that sees only a window ahead. Offline, by next use.

After each event the cache keeps, of what it held and what the event brought, the experts with the nearest next uses;
the newcomers compete too (bypass), so nothing is protected. Event-atomic: hits are taken before.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from stoker.plan.routes import Stream


def next_uses(stream: Stream) -> np.ndarray:
    """For each entry of `stream.experts` the event that needs the same expert next; len(stream) where none does."""
    order = np.argsort(stream.experts, kind="stable")
    events = stream.event_of[order]
    following = np.full(len(order), len(stream))
    same = stream.experts[order][1:] == stream.experts[order][:-1]
    following[:-1][same] = events[1:][same]
    result = np.empty_like(following)
    result[order] = following
    return result


def min_misses(stream: Stream, capacity: int) -> np.ndarray:
    """Misses of each event under MIN with bypass, int64 [events]. Belady 1966, on sets (Zhang 2608.07911)."""
    never = len(stream)
    base = int(stream.experts.max(initial=0)) + 1  # code = -(next use * base + expert): the heap's top is farthest
    nexts = next_uses(stream)
    codes = (-(nexts * base + stream.experts)).tolist()
    experts, starts = stream.experts.tolist(), stream.starts.tolist()
    last_code = -(never * base)
    resident: dict[int, int] = {}  # expert -> its code
    heap: list[int] = []
    misses = np.empty(len(stream), np.int64)
    for event, (low, high) in enumerate(pairwise(starts)):
        missed = 0
        for expert, code in zip(experts[low:high], codes[low:high], strict=True):
            if expert in resident:
                if code <= last_code:
                    del resident[expert]
                    continue
            else:
                missed += 1
                if code <= last_code:
                    continue
            resident[expert] = code
            heappush(heap, code)
        while len(resident) > capacity:
            code = heappop(heap)
            expert = -code % base
            if resident.get(expert) == code:
                del resident[expert]
        if len(heap) > 8 * capacity + 64:  # codes of past uses lie below the live ones: drop them
            heap = list(resident.values())
            heapify(heap)
        misses[event] = missed
    return misses


def windowed_min_misses(stream: Stream, capacity: int, window_events: int) -> np.ndarray:
    """Misses of each event under MIN that knows the next `window_events` events, int64 [events].

    Experts without a use in sight go first, the least recently used of them first; then those with the farthest use.
    """
    nexts = next_uses(stream).tolist()
    experts, starts = stream.experts.tolist(), stream.starts.tolist()
    total = len(stream)
    in_sight: dict[int, int] = {}  # expert -> its next use
    beyond: OrderedDict[int, int] = OrderedDict()  # the same, least recently used first
    misses = np.empty(total, np.int64)
    for event, (low, high) in enumerate(pairwise(starts)):
        entering = event + window_events
        if entering < total:
            for expert in experts[starts[entering] : starts[entering + 1]]:
                if beyond.get(expert) == entering:
                    in_sight[expert] = beyond.pop(expert)
        missed = high - low
        for place in range(high - 1, low - 1, -1):
            expert, following = experts[place], nexts[place]
            missed -= expert in in_sight
            in_sight.pop(expert, None)
            if following <= entering and following < total:
                in_sight[expert] = following
            else:
                beyond[expert] = following
        for _ in range(len(in_sight) + len(beyond) - capacity):
            if beyond:
                beyond.popitem(last=False)
            else:
                del in_sight[max(in_sight, key=in_sight.__getitem__)]
        misses[event] = missed
    return misses
