"""Least frequently used: the key with the fewest uses ever leaves; among equals the one used longest ago.

Counts are never reset and outlive residency, so old favourites linger: a known weakness, kept as a reference point.
"""

from collections.abc import Hashable, Sequence

from stoker.residency.policies.scored import ScoredPolicy

EVENT = 2.0**-30  # the whole part of a score is the count, its fraction the event of the last use


class LFU(ScoredPolicy):
    name = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._events = 0

    def touch(self, keys: Sequence[Hashable]) -> None:
        self._events += 1
        scores, one_more = self._scores, 1.0 + self._events * EVENT
        for key in keys:
            scores[key] = scores.get(key, 0.0) // 1.0 + one_more
