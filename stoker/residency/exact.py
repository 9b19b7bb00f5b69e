"""The exact path: scratch slots, shared by all pools, that keep nothing between calls. The reference for the others.

Every acquire reads each of its experts once, on demand, and hands it out as it lands.
"""

from collections.abc import Sequence

from stoker.errors import ReadError
from stoker.residency.lease import Lease, no_room
from stoker.residency.reads import Reads
from stoker.residency.slots import Slot


class Scratch:
    """Slots that belong to nobody between uses. Given up while being read, one is free when the read is over."""

    def __init__(self, slots: list[Slot], reads: Reads) -> None:
        self.size = len(slots)
        self.reads = reads
        self._free = slots[::-1]
        self._draining: list[Slot] = []

    def take(self) -> Slot | None:
        """A free slot, or None. Never waits."""
        if not self._free:
            self._collect([slot for slot in self._draining if self.reads.over(slot)])
        return self._free.pop() if self._free else None

    def idle(self) -> bool:
        """Whether every slot is free, after collecting what has landed."""
        self._collect([slot for slot in self._draining if self.reads.over(slot)])
        return len(self._free) == self.size

    def take_or_wait(self) -> Slot | None:
        """A free slot, after waiting for given-up reads if need be; None when every slot is in use."""
        slot = self.take()
        while slot is None and self._draining:
            self._collect([self._draining[index] for index in self.reads.first(self._draining)])
            slot = self.take()
        return slot

    def give_back(self, slot: Slot) -> None:
        """A whole or cleared slot is free."""
        slot.clear()
        self._free.append(slot)

    def give_up(self, slot: Slot) -> None:
        """A slot whose read may be under way: its bytes are not wanted."""
        if self.reads.cancel(slot):
            self.give_back(slot)
        else:
            self._draining.append(slot)

    def _collect(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._draining.remove(slot)
            try:
                if self.reads.finish(slot) and slot.ahead:
                    self.reads.wasted(slot)
            except ReadError:
                pass  # nobody wanted these bytes
            self.give_back(slot)


class ExactSlots:
    """The home of one pool's leases on the exact path."""

    def __init__(self, pool: int, record_bytes: int, scratch: Scratch) -> None:
        self.pool = pool
        self.record_bytes = record_bytes
        self.reads = scratch.reads
        self._scratch = scratch

    def acquire(self, experts: Sequence[int]) -> Lease:
        lease = Lease(self, experts, [0] * len(experts))
        lease.todo.extend(range(len(experts)))
        lease.demand_reads = len(experts)
        self.reads.counters.demanded(0, len(experts), self.record_bytes)
        self.refill(lease)
        lease.in_waves = bool(lease.todo)
        return lease

    def refill(self, lease: Lease) -> None:
        while lease.todo:
            slot = self._scratch.take()
            if slot is None:
                return
            try:
                self.reads.start(slot, self.pool, lease.experts[lease.todo[0]])
            except BaseException:
                self._scratch.give_back(slot)
                lease.release()
                raise
            lease.pending.append((lease.todo.popleft(), slot))

    def make_room(self, lease: Lease) -> None:
        slot = self._scratch.take_or_wait()
        if slot is None:
            raise no_room(self.pool, self._scratch.size, self._scratch.size)
        self._scratch.give_back(slot)

    def settle(self, slot: Slot) -> bool:
        return self.reads.finish(slot)

    def abandon(self, slot: Slot) -> None:
        self._scratch.give_back(slot)

    def retire(self, lease: Lease, positions: list[int]) -> None:
        for position in positions:
            self._scratch.give_back(lease.slots.pop(position))

    def end(self, lease: Lease) -> None:
        for slot in lease.slots.values():
            self._scratch.give_back(slot)
        for _, slot in lease.pending:
            self._scratch.give_up(slot)
        lease.slots.clear()
        lease.pending.clear()

    def resident(self) -> set[int]:
        return set()
