"""The slots of one pool that keep their records between steps: the shared part of the hot and the staged path.

Owns which expert is in which slot, which are being read, and which leases pin them. Subclasses say only who leaves
when a slot is needed. A slot that is being read into, or pinned by a lease, never leaves; an address is published
only when whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from stoker.errors import ReadError
from stoker.residency.lease import Lease, no_room
from stoker.residency.reads import Reads
from stoker.residency.slots import NO_TICKET, Slot
from stoker.trace.events import ReadClass


class Pin(Protocol):
    """Holds experts of a pool in their slots: `experts` without `retired`. Leases and streams are pins."""

    experts: Sequence[int]
    retired: set[int]


class KeptSlots(ABC):
    """`held`: every slot in use; `reading`: those of them that are not whole yet; `table[expert]`: an address or 0."""

    def __init__(self, pool: int, experts: int, slots: list[Slot], reads: Reads) -> None:
        self.pool = pool
        self.experts = experts
        self.capacity = len(slots)
        self.record_bytes = slots[0].nbytes
        self.reads = reads
        self.table = [0] * experts
        self.held: dict[int, Slot] = {}
        self.reading: dict[int, Slot] = {}
        self.ahead: set[int] = set()  # whole, prefetched, not asked for yet
        self.fresh: set[int] = set()  # prefetched since the last acquire: the step they are for is still to come
        self.pins: list[Pin] = []
        self.whole = 0  # experts that are whole in a slot
        self.complete = False  # every expert is whole: nothing will ever leave, so nothing needs a pin
        self._free = slots[::-1]  # the first slot is taken first, so that reading in order fills memory in order
        self._counters = reads.counters

    # Who leaves: the subclass's choice.

    @abstractmethod
    def _touch(self, experts: Sequence[int]) -> None:
        """One event of demand, before its misses are admitted."""

    @abstractmethod
    def _admit(self, expert: int, protected: set[int]) -> int | None:
        """Note that `expert` gets a slot. With no free slot: the expert that leaves for it, or None when none can."""

    @abstractmethod
    def _forget(self, expert: int) -> None:
        """`expert` has lost its slot without another expert's doing."""

    # Demand.

    def acquire(self, experts: Sequence[int]) -> Lease:
        """A lease on unique experts; hits are taken against the slots as they are now. Never waits."""
        table = self.table
        addresses = [table[expert] for expert in experts]
        lease = Lease(self, experts, addresses)
        if self.complete:
            self._counters.demanded(len(addresses), 0, self.record_bytes)
            return lease
        self._touch(experts)
        self.pins.append(lease)
        if self.fresh:
            self.fresh.clear()
        if 0 in addresses:
            self._fetch(lease)
        else:
            self._counters.demanded(len(addresses), 0, self.record_bytes)
        if self.ahead:
            self._note_first_use(lease)
        elif self.whole == self.experts:
            self.complete = True
        return lease

    def _fetch(self, lease: Lease) -> None:
        addresses = lease.addresses
        for position, address in enumerate(addresses):
            if address:
                continue
            slot = self.reading.get(lease.experts[position])
            if slot is None:
                lease.todo.append(position)
            elif self.reads.over(slot):
                if self._settled(slot):
                    addresses[position] = slot.address
                else:
                    lease.todo.append(position)
            else:
                self._join(slot)
                lease.pending.append((position, slot))
        missing = len(lease.todo) + len(lease.pending)
        self._counters.demanded(len(addresses) - missing, missing, self.record_bytes)
        lease.demand_reads = len(lease.todo)
        try:
            self.refill(lease)
        except BaseException:
            lease.release()
            raise
        lease.in_waves = bool(lease.todo)

    def _join(self, slot: Slot) -> None:
        """A step needs a record whose read is under way: it is never read twice."""
        if slot.ahead:
            self.reads.promote(slot)

    def _note_first_use(self, lease: Lease) -> None:
        for expert in self.ahead.intersection(lease.experts):
            self.ahead.discard(expert)
            self.reads.used(self.held[expert])

    # What a lease asks of its home.

    def refill(self, lease: Lease) -> None:
        if not lease.todo:
            return
        if self.reading:
            self._reap()
        protected = self._protected()
        while lease.todo:
            position = lease.todo[0]
            slot = self.take(lease.experts[position], protected)
            if slot is None:
                return
            lease.todo.popleft()
            lease.pending.append((position, slot))

    def make_room(self, lease: Lease) -> None:
        """Wait for a read that nobody is waiting for: its slot can leave once it is whole."""
        if not self.reading:
            raise no_room(self.pool, self.capacity, len(self._protected()))
        slots = list(self.reading.values())
        for index in self.reads.first(slots):
            self._settled(slots[index])

    def settle(self, slot: Slot) -> bool:
        if not self.reads.finish(slot):
            self.reads.start(slot, self.pool, slot.expert)
            return False
        self._publish(slot)
        return True

    def abandon(self, slot: Slot) -> None:
        """Free a slot whose read is over and left nothing, or was cancelled."""
        expert = slot.expert
        del self.held[expert], self.reading[expert]
        self.fresh.discard(expert)
        self._forget(expert)
        slot.clear()
        self._free.append(slot)

    def retire(self, lease: Lease, positions: list[int]) -> None:
        lease.retired.update([lease.experts[position] for position in positions])

    def end(self, pin: Pin) -> None:
        if pin in self.pins:
            self.pins.remove(pin)

    # Prefetch.

    def prefetch(self, experts: Sequence[int], deadline_ns: int = 0, limit: int | None = None) -> int:
        """Start reading what is not there into slots that are free or may leave, `limit` at most; how many it were."""
        self._reap()
        self.fresh.update(expert for expert in experts if expert in self.held)
        protected = self._protected() | self.fresh
        started = 0
        for expert in experts:
            if expert in self.held:
                continue
            if started == limit:
                break
            if self.take(expert, protected, prefetch=True, deadline_ns=deadline_ns) is None:
                break
            self.fresh.add(expert)
            protected.add(expert)
            started += 1
        return started

    def cancel_prefetches(self, but: Iterable[int] = ()) -> int:
        """Give up every prefetch that nobody waits for and that has not started; returns how many were."""
        kept = set(but)
        cancelled = 0
        for expert, slot in list(self.reading.items()):
            if slot.ahead and expert not in kept and self.reads.cancel(slot):
                self.abandon(slot)
                cancelled += 1
        self.fresh &= kept
        return cancelled

    # For warm-up and streams.

    def demand(self, expert: int) -> bool:
        """A stream will use this held expert here: whether it is whole now. A read under way is promoted."""
        slot = self.reading.get(expert)
        if slot is None:
            whole = self.table[expert] != 0
        elif self.reads.over(slot):
            whole = self._settled(slot)
        else:
            self._join(slot)
            return False
        if whole and expert in self.ahead:
            self.ahead.discard(expert)
            self.reads.used(self.held[expert])
        return whole

    def await_whole(self, expert: int) -> int:
        """The address of a held expert, waiting for its read if need be. Raises ReadError; its slot is free then."""
        while not self.table[expert]:
            slot = self.reading[expert]
            self.reads.first([slot])
            try:
                self.settle(slot)
            except ReadError:
                self.abandon(slot)
                raise
        return self.table[expert]

    def resident(self) -> set[int]:
        """The experts that are whole in a slot now."""
        self._reap()
        return {expert for expert, address in enumerate(self.table) if address}

    def free_slots(self) -> int:
        return len(self._free)

    def contest(self, demand: Sequence[int]) -> tuple[list[int], list[int]]:
        """One event of demand for more experts than there are slots: (those of it that deserve a slot and have none,
        residents that deserve theirs less, the least worthy first). Nothing moves yet."""
        return [], []

    def adopt(self, expert: int, slot: Slot, leaver: int | None = None) -> Slot | None:
        """Take over a slot that holds `expert` whole for one of the same size: a free one, or that of `leaver`, which
        is whole and not pinned. None when there is neither."""
        if expert in self.held or slot.nbytes != self.record_bytes:
            return None
        if not self._free and leaver is not None:
            self._free.append(self._evict(leaver))
            self._forget(leaver)
        if not self._free:
            return None
        self._admit(expert, set())
        free = self._free.pop()
        slot.ahead = False
        self.held[expert] = slot
        self.table[expert] = slot.address
        self.whole += 1
        return free

    # The mechanism.

    def take(self, expert: int, protected: set[int], *, prefetch: bool = False, deadline_ns: int = 0) -> Slot | None:
        """Give `expert` a slot and start its read; None when every slot is pinned or being read into."""
        if self._free:
            self._admit(expert, protected)
            slot = self._free.pop()
        else:
            victim = self._admit(expert, protected)
            if victim is None and self._give_up_a_prefetch(protected, prefetch):
                return self.take(expert, protected, prefetch=prefetch, deadline_ns=deadline_ns)
            if victim is None:
                return None
            slot = self._evict(victim)
        self.held[expert] = self.reading[expert] = slot
        try:
            purpose = ReadClass.PREFETCH if prefetch else ReadClass.DEMAND
            self.reads.start(slot, self.pool, expert, purpose, deadline_ns)
        except BaseException:
            slot.expert = expert
            self.abandon(slot)
            raise
        return slot

    def _evict(self, expert: int) -> Slot:
        slot = self.held.pop(expert)
        assert slot.ticket == NO_TICKET, "a slot that is being read into must not leave"
        self.table[expert] = 0
        self.whole -= 1
        self.ahead.discard(expert)
        self.reads.evicted(slot)
        slot.clear()
        return slot

    def _give_up_a_prefetch(self, protected: set[int], for_prefetch: bool) -> bool:
        """Demand goes first: a prefetch that has not started and that no lease waits for makes room."""
        if for_prefetch:
            return False
        pinned = self.pinned()
        for expert, slot in self.reading.items():
            if expert not in pinned and self.reads.cancel(slot):
                self.abandon(slot)
                protected.discard(expert)
                return True
        return False

    def pinned(self) -> set[int]:
        """The experts that open leases and streams use."""
        pinned: set[int] = set()
        for pin in self.pins:
            pinned |= set(pin.experts) - pin.retired if pin.retired else set(pin.experts)
        return pinned

    def _protected(self) -> set[int]:
        """The experts whose slots must not be taken now."""
        protected = self.pinned()
        protected.update(self.reading)
        return protected

    def _publish(self, slot: Slot) -> None:
        expert = slot.expert
        del self.reading[expert]
        self.table[expert] = slot.address
        if slot.ahead:
            self.ahead.add(expert)
        self.whole += 1

    def _settled(self, slot: Slot) -> bool:
        """Settle a read that is over and that nobody waits for. If it failed or expired, its slot is simply free."""
        try:
            whole = self.reads.finish(slot)
        except ReadError:
            whole = False
        if whole:
            self._publish(slot)
        else:
            self.abandon(slot)
        return whole

    def _reap(self) -> None:
        """Settle what has landed, except what a lease waits for: its failure must reach that lease."""
        pinned = self.pinned()
        for expert, slot in list(self.reading.items()):
            if expert not in pinned and self.reads.over(slot):
                self._settled(slot)
