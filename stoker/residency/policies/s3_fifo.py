"""S3-FIFO: a small queue for newcomers, a main queue for what proved itself, a ghost queue of keys that failed.

Small holds about a tenth of the slots. A use raises a key's 2-bit counter. What leaves small moves to main when its
counter is above 1, else it leaves the cache and is remembered as a ghost; a ghost that returns goes straight to main.
What reaches the end of main goes round again while its counter is above 0. Yang et al., SOSP 2023. Amortised O(1).
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Sequence

from stoker.residency.policies.base import Policy, all_protected

COUNTER_MAX = 3


class S3FIFO(Policy):
    name = "s3-fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, int] = {}  # key -> counter
        self._small: deque[Hashable] = deque()  # oldest first
        self._main: deque[Hashable] = deque()
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
        (self._small if key in self._small else self._main).remove(key)

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main.append(key)
        else:
            self._small.append(key)

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        counters, small, main, small_slots = self.resident, self._small, self._main, self.small_slots
        looks = 2 + 2 * len(counters) * (COUNTER_MAX + 1)  # in that many every counter can be worn down
        for _ in range(looks):
            if small and (len(small) >= small_slots or not main):
                key = small.popleft()
                if counters[key] > 1:  # it proved itself
                    counters[key] = 0
                elif key not in protected:
                    self._remember(key)
                    break
            else:
                key = main.popleft()
                if counters[key]:
                    counters[key] -= 1
                elif key not in protected:
                    break
            main.append(key)
        else:
            return self._evict_any(protected)
        del counters[key]
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
