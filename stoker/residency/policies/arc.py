"""ARC: two LRU lists, keys used once lately (T1) and more than once (T2), and the ghosts that each evicted (B1, B2).

A miss that B1 remembers moves the target size of T1 up, one that B2 remembers moves it down. Megiddo and Modha,
FAST 2003. All operations O(1) but for skipping protected keys.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

from stoker.residency.policies.base import Policy, all_protected

Queue = OrderedDict[Hashable, None]


class ARC(Policy):
    """Where the list that should shrink holds protected keys only, the other list gives one up."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, Queue] = {}  # key -> the list that holds it
        self._t1: Queue = OrderedDict()  # oldest use first
        self._t2: Queue = OrderedDict()
        self._b1: Queue = OrderedDict()
        self._b2: Queue = OrderedDict()
        self._target = 0.0  # wanted length of t1

    def touch(self, keys: Sequence[Hashable]) -> None:
        resident, t2 = self.resident, self._t2
        for key in keys:
            queue = resident.get(key)
            if queue is None:
                continue
            if queue is t2:
                t2.move_to_end(key)
            else:
                del queue[key]
                t2[key] = None
                resident[key] = t2

    def admit(self, key: Hashable, protected: Collection[Hashable]) -> Hashable | None:
        resident, t1, b1, b2, capacity = self.resident, self._t1, self._b1, self._b2, self.capacity
        assert key not in resident, f"{key!r} is resident already"
        queue = self._t2
        in_b2 = False
        if key in b1:
            self._target = min(self._target + max(1.0, len(b2) / len(b1)), float(capacity))
        elif key in b2:
            in_b2 = True
            self._target = max(self._target - max(1.0, len(b1) / len(b2)), 0.0)
        else:  # no list knows it: |T1| + |B1| must stay within c, all four lists within 2c
            queue = t1
            if len(t1) + len(b1) >= capacity:
                if b1:
                    b1.popitem(last=False)
            elif b2 and len(resident) + len(b1) + len(b2) >= 2 * capacity:
                b2.popitem(last=False)
        victim = self._leaver(in_b2, protected) if len(resident) >= capacity else None
        if in_b2:
            del b2[key]
        elif queue is not t1:
            del b1[key]
        resident[key] = queue
        queue[key] = None
        if len(t1) + len(b1) > capacity or (b2 and len(resident) + len(b1) + len(b2) > 2 * capacity):
            self._trim_ghosts()
        return victim

    def remove(self, key: Hashable) -> None:
        del self.resident.pop(key)[key]

    def resize(self, capacity: int) -> list[Hashable]:
        evicted = super().resize(capacity)
        self._target = min(self._target, float(capacity))
        self._trim_ghosts()
        return evicted

    def _leaver(self, incoming_in_b2: bool, protected: Collection[Hashable]) -> Hashable:
        """Move one key from the list that should shrink to its ghosts, and return it."""
        recent, frequent = (self._t1, self._b1), (self._t2, self._b2)
        length = len(self._t1)
        longer = length > self._target or (0 < length == self._target and incoming_in_b2)
        for queue, ghosts in (recent, frequent) if longer else (frequent, recent):
            for key in queue:
                if key not in protected:
                    del self.resident[key], queue[key]
                    ghosts[key] = None
                    return key
        raise all_protected(len(self.resident), protected)

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        return self._leaver(incoming in self._b2, protected)

    def _insert(self, key: Hashable) -> None:
        raise AssertionError("admit is overridden whole: it alone knows which list a newcomer joins")

    def _trim_ghosts(self) -> None:
        """The limits of `admit` after the change: a T1 that fills the cache leaves no room for its own ghosts."""
        while self._b1 and len(self._t1) + len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self.resident) + len(self._b1) + len(self._b2) > 2 * self.capacity:
            self._b2.popitem(last=False)
