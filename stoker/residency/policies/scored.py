"""Residents ranked by a score that only ever grows: the shared part of LFU and decayed LFU.

A heap holds one lower bound for each resident (its score when it was last looked at). Touching raises the score and
leaves the heap alone; evicting refreshes bounds until the top one is true, for all victims of an event at once.
Amortised O(log n).
"""

from collections.abc import Collection, Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from stoker.residency.policies.base import Policy, all_protected

Entry = tuple[float, int, Hashable]  # lower bound, admission number, key


class ScoredPolicy(Policy):
    """Subclasses raise `_scores` in `touch`; a score never falls, but where all are rescaled. `_heap` holds one entry
    for each resident, and some of keys that left."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, None] = {}
        self._scores: dict[Hashable, float] = {}  # outlives residency; larger stays longer
        self._heap: list[Entry] = []
        self._in_heap: set[Hashable] = set()
        self._admissions = 0

    def remove(self, key: Hashable) -> None:
        del self.resident[key]  # its heap entry stays as a bound and is dropped when it surfaces

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = None
        if key not in self._in_heap:
            self._admissions += 1
            self._in_heap.add(key)
            heappush(self._heap, (self._scores.get(key, 0.0), self._admissions, key))

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
        heap, resident, scores, held = self._heap, self.resident, self._scores, frozenset(protected)
        leaving: list[Entry] = []
        passed_over: list[Entry] = []
        while heap and len(leaving) < count:
            bound, number, key = heap[0]
            if key not in resident:
                heappop(heap)
                self._in_heap.discard(key)
            elif (score := scores.get(key, 0.0)) > bound:
                heapreplace(heap, (score, number, key))
            else:
                (passed_over if key in held else leaving).append(heappop(heap))
        enough = len(leaving) == count
        for entry in passed_over if enough else passed_over + leaving:
            heappush(heap, entry)
        if not enough:
            raise all_protected(len(resident), protected)
        victims = [key for _, _, key in leaving]
        for key in victims:
            del resident[key]
        self._in_heap.difference_update(victims)
        return victims

    def _rebuild_heap(self) -> None:
        """Drop entries of keys that left and take every bound anew (after scores were rescaled)."""
        self._heap = [
            (self._scores.get(key, 0.0), number, key) for _, number, key in self._heap if key in self.resident
        ]
        self._in_heap = {key for _, _, key in self._heap}
        heapify(self._heap)
