"""Residents ranked by a score that only ever grows: the shared part of LFU and decayed LFU.

A heap holds one lower bound for each resident (its score when it was last looked at). Touching raises the score and
leaves the heap alone; evicting refreshes bounds until the top one is true. Amortised O(log n).
"""

from abc import abstractmethod
from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from stoker.residency.policies.base import Policy, all_protected


class ScoredPolicy(Policy):
    """`_score_of(key)` never falls; `_heap` holds (lower bound, admission number, key), one entry a key."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[Hashable, None] = {}
        self._heap: list[tuple[Any, int, Hashable]] = []
        self._in_heap: set[Hashable] = set()
        self._admissions = 0

    @abstractmethod
    def _score_of(self, key: Hashable) -> Any:
        """The score now; larger stays longer."""

    def remove(self, key: Hashable) -> None:
        del self.resident[key]  # its heap entry stays as a bound and is dropped when it surfaces

    def _insert(self, key: Hashable) -> None:
        self.resident[key] = None
        if key not in self._in_heap:
            self._admissions += 1
            self._in_heap.add(key)
            heappush(self._heap, (self._score_of(key), self._admissions, key))

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        heap, resident = self._heap, self.resident
        passed_over = []
        while heap:
            bound, number, key = heap[0]
            if key not in resident:
                self._in_heap.discard(heappop(heap)[2])
                continue
            score = self._score_of(key)
            if score > bound:
                heapreplace(heap, (score, number, key))
            elif key in protected:
                passed_over.append(heappop(heap))
            else:
                heappop(heap)
                self._in_heap.discard(key)
                del resident[key]
                break
        else:
            key = None
        for entry in passed_over:
            heappush(heap, entry)
        if key is None:
            raise all_protected(len(resident), protected)
        return key

    def _rebuild_heap(self) -> None:
        """Drop entries of keys that left and take every bound anew (after scores were rescaled)."""
        self._heap = [(self._score_of(key), number, key) for _, number, key in self._heap if key in self.resident]
        self._in_heap = {key for _, _, key in self._heap}
        heapify(self._heap)
