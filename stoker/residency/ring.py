"""The whole_layer path: every needed expert of a layer once, in ascending id, through a ring of slots read ahead.

Experts that are resident anyway are used where they are and nothing of the decode set leaves. While the tail of one
layer and the attention of the next are computed, the ring fills with the next pool's experts. Owns the ring; must not
know policies.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence

from stoker.errors import ReadError, StokerError
from stoker.residency.exact import Scratch
from stoker.residency.kept import KeptSlots
from stoker.residency.lease import Arrival
from stoker.residency.reads import Reads
from stoker.residency.slots import NO_TICKET, Slot
from stoker.trace.events import ReadClass

Ahead = tuple[int, Sequence[int]]  # a pool and experts that its next stream will probably need


class StreamPin:
    """Holds the experts that a stream uses in their resident slots until each was handed out."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.experts = experts
        self.retired: set[int] = set()


class Ring:
    """`depth`: reads started and not consumed yet, at most; never more than the ring has slots."""

    def __init__(self, slots: list[Slot], reads: Reads, depth: int) -> None:
        self.reads = reads
        self.depth = min(depth, len(slots))
        self._scratch = Scratch(slots, reads)
        self._held: dict[tuple[int, int], Slot] = {}  # (pool, expert) -> slot, whole or being read
        self._layer: Layer | None = None  # the stream that goes through the ring now

    def stream(
        self,
        pool: int,
        experts: Sequence[int],
        kept: KeptSlots | None,
        ahead: Ahead | None,
        ahead_kept: KeptSlots | None,
        keep: Sequence[int] = (),
        group: int = 1,
        demand: Sequence[int] = (),
    ) -> Iterator[Arrival]:
        """Positions in `experts` and slot addresses, ascending by expert; valid until the next item is asked for.

        An item holds one expert, waited for if need be, and up to `group` - 1 following ones that are whole by then.

        `kept` holds the decode set of the pool, if there is one, `ahead_kept` that of the pool in `ahead`.
        Raises ReadError naming pool and expert; everything stays usable, and streaming again is a valid retry.
        """
        return Layer(self, pool, experts, kept, ahead, ahead_kept, keep, demand).run(group)

    # What a layer asks of the ring.

    def enter(self, layer: "Layer") -> None:
        """One stream at a time: a new one takes over from one that was left unfinished."""
        self.reads.check_open()
        if self._layer is not None:
            self._layer.leave()
        self._layer = layer

    def check(self, layer: "Layer") -> None:
        self.reads.check_open()
        if self._layer is not layer:
            raise StokerError("another stream began before this one was finished", where=f"pool {layer.pool}")

    def find(self, pool: int, expert: int) -> Slot | None:
        return self._held.get((pool, expert))

    def start(self, pool: int, expert: int, *, prefetch: bool, wait: bool = False) -> Slot | None:
        """Begin to read an expert; None when the ring is full (with `wait`: full of records that are wanted)."""
        if not wait and len(self._held) >= self.depth:
            return None
        slot = self._scratch.take_or_wait() if wait else self._scratch.take()
        if slot is None:
            return None
        try:
            self.reads.start(slot, pool, expert, ReadClass.PREFETCH if prefetch else ReadClass.STREAM)
        except BaseException:
            self._scratch.give_back(slot)
            raise
        self._held[pool, expert] = slot
        return slot

    def consumed(self, slot: Slot, in_exchange: Slot | None = None) -> None:
        """The record is not needed any more, or its slot went to the decode set, `in_exchange` for a free one."""
        del self._held[slot.pool, slot.expert]
        self._scratch.give_back(in_exchange or slot)

    def discard(self, slot: Slot) -> None:
        """A record that is not wanted any more, whole or not."""
        del self._held[slot.pool, slot.expert]
        if slot.ticket != NO_TICKET:
            self._scratch.give_up(slot)
            return
        if slot.ahead:
            self.reads.wasted(slot)
        self._scratch.give_back(slot)

    def keep_only(self, pool: int, experts: set[int]) -> None:
        """Discard what was read ahead and is not needed by the stream of `pool` that begins."""
        for slot in list(self._held.values()):
            if slot.pool != pool or slot.expert not in experts:
                self.discard(slot)

    def last_held(self, pool: int) -> Slot | None:
        """The slot whose record is needed last: another pool's first, then the largest expert."""
        return max(self._held.values(), key=lambda slot: (slot.pool != pool, slot.expert), default=None)

    def claim(self, slot: Slot) -> bool:
        """A stream needs a record that was read ahead. False: its read failed or expired, and the slot is free."""
        if slot.ticket != NO_TICKET:
            if not self.reads.over(slot):
                if slot.ahead:
                    self.reads.promote(slot)
                return True
            try:
                whole = self.reads.finish(slot)
            except ReadError:  # nobody had asked for it yet: it is simply not there
                whole = False
            if not whole:
                self.consumed(slot)
                return False
        if slot.ahead:
            self.reads.used(slot)
        return True

    def finish(self, slot: Slot) -> None:
        """Wait for a slot of the ring; a failed read frees it."""
        while slot.ticket != NO_TICKET:
            self.reads.first([slot])
            try:
                if not self.reads.finish(slot):
                    self.reads.start(slot, slot.pool, slot.expert, ReadClass.STREAM)
            except ReadError:
                self.consumed(slot)
                raise


class Layer:
    """One pass through the ring."""

    def __init__(
        self,
        ring: Ring,
        pool: int,
        experts: Sequence[int],
        kept: KeptSlots | None,
        ahead: Ahead | None,
        ahead_kept: KeptSlots | None,
        keep: Sequence[int],
        demand: Sequence[int] = (),
    ) -> None:
        self.ring, self.pool, self.experts, self.kept = ring, pool, experts, kept
        self.counters = ring.reads.counters
        self.record_bytes = ring.reads.extent(pool, experts[0])[2] if experts else 0
        self.pin = StreamPin(experts)
        self.plan: deque[int] = deque()  # experts still to be read, ascending
        self.ahead_pool = ahead[0] if ahead else -1
        self.ahead_plan = deque(sorted(ahead[1])) if ahead else deque()
        self.ahead_kept = ahead_kept
        self.keep_wish = keep
        self.keep: set[int] = set()  # as many of them as there are free slots, and what deserves a taken one
        self.demand = demand
        self.leavers: list[int] = []  # residents that may be exchanged, the next one last

    def run(self, group: int) -> Iterator[Arrival]:
        order = deque(sorted(range(len(self.experts)), key=self.experts.__getitem__))
        self.ring.enter(self)
        try:
            self._sort_out()
            if self.demand and self.kept is not None and (here := [p for p in order if self._resident(p)]):
                order = deque(position for position in order if not self._resident(position))
                self._read_on()
                yield here, [self.kept.table[self.experts[position]] for position in here]
                self.ring.check(self)
                self.pin.retired.update(self.experts[position] for position in here)
            while order:
                self._read_on()
                positions = [order.popleft()]
                addresses = [self._whole(self.experts[positions[0]])]
                while order and len(positions) < group and (there := self._there(self.experts[order[0]])):
                    positions.append(order.popleft())
                    addresses.append(there)
                self._read_on()
                yield positions, addresses
                self.ring.check(self)
                for position in positions:
                    self._give_back(self.experts[position])
            self._read_on()
        finally:
            self.leave()

    def leave(self) -> None:
        if self.kept is not None:
            self.kept.end(self.pin)

    def _sort_out(self) -> None:
        """Which experts are resident, which were read ahead, which must be read. Counts the demand."""
        if self.kept is not None:
            self.kept.pins.append(self.pin)
            room = self.kept.free_slots()
            self.keep = set([expert for expert in self.keep_wish if expert not in self.kept.held][:room])
            if self.demand:
                deserving, leavers = self.kept.contest(self.demand)
                self.keep.update(deserving)
                self.leavers = leavers[::-1]
        needed = sorted(self.experts)
        self.ring.keep_only(self.pool, set(needed))
        hits = sum(self._is_whole(expert) for expert in needed)
        self.counters.demanded(hits, len(needed) - hits, self.record_bytes)

    def _is_whole(self, expert: int) -> bool:
        slot = self.ring.find(self.pool, expert)
        if self.kept is not None and expert in self.kept.held:
            whole = self.kept.demand(expert)
            if expert in self.kept.held:
                if slot is not None:
                    self.ring.discard(slot)  # there twice: read ahead, and by the hot path since
                return whole
        if slot is not None and self.ring.claim(slot):
            return slot.ticket == NO_TICKET
        self.plan.append(expert)
        return False

    def _read_on(self) -> None:
        """Keep the ring full: first this layer's experts, then the next pool's."""
        while self.plan and (self._came_in(self.plan[0]) or self.ring.start(self.pool, self.plan[0], prefetch=False)):
            self.plan.popleft()
        while self.ahead_plan and not self.plan:
            expert = self.ahead_plan[0]
            resident = self.ahead_kept is not None and expert in self.ahead_kept.held
            there = resident or self.ring.find(self.ahead_pool, expert) is not None
            if not there and not self.ring.start(self.ahead_pool, expert, prefetch=True):
                return
            self.ahead_plan.popleft()

    def _came_in(self, expert: int) -> bool:
        """Whether the decode set began to read an expert after the stream had planned to."""
        if self.kept is None or expert not in self.kept.held:
            return False
        self.kept.demand(expert)
        return expert in self.kept.held

    def _whole(self, expert: int) -> int:
        """The address of the expert, after waiting for it if need be."""
        slot = self.ring.find(self.pool, expert)
        if slot is None and self.kept is not None and expert in self.kept.held:
            return self.kept.await_whole(expert)
        slot = slot or self._read_now(expert)
        self.ring.finish(slot)
        return slot.address

    def _there(self, expert: int) -> int:
        """The address of an expert that is whole already, without waiting; 0 when it is not."""
        slot = self.ring.find(self.pool, expert)
        if slot is None:
            return self.kept.table[expert] if self.kept is not None else 0
        if slot.ticket != NO_TICKET and self.ring.reads.over(slot):
            self.ring.finish(slot)
        return slot.address if slot.ticket == NO_TICKET else 0

    def _read_now(self, expert: int) -> Slot:
        """The ring is full of later experts (its read-ahead guessed past this one): the last of them gives way."""
        assert self.plan and self.plan[0] == expert, "experts are read in order"
        slot = self.ring.start(self.pool, expert, prefetch=False, wait=True)
        while slot is None:
            last = self.ring.last_held(self.pool)
            assert last is not None, "a ring that holds nothing has a free slot"
            if last.pool == self.pool:
                insort(self.plan, last.expert)
            self.ring.discard(last)
            slot = self.ring.start(self.pool, expert, prefetch=False, wait=True)
        self.plan.popleft()
        return slot

    def _give_back(self, expert: int) -> None:
        self.pin.retired.add(expert)
        slot = self.ring.find(self.pool, expert)
        if slot is None:
            return
        if self.kept is None or expert not in self.keep:
            self.ring.consumed(slot)
        else:
            self.ring.consumed(slot, self.kept.adopt(expert, slot, self._leaver()))

    def _resident(self, position: int) -> bool:
        assert self.kept is not None
        return self.kept.table[self.experts[position]] != 0

    def _leaver(self) -> int | None:
        """A resident that may give up its slot now: whole, and not to be used by this stream or any lease any more."""
        assert self.kept is not None
        pinned = self.kept.pinned() if self.leavers else ()
        for index in range(len(self.leavers) - 1, -1, -1):
            expert = self.leavers[index]
            if self.kept.table[expert] and expert not in pinned:
                return self.leavers.pop(index)
        return None


class RingHome:
    """Acquire on the whole_layer path: a lease that hands out one expert after the other, as the stream does."""

    def __init__(self, pool: int, ring: Ring) -> None:
        self._pool, self._ring = pool, ring

    def acquire(self, experts: Sequence[int]) -> "StreamLease":
        return StreamLease(self._ring.stream(self._pool, experts, None, None, None))


class StreamLease:
    """A Lease in its outward form; each address is valid until the next item is asked for."""

    in_waves = True
    all_present = False
    addresses: Sequence[int] = ()

    def __init__(self, stream: Iterator[Arrival]) -> None:
        self._stream: Iterator[Arrival] | None = stream

    def __enter__(self) -> "StreamLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def arrivals(self) -> Iterator[Arrival]:
        yield from self._stream or ()

    def release(self) -> None:
        """Give up what has not been handed out; idempotent."""
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
            self._stream = None
