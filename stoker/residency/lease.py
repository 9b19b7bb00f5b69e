"""A lease: the experts of one acquire, pinned until release, handed out as they become whole. The one place that waits.

Knows positions, slots and the order of events. How a slot is found, recycled or kept is its home's business (one home
per path). When a home cannot give every missing expert a slot at once, the lease goes in waves: what was handed out
is recycled for the rest.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from stoker.errors import BudgetError, ReadError, StokerError
from stoker.residency.reads import Reads
from stoker.residency.slots import NO_TICKET, Slot

Arrival = tuple[list[int], list[int]]  # positions in the acquired experts, slot addresses


class Home(Protocol):
    """What a lease asks of the slots that serve it."""

    pool: int
    reads: Reads

    def refill(self, lease: "Lease") -> None:
        """Start a demand read for as many of `lease.todo` as can have a slot now; move them to `lease.pending`."""

    def make_room(self, lease: "Lease") -> None:
        """Nothing of the lease is under way and nothing has a slot: wait until something can, or raise StokerError."""

    def settle(self, slot: Slot) -> bool:
        """The read of `slot` is over: True when it is whole, False when it was started again. Raises ReadError."""

    def abandon(self, slot: Slot) -> None:
        """The read of `slot` failed: free it."""

    def retire(self, lease: "Lease", positions: list[int]) -> None:
        """The consumer is done with these positions; their slots may be used again (waves only)."""

    def end(self, lease: "Lease") -> None:
        """Drop the pins of the lease. Reads under way go on or are given up, as the path likes; never waits."""


class Lease:
    """`experts` of `pool`; `addresses[i]` is the slot of `experts[i]` once it was handed out, else 0 (never read a 0).

    A context manager. Single-threaded like everything in residency. Addresses stay valid until release, unless
    `in_waves` is True: then each is valid only until the next item of `arrivals()` is asked for.
    """

    __slots__ = (
        "addresses",
        "demand_reads",
        "experts",
        "home",
        "in_waves",
        "is_open",
        "pending",
        "retired",
        "slots",
        "todo",
    )

    def __init__(self, home: Home, experts: Sequence[int], addresses: list[int]) -> None:
        self.home = home
        self.experts = experts
        self.addresses = addresses
        self.pending: list[tuple[int, Slot]] = []  # position, slot that is being read into
        self.todo: deque[int] = deque()  # positions without a slot yet
        self.slots: dict[int, Slot] = {}  # position -> slot, of those read by this lease
        self.retired: set[int] = set()  # experts handed out and given back while the lease goes on
        self.demand_reads = 0  # experts that nothing had read or begun to read
        self.in_waves = False
        self.is_open = True

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unpin everything; idempotent. Never waits: reads still under way land in slots that nobody is handed."""
        if self.is_open:
            self.is_open = False
            if not self.home.reads.closed:
                self.home.end(self)

    @property
    def all_present(self) -> bool:
        """Whether every address is known already, so that `addresses` can be used without `arrivals()`."""
        return not self.pending and not self.todo

    def arrivals(self) -> Iterator[Arrival]:
        """First all hits as one group (if any), then misses as they land, those that are there together as one group.

        Every position comes exactly once. Raises ReadError naming pool and expert when a read fails or comes short;
        the lease is released then, and acquiring the same experts again is a valid retry. Time spent waiting is
        counted as stall.
        """
        self._check_open()
        if not self.pending and not self.todo:
            return iter(((list(range(len(self.addresses))), self.addresses),) if self.addresses else ())
        return self._arrive()

    def _arrive(self) -> Iterator[Arrival]:
        hits = [position for position, address in enumerate(self.addresses) if address]
        if hits:
            yield hits, [self.addresses[position] for position in hits]
            self._recycle(hits)
        while self.pending or self.todo:
            self._check_open()
            try:
                if self.todo:
                    self.home.refill(self)
                    if not self.pending:
                        self.home.make_room(self)
                        continue
                landed = self._land()
            except BaseException:
                self.release()
                raise
            if landed:
                yield landed, [self.addresses[position] for position in landed]
                self._recycle(landed)

    def _check_open(self) -> None:
        self.home.reads.check_open()
        if not self.is_open:
            raise StokerError(
                "arrivals of a released lease", where=f"pool {self.home.pool}", remedy="acquire the experts again"
            )

    def _recycle(self, positions: list[int]) -> None:
        if self.in_waves and self.is_open:
            self.home.retire(self, positions)

    def _land(self) -> list[int]:
        """Wait for at least one pending read; returns the positions that are whole now."""
        landed = self._landed_elsewhere()
        if landed or not self.pending:
            return landed
        ready = set(self.home.reads.first([slot for _, slot in self.pending]))
        over = [item for index, item in enumerate(self.pending) if index in ready]
        self.pending = [item for index, item in enumerate(self.pending) if index not in ready]
        failure: ReadError | None = None
        for position, slot in over:
            try:
                if self.home.settle(slot):
                    self._hand_out(position, slot)
                    landed.append(position)
                else:
                    self.pending.append((position, slot))
            except ReadError as error:
                self.home.abandon(slot)
                failure = failure or error
        if failure is not None:
            raise failure
        return landed

    def _landed_elsewhere(self) -> list[int]:
        """Pending slots that another lease on the same expert settled (whole now) or lost (ask again)."""
        landed, still = [], []
        for position, slot in self.pending:
            if slot.expert != self.experts[position] or slot.pool != self.home.pool:
                self.todo.append(position)
            elif slot.ticket == NO_TICKET:
                self._hand_out(position, slot)
                landed.append(position)
            else:
                still.append((position, slot))
        self.pending = still
        return landed

    def _hand_out(self, position: int, slot: Slot) -> None:
        self.addresses[position] = slot.address
        self.slots[position] = slot


def no_room(pool: int, slots: int, pinned: int) -> BudgetError:
    """Every slot is pinned by leases that are still open, so waiting would never end."""
    return BudgetError(
        "every slot is held by open leases, so no expert can come in",
        where=f"pool {pool}",
        expected="a slot that is not pinned",
        got=f"{slots} slots, {pinned} experts pinned or being read",
        remedy="release earlier leases first, or give the pool more slots (a larger memory budget)",
    )
