"""Least frequently used: the key with the fewest uses ever leaves; among equals the one used longest ago.

Counts are never reset and outlive residency, so old favourites linger: a known weakness, kept as a reference point.
"""

from collections.abc import Hashable, Sequence

from stoker.residency.policies.scored import ScoredPolicy


class LFU(ScoredPolicy):
    name = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[Hashable, tuple[int, int]] = {}  # key -> (count, event of the last use)
        self._event = 0

    def touch(self, keys: Sequence[Hashable]) -> None:
        self._event += 1
        uses, event = self._uses, self._event
        for key in keys:
            uses[key] = (uses[key][0] + 1, event) if key in uses else (1, event)

    def _score_of(self, key: Hashable) -> tuple[int, int]:
        return self._uses.get(key, (0, 0))
