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
        assert key not in self.resident, f"{key!r} is resident already"
        self._adapt(key)
        victim = self._evict(key, protected) if len(self.resident) >= self.capacity else None
        self._insert(key)
        self._trim_ghosts()
        return victim

    def remove(self, key: Hashable) -> None:
        del self.resident.pop(key)[key]

    def resize(self, capacity: int) -> list[Hashable]:
        evicted = super().resize(capacity)
        self._target = min(self._target, float(capacity))
        self._trim_ghosts()
        return evicted

    def _adapt(self, key: Hashable) -> None:
        if key in self._b1:
            step = max(1.0, len(self._b2) / len(self._b1))
            self._target = min(self._target + step, float(self.capacity))
        elif key in self._b2:
            step = max(1.0, len(self._b1) / len(self._b2))
            self._target = max(self._target - step, 0.0)
        else:
            self._forget_a_ghost()

    def _forget_a_ghost(self) -> None:
        """A key that no list knows is coming: |T1| + |B1| must stay within c, all four lists within 2c."""
        if len(self._t1) + len(self._b1) >= self.capacity:
            if self._b1:
                self._b1.popitem(last=False)
        elif self._b2 and len(self.resident) + len(self._b1) + len(self._b2) >= 2 * self.capacity:
            self._b2.popitem(last=False)

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        length = len(self._t1)
        longer = length > self._target or (0 < length == self._target and incoming in self._b2)
        lists = ((self._t1, self._b1), (self._t2, self._b2))
        for queue, ghosts in lists if longer else lists[::-1]:
            for key in queue:
                if key not in protected:
                    self.remove(key)
                    ghosts[key] = None
                    return key
        raise all_protected(len(self.resident), protected)

    def _insert(self, key: Hashable) -> None:
        remembered = key in self._b1 or key in self._b2
        self._b1.pop(key, None)
        self._b2.pop(key, None)
        queue = self._t2 if remembered else self._t1
        queue[key] = None
        self.resident[key] = queue

    def _trim_ghosts(self) -> None:
        """The same limits after the change: a T1 that fills the cache leaves no room for its own ghosts."""
        while self._b1 and len(self._t1) + len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self.resident) + len(self._b1) + len(self._b2) > 2 * self.capacity:
            self._b2.popitem(last=False)
