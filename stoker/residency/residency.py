"""Residency: which experts are in memory. The door to the slots, the read queue and the four paths.

Owns the arena and decides which path serves a call; knows pools and experts, no model and no arithmetic.
Single-threaded: every call comes from the thread that runs the steps. A path never changes the bytes that are handed
out.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

from stoker.errors import OptionError
from stoker.ids import Extent
from stoker.native.io import Arena, ReadQueue
from stoker.residency.counters import Counters, ratios
from stoker.residency.exact import ExactSlots, Scratch
from stoker.residency.hold import Holds
from stoker.residency.hot import HotSlots
from stoker.residency.kept import KeptSlots
from stoker.residency.lease import Arrival, Lease
from stoker.residency.plan import PoolSize, plan_slots
from stoker.residency.policies import Policy, make_policy
from stoker.residency.reads import Reads
from stoker.residency.ring import Ahead, Ring, RingHome, StreamLease
from stoker.residency.slots import Cutter, Slot
from stoker.residency.staged import StagedSlots
from stoker.residency.touch import Toucher
from stoker.residency.warm import warm
from stoker.trace.events import Recorder


class StoreLike(Protocol):
    """What residency needs of a store: `pools[p].experts`, `pools[p].layout.record_bytes`, and where records lie."""

    pools: Any

    def record(self, pool: int, expert: int) -> Extent: ...


class Residency:
    """`path`: how acquire serves experts. `auto` means hot; stream is there on every path.

    slots: slots per pool (a list, or one number for each), or instead arena_bytes: the whole arena, ring included.
    policy (hot only): a name of `policies.POLICIES`, or a callable from a capacity to a Policy; one policy a pool.
    ring_records: slots of the whole_layer ring, each as long as the longest record; ring_depth: records read ahead in
    it.
    """

    def __init__(
        self,
        store: StoreLike,
        queue: ReadQueue,
        *,
        path: str = "hot",
        slots: int | Sequence[int] | None = None,
        arena_bytes: int | None = None,
        policy: str | Callable[[int], Policy] = "lru",
        ring_records: int | None = None,
        ring_depth: int | None = None,
        huge_pages: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        sizes = [PoolSize(pool.experts, pool.layout.record_bytes) for pool in store.pools]
        if not sizes:
            raise OptionError("a store without experts has nothing to keep", where="store")
        self.plan = plan_slots(path, sizes, slots=slots, arena_bytes=arena_bytes, ring_records=ring_records)
        self.path = path
        self.tally = Counters()
        self.arena = Arena(self.plan.total_bytes, huge_pages=huge_pages)
        self._toucher: Toucher | None = None
        self._reads = Reads(store, queue, self.tally, recorder)
        cutter = Cutter(self.arena)
        scratch = cutter.cut(self.plan.scratch, self.plan.largest_bytes)
        ring = cutter.cut(self.plan.ring, self.plan.largest_bytes)  # in the order of their first use, for the toucher
        kept = [cutter.cut(count, size.record_bytes) for count, size in zip(self.plan.kept, sizes, strict=True)]
        self._slots: list[Slot] = [slot for group in [*kept, scratch, ring] for slot in group]
        self._ring = Ring(ring, self._reads, ring_depth or len(ring))
        self._kept = _kept_slots(path, sizes, kept, self._reads, policy)
        self._holds = Holds()
        self._homes: Sequence[Any] = self._kept or _passing_homes(path, sizes, scratch, self._reads, self._ring)

    def touch_ahead(self) -> None:
        """Have a thread make the slots' pages now, beside whatever comes next; once."""
        self._toucher = self._toucher or Toucher(self.arena)

    # The one place that waits.

    def acquire(self, pool: int, experts: Sequence[int]) -> Lease | StreamLease:
        """A lease on `experts` (unique ids) of `pool`: hits pinned, misses being read, each record once. Does not wait.

        With more experts than slots the lease goes in waves. Use it as a context manager, or release it.
        """
        return self._homes[pool].acquire(experts)

    def stream(
        self,
        pool: int,
        experts: Sequence[int],
        *,
        read_ahead: Ahead | None = None,
        keep: Sequence[int] = (),
        demand: Sequence[int] = (),
    ) -> Iterator[tuple[int, int]]:
        """`stream_groups` one expert at a time: (position in `experts`, slot address)."""
        groups = self.stream_groups(pool, experts, group=1, read_ahead=read_ahead, keep=keep, demand=demand)
        return (pair for positions, addresses in groups for pair in zip(positions, addresses, strict=True))

    def stream_groups(
        self,
        pool: int,
        experts: Sequence[int],
        *,
        group: int,
        read_ahead: Ahead | None = None,
        keep: Sequence[int] = (),
        demand: Sequence[int] = (),
    ) -> Iterator[Arrival]:
        """whole_layer: (positions in `experts`, slot addresses) of every expert once, those to be read ascending by id.

        An item holds the next expert, waited for, and up to `group` - 1 more that are there already.
        Experts that are resident are used where they are; all others go through the ring, and but for `demand` nothing
        leaves the decode set. `read_ahead` is (next pool, experts that it will probably need): read behind this pool's
        experts, kept in the ring, used by that pool's stream; what it does not need is waste. Addresses are valid until
        the next item is asked for. `keep` names experts, best first, that decoding will probably want: they stay in
        slots that are free, as many as there are, without another read (not in a pool whose records are shorter than
        the ring's slots). `demand` names those of `experts` that decoding asks for now: residents come first then, and
        by fading counts of use those that pass through the ring may take the slots of residents that are worth less.
        Raises ReadError naming pool and expert; streaming again is a valid retry.
        """
        self._reads.check_open()
        ahead_kept = self._kept[read_ahead[0]] if read_ahead and self._kept else None
        kept = self._kept[pool] if self._kept else None
        return self._ring.stream(pool, experts, kept, read_ahead, ahead_kept, keep, group, demand)

    def peek_groups(self, pool: int, experts: Sequence[int], *, group: int) -> Iterator[Arrival]:
        """`stream_groups` that leaves no trace in the decode set: residents are used where they are, which is not
        counted, all others pass through the ring. For a look at a step that is not the model's own."""
        self._reads.check_open()
        table = self._kept[pool].table if self._kept else None
        here = [p for p, expert in enumerate(experts) if table is not None and table[expert]]
        if table is not None and here:
            yield here, [table[experts[position]] for position in here]
        away = [p for p in range(len(experts)) if table is None or not table[experts[p]]]
        for positions, addresses in self._ring.stream(pool, [experts[p] for p in away], None, None, None, group=group):
            yield [away[position] for position in positions], addresses

    # Ahead of demand.

    def prefetch(self, pool: int, experts: Sequence[int], deadline_ns: int = 0, limit: int | None = None) -> int:
        """hot: start reading `experts` below demand into slots that are free or may leave; how many reads were started,
        `limit` at most.

        A read that has not started at `deadline_ns` (of time.monotonic_ns; 0: never) is dropped. Nothing pinned
        leaves for it.
        """
        return self._kept_of(pool, "prefetch").prefetch(experts, deadline_ns, limit)

    def cancel_prefetches(self, pool: int) -> int:
        """Give up the prefetches of a pool that have not started; returns how many."""
        return self._kept_of(pool, "cancel_prefetches").cancel_prefetches()

    def stage(self, pool: int, experts: Sequence[int]) -> int:
        """staged: fill the pool's next buffer with `experts`; how many of them are there or under way now."""
        slots = self._kept_of(pool, "stage")
        if not isinstance(slots, StagedSlots):
            raise OptionError("only the staged path has buffers to stage", where="stage", got=f"path {self.path}")
        return slots.stage(experts)

    def hold(self, owner: Hashable, pool: int, experts: Sequence[int], spare: int) -> int:
        """From now on, until the owner's next call, `experts` (best first) of `pool` stay in memory, as many as leave
        `spare` slots to everything else; reads of those that are not there begin. Returns how many are held: none on
        the paths that keep nothing between steps."""
        self._reads.check_open()
        return self._holds.replace(owner, self._kept[pool], experts, spare) if self._kept else 0

    def settle_holds(self) -> None:
        """Wait until what is held is there."""
        self._holds.settle()

    def warm(self) -> int:
        """Read every expert of every pool that has a slot for each, in the order in which they lie on disk.

        Returns how many records were read. Raises ReadError.
        """
        self._reads.check_open()
        return warm(self._kept, self._reads) if self._kept else 0

    # What there is.

    def slots(self, pool: int) -> int:
        """How many experts of the pool can be in memory at once for one acquire."""
        return self.plan.kept[pool] or self.plan.scratch or self.plan.ring

    def resident(self, pool: int) -> set[int]:
        """The experts of the pool that stay in memory between steps and are whole now."""
        return self._kept[pool].resident() if self._kept else set()

    def absent(self, pool: int, experts: Sequence[int]) -> list[int]:
        """Those of `experts` that have no slot that stays, in their order; being read counts as having one."""
        if not self._kept:
            return list(experts)
        held = self._kept[pool].held
        return [expert for expert in experts if expert not in held]

    def complete(self, pool: int) -> bool:
        """Whether every expert of the pool is in memory for good."""
        return bool(self._kept) and self._kept[pool].complete

    def counters(self) -> dict[str, int | float]:
        """Counts since the start, with hit_rate, byte_hit_rate, on_time_ratio and waste_ratio."""
        counts = self.tally.snapshot()
        return {**counts, **ratios(counts)}

    def close(self) -> None:
        """Cancel what has not started, wait for what has, and free the arena. Idempotent; the queue stays open."""
        if self._reads.closed:
            return
        if self._toucher is not None:
            self._toucher.stop()
        self._reads.close(self._slots)
        self._homes = _Closed(self._reads)
        self.arena.close()

    def __enter__(self) -> "Residency":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept_of(self, pool: int, what: str) -> KeptSlots:
        self._reads.check_open()
        if not self._kept:
            raise OptionError(f"{what} needs slots that keep experts", where=what, got=f"path {self.path}")
        return self._kept[pool]


class _Closed(Sequence[Any]):
    """Stands where the homes were, so that an acquire after close is refused at no cost before."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def __getitem__(self, index: Any) -> Any:
        self._reads.check_open()

    def __len__(self) -> int:
        return 0


def _kept_slots(
    path: str, sizes: Sequence[PoolSize], kept: list[list[Slot]], reads: Reads, policy: str | Callable[[int], Policy]
) -> list[HotSlots] | list[StagedSlots]:
    """One per pool on the paths that keep experts between steps, else none."""
    pools = list(enumerate(zip(sizes, kept, strict=True)))
    if path == "staged":
        return [StagedSlots(pool, size.experts, slots, reads) for pool, (size, slots) in pools]
    if path in ("auto", "hot"):
        return [
            HotSlots(pool, size.experts, slots, reads, _policy(policy, len(slots))) for pool, (size, slots) in pools
        ]
    return []


def _policy(policy: str | Callable[[int], Policy], capacity: int) -> Policy:
    return make_policy(policy, capacity) if isinstance(policy, str) else policy(capacity)


def _passing_homes(
    path: str, sizes: Sequence[PoolSize], scratch: list[Slot], reads: Reads, ring: Ring
) -> Sequence[ExactSlots] | Sequence[RingHome]:
    """One per pool on the paths that keep nothing between steps."""
    if path == "whole_layer":
        return [RingHome(pool, ring) for pool in range(len(sizes))]
    shared = Scratch(scratch, reads)
    return [ExactSlots(pool, size.record_bytes, shared) for pool, size in enumerate(sizes)]
