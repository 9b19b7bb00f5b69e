"""Experts that stay in their slots until someone says otherwise: a pin that outlives steps.

Owns what each owner holds in a pool. Leaves `spare` slots to everything else, so that demand always finds room; what
finds no slot is not held, though it is read into one of those while nobody else wants it. Knows ids, no routes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from stoker.errors import ReadError
from stoker.residency.kept import KeptSlots


class Hold:
    """A pin (see kept.Pin) on experts of one pool. guests: read along with them, not pinned."""

    def __init__(self, experts: Sequence[int], guests: Sequence[int] = ()) -> None:
        self.experts: Sequence[int] = experts
        self.guests = guests
        self.retired: set[int] = set()


class Holds:
    """By owner; an owner holds in one pool."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, tuple[KeptSlots, Hold]] = {}

    def replace(self, owner: Hashable, slots: KeptSlots, experts: Sequence[int], spare: int) -> int:
        """From now on `owner` holds the first of `experts` (best first), as many as leave `spare` slots to others;
        reads of those that are not there begin. Returns how many are held."""
        previous = self._holds.pop(owner, None)
        if previous is not None:
            previous[0].end(previous[1])
        others = slots.pinned()
        room = slots.capacity - spare - len(others)
        mine: list[int] = []
        for expert in experts:
            if expert in others or len(mine) < room:
                mine.append(expert)
        if slots.complete or not mine:
            return len(mine)
        slots.prefetch([*mine, *(expert for expert in experts if expert not in mine)])
        held = [expert for expert in mine if expert in slots.held]
        hold = Hold(held, [expert for expert in experts if expert in slots.held and expert not in held])
        slots.pins.append(hold)
        self._holds[owner] = (slots, hold)
        return len(hold.experts)

    def settle(self) -> None:
        """Wait until everything held, and read along with it, is whole. What cannot be read is not there: a step that
        needs it says so."""
        for slots, hold in self._holds.values():
            for expert in (*hold.experts, *hold.guests):
                try:
                    if expert in slots.held:
                        slots.await_whole(expert)
                except ReadError:
                    continue
