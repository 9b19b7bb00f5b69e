"""The hot path: a pool's resident slots under a cache policy. Hits are computed while misses arrive.

The policy's keys are always exactly the experts that hold a slot, those being read included.
"""

from collections.abc import Sequence

from stoker.errors import BudgetError, OptionError
from stoker.residency.kept import KeptSlots
from stoker.residency.policies import Policy
from stoker.residency.reads import Reads
from stoker.residency.slots import Slot


class HotSlots(KeptSlots):
    def __init__(self, pool: int, experts: int, slots: list[Slot], reads: Reads, policy: Policy) -> None:
        super().__init__(pool, experts, slots, reads)
        if policy.bypasses:
            raise OptionError(
                "this policy serves experts without keeping them, which needs slots that the hot path does not have",
                where=f"policy {policy.name}",
                remedy="give the policy transient slots, or choose another one",
            )
        self.policy = policy

    def _touch(self, experts: Sequence[int]) -> None:
        self.policy.touch(experts)

    def _admit(self, expert: int, protected: set[int]) -> int | None:
        try:
            victim = self.policy.admit(expert, protected)
        except BudgetError:  # everything is pinned: the lease waits or goes in waves
            return None
        return victim  # type: ignore[return-value]

    def _forget(self, expert: int) -> None:
        self.policy.remove(expert)
