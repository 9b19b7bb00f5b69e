"""What happened, as numbers, under the names of the measures: hits, misses, bytes, reads, prefetch outcomes, stall.

Everything counts from the start of the residency; a phase is measured by taking the difference of two snapshots.
"""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """A demand is one expert of one acquire or stream. Bytes and reads are counted when they have landed.

    hits: demands that were whole when asked for; misses: all others, an unfinished prefetch included.
    prefetch_on_time + prefetch_late = prefetch_used; prefetch_wasted: landed and given up before anyone asked.
    staged_fallbacks: demands on the staged path that nobody had staged. evictions: whole records that made room.
    dropped_experts is 0 always: an expert that cannot be had is an error.
    """

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0
    reads: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    read_errors: int = 0
    prefetch_submitted: int = 0
    prefetch_used: int = 0
    prefetch_on_time: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_wasted_bytes: int = 0
    prefetch_cancelled: int = 0
    prefetch_expired: int = 0
    staged_fallbacks: int = 0
    evictions: int = 0
    dropped_experts: int = 0
    stall_ns: int = 0

    def demanded(self, hits: int, misses: int, record_bytes: int) -> None:
        """One event: so many experts of one pool were whole when asked for, so many were not."""
        self.hits += hits
        self.misses += misses
        self.hit_bytes += hits * record_bytes
        self.miss_bytes += misses * record_bytes

    def snapshot(self) -> dict[str, int]:
        return asdict(self)


def ratios(counters: dict[str, int]) -> dict[str, float]:
    """hit_rate, byte_hit_rate, on_time_ratio, waste_ratio of a snapshot or of the difference of two; 0 of 0 is 0.0."""

    def share(part: int, whole: int) -> float:
        return part / whole if whole else 0.0

    c = counters
    return {
        "hit_rate": share(c["hits"], c["hits"] + c["misses"]),
        "byte_hit_rate": share(c["hit_bytes"], c["hit_bytes"] + c["miss_bytes"]),
        "on_time_ratio": share(c["prefetch_on_time"], c["prefetch_used"]),
        "waste_ratio": share(c["prefetch_wasted_bytes"], c["prefetch_bytes"]),
    }
