"""Least recently used: the key whose last use lies furthest back leaves. All operations O(1).

Within one event the keys count as used in the order in which the event lists them.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

from stoker.residency.policies.base import Policy, first_unprotected


class LRU(Policy):
    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: OrderedDict[Hashable, None] = OrderedDict()  # oldest use first

    def touch(self, keys: Sequence[Hashable]) -> None:
        resident = self.resident
        for key in keys:
            if key in resident:
                resident.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        del self.resident[key]

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        victim = first_unprotected(self.resident, protected)
        del self.resident[victim]
        return victim

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = None
