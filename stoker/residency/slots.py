"""A slot: a place in the arena that holds one record. Owns the slot's state and how an arena is cut into slots.

A slot is free (expert -1), being read into (a ticket), or whole (an expert and no ticket). Who may use which slot is
the business of the paths; this file must not know policies, leases or files.
"""

from collections.abc import Iterator

from stoker.native.io import Arena
from stoker.trace.events import ReadClass

NO_TICKET = -1
NOBODY = -1


class Slot:
    """`nbytes` of arena memory at `address` (a multiple of 4096).

    `purpose`: why its last read was submitted; `ahead`: it was a prefetch and nobody has asked for the expert yet.
    """

    __slots__ = ("address", "ahead", "expert", "nbytes", "pool", "purpose", "ticket")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.pool = NOBODY
        self.expert = NOBODY
        self.ticket = NO_TICKET
        self.purpose = ReadClass.DEMAND
        self.ahead = False

    def clear(self) -> None:
        """Free again; the bytes mean nothing from here on."""
        assert self.ticket == NO_TICKET, "a slot that is being read into is not free"
        self.pool = NOBODY
        self.expert = NOBODY
        self.ahead = False


class Cutter:
    """Cuts an arena into slots, front to back, so that the slots of one call are adjacent."""

    def __init__(self, arena: Arena) -> None:
        self._next = arena.address
        self._end = arena.address + arena.nbytes

    def cut(self, count: int, nbytes: int) -> list[Slot]:
        assert self._next + count * nbytes <= self._end, "the slot plan is larger than the arena"
        return list(self._cut(count, nbytes))

    def _cut(self, count: int, nbytes: int) -> Iterator[Slot]:
        for _ in range(count):
            yield Slot(self._next, nbytes)
            self._next += nbytes
