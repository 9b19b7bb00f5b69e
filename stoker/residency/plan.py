"""How many slots each path gets, and what they cost in bytes. Pure arithmetic: resolved once, printed by the ledger.

Knows record sizes and counts; must not allocate, and knows no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stoker.errors import BudgetError, OptionError

Path = Literal["auto", "exact", "hot", "staged", "whole_layer"]
PATHS: tuple[str, ...] = get_args(Path)
RING_RECORDS = 16
RING_FLOOR = 2


@dataclass(frozen=True)
class PoolSize:
    """One pool: how many experts, how long each record is."""

    experts: int
    record_bytes: int


@dataclass(frozen=True)
class SlotPlan:
    """`kept[p]`: slots of pool p that keep records between steps (hot, staged); `scratch`: shared by all pools (exact);
    `ring`: whole_layer. Scratch and ring slots hold the largest record of any pool.
    """

    kept: tuple[int, ...]
    scratch: int
    ring: int
    sizes: tuple[PoolSize, ...]

    @property
    def largest_bytes(self) -> int:
        return max(size.record_bytes for size in self.sizes)

    @property
    def kept_bytes(self) -> int:
        return sum(count * size.record_bytes for count, size in zip(self.kept, self.sizes, strict=True))

    @property
    def total_bytes(self) -> int:
        return self.kept_bytes + (self.scratch + self.ring) * self.largest_bytes


def plan_slots(
    path: str,
    sizes: Sequence[PoolSize],
    *,
    slots: int | Sequence[int] | None = None,
    arena_bytes: int | None = None,
    ring_records: int | None = None,
) -> SlotPlan:
    """The slots of a path. Exactly one of `slots` (per pool, or one number for each pool) and `arena_bytes` is given.

    `arena_bytes` pays for the ring first and is split evenly: the same number of slots for each pool, none more than
    it has experts. Raises OptionError for what cannot be meant and BudgetError, with the smallest budget, for too
    little.
    """
    if path not in PATHS:
        raise OptionError("unknown path", where="path", expected=", ".join(PATHS), got=path)
    if (slots is None) == (arena_bytes is None):
        raise OptionError("give either slots or arena_bytes", where="slots", got=f"slots {slots}, arena {arena_bytes}")
    if ring_records is not None and ring_records < RING_FLOOR:
        raise OptionError(
            "the ring is too short to read ahead", where="ring", expected=f">= {RING_FLOOR}", got=ring_records
        )
    sizes = tuple(sizes)
    largest = max(size.record_bytes for size in sizes)
    if slots is not None:
        counts = _counts(slots, sizes)
        ring = RING_RECORDS if ring_records is None else ring_records
    else:
        assert arena_bytes is not None
        ring = _ring(arena_bytes, sizes, ring_records)
        counts = split_evenly(arena_bytes - ring * largest, sizes)
    if path == "whole_layer":
        return SlotPlan((0,) * len(sizes), 0, ring, sizes)
    if path == "exact":
        paid = sum(count * size.record_bytes for count, size in zip(counts, sizes, strict=True))
        return SlotPlan((0,) * len(sizes), max(1, min(max(counts), paid // largest)), ring, sizes)
    return SlotPlan(counts, 0, ring, sizes)


def split_evenly(nbytes: int, sizes: Sequence[PoolSize]) -> tuple[int, ...]:
    """Slots per pool: as equal as the bytes allow, at most `experts`, what is left over one by one from pool 0 on."""
    counts = [0] * len(sizes)
    left = nbytes
    while True:
        open_pools = [pool for pool, size in enumerate(sizes) if counts[pool] < size.experts]
        turn_bytes = sum(sizes[pool].record_bytes for pool in open_pools)
        turns = left // turn_bytes if turn_bytes else 0
        if not turns:
            break
        turns = min([turns] + [sizes[pool].experts - counts[pool] for pool in open_pools])
        for pool in open_pools:
            counts[pool] += turns
        left -= turns * turn_bytes
    for pool in open_pools:
        if sizes[pool].record_bytes <= left:
            counts[pool] += 1
            left -= sizes[pool].record_bytes
    return tuple(counts)


def _counts(slots: int | Sequence[int], sizes: Sequence[PoolSize]) -> tuple[int, ...]:
    counts = (slots,) * len(sizes) if isinstance(slots, int) else tuple(slots)
    if len(counts) != len(sizes):
        raise OptionError("slots per pool", where="slots", expected=f"{len(sizes)} numbers", got=len(counts))
    if min(counts) < 1:
        raise OptionError("every pool needs a slot", where="slots", expected=">= 1 for each pool", got=list(counts))
    return tuple(min(count, size.experts) for count, size in zip(counts, sizes, strict=True))


def _ring(arena_bytes: int, sizes: Sequence[PoolSize], ring_records: int | None) -> int:
    """The ring as asked for, or up to RING_RECORDS from a quarter of the arena; the rest is at least a slot a pool."""
    largest = max(size.record_bytes for size in sizes)
    one_each = sum(size.record_bytes for size in sizes)
    floor = (ring_records or RING_FLOOR) * largest + one_each
    if arena_bytes < floor:
        raise BudgetError(
            "the arena is too small for one slot a pool and the ring",
            where="arena",
            expected=f"at least {floor} bytes",
            got=f"{arena_bytes} bytes",
            remedy="name a larger memory budget",
        )
    spare = min(arena_bytes // 4, arena_bytes - one_each)
    return ring_records or max(RING_FLOOR, min(RING_RECORDS, spare // largest))
