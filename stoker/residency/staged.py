"""The staged path: whoever predicts fills slots for the step to come; the step takes what is there and reads the rest.

Double-buffered by rule, not by place: one half of the slots may be staged for the next step while the other half
serves this one, and an expert that is in both is shared, not read again. What neither step needs leaves first in,
first out.
"""

from collections.abc import Sequence

from stoker.residency.kept import KeptSlots
from stoker.residency.lease import Lease
from stoker.residency.reads import Reads
from stoker.residency.slots import Slot


class StagedSlots(KeptSlots):
    """`fresh` is the set staged for the step to come."""

    def __init__(self, pool: int, experts: int, slots: list[Slot], reads: Reads) -> None:
        super().__init__(pool, experts, slots, reads)
        self.width = max(1, self.capacity // 2)

    def stage(self, experts: Sequence[int]) -> int:
        """Fill the next buffer with the first `width` of `experts`, replacing what was staged and not used yet.

        Returns how many of `experts` are there or under way; the step reads the others on demand.
        """
        wanted = list(dict.fromkeys(experts))[: self.width]
        self.cancel_prefetches(but=wanted)
        self.fresh = set()
        self.prefetch(wanted)
        return len(self.fresh)

    def acquire(self, experts: Sequence[int]) -> Lease:
        lease = super().acquire(experts)
        self._counters.staged_fallbacks += lease.demand_reads
        return lease

    def _touch(self, experts: Sequence[int]) -> None:
        """Demand has no say in who leaves."""

    def _admit(self, expert: int, protected: set[int]) -> int | None:
        if self._free:
            return None
        return next((held for held in self.held if held not in protected and held not in self.fresh), None)

    def _forget(self, expert: int) -> None:
        """Nothing is remembered beyond the slots themselves."""
