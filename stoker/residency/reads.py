"""Reads of records into slots: one ticket a slot, errors that name pool and expert, bytes and stall counted.

Knows where records lie and the read queue; must not know which slot should be used for what.
"""

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Protocol

from stoker.errors import ReadError, StokerError
from stoker.ids import Extent
from stoker.native.io import ReadQueue
from stoker.residency.counters import Counters
from stoker.residency.slots import NO_TICKET, Slot
from stoker.trace.events import ReadClass, Recorder


class Records(Protocol):
    """The part of a store that reads need."""

    def record(self, pool: int, expert: int) -> Extent: ...


class Reads:
    """Starts, awaits and cancels reads. Every file is opened once, when its first record is asked for."""

    def __init__(self, store: Records, queue: ReadQueue, counters: Counters, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.closed = False
        self.queue = queue
        self.counters = counters
        self._store = store
        self._files: dict[str, int] = {}
        self._extents: dict[tuple[int, int], tuple[int, int, int]] = {}  # -> file, offset, length

    def extent(self, pool: int, expert: int) -> tuple[int, int, int]:
        """(file number of the queue, offset, length) of a record, in bytes."""
        found = self._extents.get((pool, expert))
        if found is None:
            path, offset, length = self._store.record(pool, expert)
            if path not in self._files:
                self._files[path] = self.queue.open(path)
            found = self._extents[pool, expert] = (self._files[path], offset, length)
        return found

    def check_open(self) -> None:
        if self.closed:
            raise StokerError("this residency is closed, and its memory is gone", where="residency")

    def close(self, slots: Sequence[Slot]) -> None:
        """Cancel what has not started and wait for what has, so that nothing writes into the slots any more."""
        self.closed = True
        for slot in [slot for slot in slots if slot.ticket != NO_TICKET and not self.cancel(slot)]:
            with suppress(StokerError):
                self.finish(slot)

    def start(
        self, slot: Slot, pool: int, expert: int, purpose: ReadClass = ReadClass.DEMAND, deadline_ns: int = 0
    ) -> None:
        """Submit the read of one record into a slot that is free or whole; its old bytes are gone from here on."""
        prefetch = purpose is ReadClass.PREFETCH
        assert slot.ticket == NO_TICKET, "the slot is being read into already"
        file, offset, length = self.extent(pool, expert)
        assert length <= slot.nbytes, "the record is larger than its slot"
        slot.ticket = self.queue.submit(
            file,
            offset,
            length,
            slot.address,
            prefetch=prefetch,
            deadline_ns=deadline_ns,
            tag=pool << 32 | expert,
        )
        slot.pool, slot.expert = pool, expert
        slot.purpose, slot.ahead = purpose, prefetch
        if prefetch:
            self.counters.prefetch_submitted += 1

    def over(self, slot: Slot) -> bool:
        """Whether the read of the slot needs no more waiting: it landed, failed, or was dropped."""
        return self.queue.poll(slot.ticket)

    def promote(self, slot: Slot) -> None:
        """A step needs this prefetch and its read is not over: it is used, but late. One that expired
        unread is over at once, and `finish` says so."""
        slot.ahead = False
        self.counters.prefetch_used += 1
        self.counters.prefetch_late += 1
        self.queue.promote(slot.ticket)

    def first(self, slots: Sequence[Slot]) -> list[int]:
        """Wait until at least one read is over; the indices of all that are. The wait is counted as stall."""
        tickets = [slot.ticket for slot in slots]
        poll = self.queue.poll
        ready = [index for index, ticket in enumerate(tickets) if poll(ticket)]
        if ready:
            return ready
        began = perf_counter_ns()
        first = self.queue.wait_any(tickets)
        self.counters.stall_ns += perf_counter_ns() - began
        return [index for index, ticket in enumerate(tickets) if index == first or poll(ticket)]

    def finish(self, slot: Slot) -> bool:
        """Wait for the read and free its ticket: True when the slot is whole, False when the prefetch expired unread.

        Raises ReadError naming pool and expert when it failed or came short. The slot has no ticket afterwards in any
        case.
        """
        ticket, slot.ticket = slot.ticket, NO_TICKET
        try:
            self.queue.wait(ticket)
        except ReadError as error:
            self.counters.read_errors += 1
            raise named(error, slot) from error
        except KeyboardInterrupt:
            slot.ticket = ticket  # the read goes on
            raise
        if slot.purpose is ReadClass.PREFETCH and self.queue.state(ticket) == "expired":
            self.counters.prefetch_expired += 1
            self._record(slot, ticket, ReadClass.CANCELLED)
            return False
        self._count(slot)
        late = slot.purpose is ReadClass.PREFETCH and not slot.ahead
        self._record(slot, ticket, ReadClass.LATE if late else slot.purpose)
        return True

    def cancel(self, slot: Slot) -> bool:
        """Give up a read that has not started: True when it never will land (the slot is nobody's then)."""
        ticket = slot.ticket
        if not self.queue.cancel(ticket):
            return False
        slot.ticket = NO_TICKET
        if slot.purpose is ReadClass.PREFETCH:
            self.counters.prefetch_cancelled += 1
        self._record(slot, ticket, ReadClass.CANCELLED)
        return True

    def used(self, slot: Slot) -> None:
        """A prefetched expert that is whole is asked for for the first time: on time."""
        slot.ahead = False
        self.counters.prefetch_used += 1
        self.counters.prefetch_on_time += 1

    def wasted(self, slot: Slot) -> None:
        """A prefetched expert is given up before anybody asked for it."""
        slot.ahead = False
        self.counters.prefetch_wasted += 1
        self.counters.prefetch_wasted_bytes += self.extent(slot.pool, slot.expert)[2]

    def evicted(self, slot: Slot) -> None:
        """A whole record makes room."""
        self.counters.evictions += 1
        if slot.ahead:
            self.wasted(slot)
        if self.recorder is not None:
            self.recorder.evict(slot.pool, slot.expert)

    def _count(self, slot: Slot) -> None:
        length = self.extent(slot.pool, slot.expert)[2]
        self.counters.reads += 1
        if slot.purpose is ReadClass.PREFETCH:
            self.counters.prefetch_bytes += length
        else:
            self.counters.demand_bytes += length

    def _record(self, slot: Slot, ticket: int, purpose: ReadClass) -> None:
        if self.recorder is not None:
            submit_ns, start_ns, end_ns, nbytes = self.queue.completion(ticket)
            landed = 0 if purpose is ReadClass.CANCELLED else nbytes
            self.recorder.read(slot.pool, slot.expert, purpose, submit_ns, start_ns, end_ns, landed)


def named(error: ReadError, slot: Slot) -> ReadError:
    """The queue's error with the expert in front: the queue knows files and offsets only."""
    return ReadError(
        "the expert could not be read",
        where=f"pool {slot.pool} expert {slot.expert}",
        expected="the whole record",
        got=str(error),
        remedy="check the disk and run `stoker verify` on the store; nothing was computed from this slot",
    )
