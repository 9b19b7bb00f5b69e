"""S3-FIFO: a small queue for newcomers, a main queue for what proved itself, a ghost queue of keys that failed.

Small holds about a tenth of the slots. A use raises a key's 2-bit counter. What leaves small moves to main when its
counter is above 1, else it leaves the cache and is remembered as a ghost; a ghost that returns goes straight to main.
What reaches the end of main goes round again while its counter is above 0. Yang et al., SOSP 2023. Amortised O(1).
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

from stoker.residency.policies.base import Policy, all_protected

COUNTER_MAX = 3


class S3FIFO(Policy):
    name = "s3-fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, int] = {}  # key -> counter
        self._small: OrderedDict[Hashable, None] = OrderedDict()  # oldest first
        self._main: OrderedDict[Hashable, None] = OrderedDict()
        self._ghost: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def small_slots(self) -> int:
        return max(1, self.capacity // 10)

    def touch(self, keys: Sequence[Hashable]) -> None:
        counters = self.resident
        for key in keys:
            if counters.get(key, COUNTER_MAX) < COUNTER_MAX:
                counters[key] += 1

    def remove(self, key: Hashable) -> None:
        del self.resident[key]
        self._small.pop(key, None)
        self._main.pop(key, None)

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        passes_left = 2 + 2 * len(self.resident) * (
            COUNTER_MAX + 1
        )  # every counter can be worn down in that many looks
        while passes_left:
            passes_left -= 1
            from_small = bool(self._small) and (len(self._small) >= self.small_slots or not self._main)
            victim = self._pass_small(protected) if from_small else self._pass_main(protected)
            if victim is not None:
                del self.resident[victim]
                return victim
        return self._evict_any(protected)

    def _pass_small(self, protected: Collection[Hashable]) -> Hashable | None:
        """Look at the oldest newcomer: promote it, keep it (protected), or evict it."""
        key, _ = self._small.popitem(last=False)
        if self.resident[key] > 1:
            self.resident[key] = 0
            self._main[key] = None
            return None
        if key in protected:
            self._main[key] = None
            return None
        self._remember(key)
        return key

    def _pass_main(self, protected: Collection[Hashable]) -> Hashable | None:
        key, _ = self._main.popitem(last=False)
        if self.resident[key] > 0 or key in protected:
            self.resident[key] = max(0, self.resident[key] - 1)
            self._main[key] = None
            return None
        return key

    def _remember(self, key: Hashable) -> None:
        self._ghost[key] = None
        while len(self._ghost) > self.capacity - self.small_slots:
            self._ghost.popitem(last=False)

    def _evict_any(self, protected: Collection[Hashable]) -> Hashable:
        for key in (*self._small, *self._main):
            if key not in protected:
                self.remove(key)
                return key
        raise all_protected(len(self.resident), protected)
