"""Least frequently and recently used: the smallest `uses / (age + 1)` leaves; age: events of this cache since the use.

The order changes with time, so residents are ranked anew when one must leave (an event that several must leave ranks
once). Among equals the one admitted first leaves. Uses are never reset and outlive residency.
"""

from collections.abc import Collection, Hashable, Sequence
from math import inf

import numpy as np

from stoker.residency.policies.base import Policy, all_protected

SMALL = 48  # residents up to which plain Python ranks faster than vector operations


class LFRU(Policy):
    name = "lfru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, None] = {}
        self._uses: dict[Hashable, int] = {}
        self._last: dict[Hashable, int] = {}
        self._event = 0

    def touch(self, keys: Sequence[Hashable]) -> None:
        self._event = event = self._event + 1
        uses, last = self._uses, self._last
        for key in keys:
            last[key] = event
            uses[key] = uses.get(key, 0) + 1

    def remove(self, key: Hashable) -> None:
        del self.resident[key]

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = None
        self._uses.setdefault(key, 0)
        self._last.setdefault(key, 0)

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        return self._evict_worst(1, protected)[0]

    def _admit_all(self, keys: Sequence[Hashable], protected: Collection[Hashable]) -> None:
        excess = len(self.resident) + len(keys) - self.capacity
        if excess > 0:
            self._evict_worst(excess, protected)
        for key in keys:
            self._insert(key)

    def _evict_worst(self, count: int, protected: Collection[Hashable]) -> list[Hashable]:
        """Remove and return `count` residents, worst first. Raises BudgetError where fewer are not protected."""
        now, uses, last, held = self._event + 1, self._uses, self._last, frozenset(protected)
        free = [key for key in self.resident if key not in held]
        if len(free) < count:
            raise all_protected(len(self.resident), protected)
        if len(free) <= SMALL:
            worths = [uses[key] / (now - last[key]) for key in free]
            victims = []
            for _ in range(count):  # few are wanted: no sort
                place = worths.index(min(worths))
                victims.append(free[place])
                worths[place] = inf
        else:
            uses_n = np.fromiter(map(uses.__getitem__, free), float, len(free))
            last_n = np.fromiter(map(last.__getitem__, free), float, len(free))
            victims = [free[place] for place in (uses_n / (now - last_n)).argsort(kind="stable")[:count]]
        for key in victims:
            del self.resident[key]
        return victims
