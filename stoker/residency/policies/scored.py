"""Residents ranked by a score that only ever grows: the shared part of LFU and decayed LFU.

A small cache is ranked by sorting. A large one has a heap with one lower bound for each resident (its score when it was
last looked at): touching raises the score and leaves the heap alone, evicting refreshes bounds until the top one is
true, amortised O(log n). Either way all victims of an event are found at once; among equals the one admitted first
leaves.
"""

from collections.abc import Collection, Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from stoker.residency.policies.base import Policy, all_protected

SMALL = 48  # slots up to which sorting is faster
Entry = tuple[float, int, Hashable]  # lower bound, admission number, key


class ScoredPolicy(Policy):
    """Subclasses raise `_scores` in `touch`; a score never falls, but where all are rescaled. `_heap` holds one entry
    for each resident, and some of keys that left; it stays empty in a small cache."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, None] = {}  # in the order of admission
        self._scores: dict[Hashable, float] = {}  # outlives residency; larger stays longer
        self._heap: list[Entry] = []
        self._in_heap: set[Hashable] = set()
        self._admissions = 0

    def remove(self, key: Hashable) -> None:
        del self.resident[key]  # its heap entry stays as a bound and is dropped when it surfaces

    def resize(self, capacity: int) -> list[Hashable]:
        evicted = super().resize(capacity)
        self._rank_anew()
        return evicted

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = None
        score = self._scores.setdefault(key, 0.0)
        if self.capacity > SMALL and key not in self._in_heap:
            self._admissions += 1
            self._in_heap.add(key)
            heappush(self._heap, (score, self._admissions, key))

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
        held = frozenset(protected)
        if self._heap:
            victims = self._worst_of_heap(count, held)
        else:
            free = [key for key in self.resident if key not in held]
            victims = sorted(free, key=self._scores.__getitem__)[:count]
        if len(victims) < count:
            raise all_protected(len(self.resident), protected)
        for key in victims:
            del self.resident[key]
        return victims

    def _worst_of_heap(self, count: int, held: frozenset[Hashable]) -> list[Hashable]:
        """At most `count` residents that are not held, worst first; their entries are taken out."""
        heap, resident, scores = self._heap, self.resident, self._scores
        leaving: list[Entry] = []
        passed_over: list[Entry] = []
        while heap and len(leaving) < count:
            bound, number, key = heap[0]
            if key not in resident:
                heappop(heap)
                self._in_heap.discard(key)
            elif (score := scores[key]) > bound:
                heapreplace(heap, (score, number, key))
            else:
                (passed_over if key in held else leaving).append(heappop(heap))
        if len(leaving) < count:  # an error: nothing leaves
            passed_over += leaving
            leaving = []
        for entry in passed_over:
            heappush(heap, entry)
        victims = [key for _, _, key in leaving]
        self._in_heap.difference_update(victims)
        return victims

    def _rank_anew(self) -> None:
        """Build the heap from the residents, or none: the capacity or the scores changed."""
        self._heap, self._in_heap = [], set()
        if self.capacity > SMALL:
            self._heap = [(self._scores[key], number, key) for number, key in enumerate(self.resident)]
            self._in_heap = set(self.resident)
            self._admissions = len(self._heap)
            heapify(self._heap)
