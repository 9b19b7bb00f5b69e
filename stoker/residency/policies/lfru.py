"""Least frequently and recently used: the smallest `uses / (age + 1)` leaves; age: events of this cache since the use.

The order changes with time, so residents are ranked anew in each event that evicts (one vectorised sort); further
evictions of the same event walk on along that ranking. Uses are never reset and outlive residency.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence

import numpy as np

from stoker.residency.policies.base import Policy, all_protected

SHORT_RANKING = 32  # places sorted at first; an event seldom evicts more


class LFRU(Policy):
    """Uses and ages of the residents lie in arrays by place, so that ranking them is a few vector operations."""

    name = "lfru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, int] = {}  # key -> place
        self._uses: dict[Hashable, int] = {}
        self._last: dict[Hashable, int] = {}
        self._event = 0
        self._key_at: list[Hashable] = []
        self._free: list[int] = []
        self._place_uses = np.empty(0)
        self._place_last = np.empty(0)
        self._ranking: Iterator[int] | None = None
        self._grow(capacity)

    def touch(self, keys: Sequence[Hashable]) -> None:
        self._event = event = self._event + 1
        self._ranking = None
        uses, last, resident = self._uses, self._last, self.resident
        place_uses, place_last = self._place_uses, self._place_last
        for key in keys:
            last[key] = event
            uses[key] = count = uses.get(key, 0) + 1
            if key in resident:
                place = resident[key]
                place_last[place] = event
                place_uses[place] = count

    def remove(self, key: Hashable) -> None:
        self._vacate(key)

    def resize(self, capacity: int) -> list[Hashable]:
        evicted = super().resize(capacity)
        self._grow(capacity)
        return evicted

    def _insert(self, key: Hashable) -> None:
        place = self._free.pop()
        self.resident[key] = place
        self._key_at[place] = key
        last = self._last.get(key, 0)
        self._place_uses[place] = self._uses.get(key, 0)
        self._place_last[place] = last
        if last != self._event:
            self._ranking = None  # not one of this event's keys, so it may be evicted in this event

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        for fresh in (False, True):  # a used-up ranking may have passed over keys that are free to go now
            if fresh or self._ranking is None:
                self._ranking = self._ranked()
            for place in self._ranking:
                key = self._key_at[place]
                if self.resident.get(key) == place and key not in protected:
                    self._vacate(key, keep_ranking=True)
                    return key
        raise all_protected(len(self.resident), protected)

    def _ranked(self) -> Iterator[int]:
        """Places, worst first; empty places are worth infinity. The far part is sorted only when it is reached."""
        worth = self._place_uses / (self._event + 1 - self._place_last)
        if len(worth) <= 2 * SHORT_RANKING:
            yield from worth.argsort().tolist()
            return
        split = worth.argpartition(SHORT_RANKING)
        near, far = split[:SHORT_RANKING], split[SHORT_RANKING:]
        yield from near[worth[near].argsort()].tolist()
        yield from far[worth[far].argsort()].tolist()

    def _vacate(self, key: Hashable, keep_ranking: bool = False) -> None:
        place = self.resident.pop(key)
        self._place_uses[place] = np.inf
        self._free.append(place)
        if not keep_ranking:
            self._ranking = None

    def _grow(self, capacity: int) -> None:
        """Make places for `capacity` keys; places are never given back."""
        more = capacity - len(self._key_at)
        if more <= 0:
            return
        self._free.extend(range(len(self._key_at) + more - 1, len(self._key_at) - 1, -1))
        self._key_at.extend([None] * more)
        self._place_uses = np.concatenate([self._place_uses, np.full(more, np.inf)])
        self._place_last = np.concatenate([self._place_last, np.zeros(more)])
