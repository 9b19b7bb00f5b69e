"""The hot path: a pool's resident slots under a cache policy. Hits are computed while misses arrive.

The policy's keys are always exactly the experts that hold a slot, those being read included.
"""

from collections.abc import Sequence

from stoker.errors import BudgetError, OptionError
from stoker.residency.kept import KeptSlots
from stoker.residency.policies import Policy
from stoker.residency.reads import Reads
from stoker.residency.slots import Slot
from stoker.residency.worth import Worth


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
        self._worth = Worth(experts)

    def contest(self, demand: Sequence[int]) -> tuple[list[int], list[int]]:
        self._touch(demand)
        contenders = dict.fromkeys([*self.held, *demand])
        ranked = self._worth.ranked(contenders)
        best, rest = ranked[: self.capacity], ranked[self.capacity :]
        return [expert for expert in best if expert not in self.held], [e for e in rest[::-1] if e in self.held]

    def _touch(self, experts: Sequence[int]) -> None:
        self.policy.touch(experts)
        self._worth.used(experts)

    def _admit(self, expert: int, protected: set[int]) -> int | None:
        try:
            victim = self.policy.admit(expert, protected)
        except BudgetError:  # everything is pinned: the lease waits or goes in waves
            return None
        return victim  # type: ignore[return-value]

    def _forget(self, expert: int) -> None:
        self.policy.remove(expert)
