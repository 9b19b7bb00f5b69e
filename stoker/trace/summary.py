"""What a trace says in a page: speed, hits, stall, reads by class, on-time and waste, working set, memory.

Decode and prefill are never mixed. Definitions: docs/metrics.md. Reads columns, knows nothing of the engine.
"""

from typing import Any

import numpy as np

from stoker.trace.events import Phase, ReadClass
from stoker.trace.measures import WORKING_SET_TOKENS, distinct_in_windows, latency, percentile, share
from stoker.trace.reader import Trace

Table = dict[str, np.ndarray]


def summarise(trace: Trace) -> dict[str, Any]:
    """All figures by name, None where the trace holds too little for one. Times in ms, sizes in bytes."""
    steps, layers, reads, evictions = (trace.table(name) for name in ("step", "layer", "read", "evict"))
    decode_tokens = int(steps["tokens"][steps["phase"] == Phase.DECODE].sum())
    return {
        "about": trace.about,
        "finished": trace.finished,
        **{phase.name.lower(): _phase(phase, steps, layers) for phase in Phase if np.any(steps["phase"] == phase)},
        "reads": _reads(reads),
        "prefetch": _prefetch(trace, reads, layers, evictions),
        "read_bytes_per_decode_token": _decode_bytes_per_token(steps, reads, decode_tokens),
        "evictions": len(evictions["step"]),
        "working_set": _working_set(trace, steps, layers),
        "peak_rss_bytes": int(steps["rss_bytes"].max(initial=0)) or None,
    }


def _phase(phase: Phase, steps: Table, layers: Table) -> dict[str, Any]:
    chosen = steps["phase"] == phase
    rows = np.isin(layers["step"], steps["step"][chosen])
    hits, misses = int(layers["hits"][rows].sum()), int(layers["misses"][rows].sum())
    durations_ms = (steps["end_ns"] - steps["start_ns"])[chosen] / 1e6
    tokens = int(steps["tokens"][chosen].sum())
    stall_ms = float(layers["wait_ns"][rows].sum()) / 1e6
    seconds = float(durations_ms.sum()) / 1e3
    figures: dict[str, Any] = {
        "steps": int(chosen.sum()),
        "tokens": tokens,
        "tokens_per_s": share(tokens, seconds),
        "hit_rate": share(hits, hits + misses),
        "full_event_hit_rate": share(int((layers["misses"][rows] == 0).sum()), int(rows.sum())),
        "stall_ms_per_token": share(stall_ms, tokens),
        "step_ms": latency(durations_ms),
    }
    if phase is Phase.DECODE:
        figures["between_steps_ms"] = latency(between_steps_ms(steps, chosen))
    return figures


def between_steps_ms(steps: Table, chosen: np.ndarray) -> np.ndarray:
    """Inter-token wall times in ms: from the end of one decode step to the end of the one directly after it."""
    following = chosen[1:] & chosen[:-1]
    return (steps["end_ns"][1:] - steps["end_ns"][:-1])[following] / 1e6


def _reads(reads: Table) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for cls in ReadClass:
        rows = reads["class"] == cls
        if not rows.any():
            continue
        if cls is ReadClass.CANCELLED:  # never begun: it has no service time
            figures[cls.name.lower()] = {"count": int(rows.sum())}
            continue
        service_ms = (reads["end_ns"] - reads["start_ns"])[rows] / 1e6
        figures[cls.name.lower()] = {
            "count": int(rows.sum()),
            "bytes": int(reads["bytes"][rows].sum()),
            "service_ms_p50": percentile(service_ms, 0.5),
            "service_ms_p99": percentile(service_ms, 0.99),
            "queued_ms_p50": percentile((reads["start_ns"] - reads["submit_ns"])[rows] / 1e6, 0.5),
        }
    landed = reads["class"] != ReadClass.CANCELLED
    busy_s = busy_ns(reads["start_ns"][landed], reads["end_ns"][landed]) / 1e9
    figures["device_busy_s"] = busy_s
    figures["bytes_per_busy_s"] = share(int(reads["bytes"][landed].sum()), busy_s)
    return figures


def busy_ns(starts: np.ndarray, ends: np.ndarray) -> int:
    """Length of the union of the intervals: the time in which at least one read was in service."""
    if len(starts) == 0:
        return 0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    covered_until = np.concatenate([starts[:1], ends[:-1]])
    return int(np.maximum(ends - np.maximum(starts, covered_until), 0).sum())


def _prefetch(trace: Trace, reads: Table, layers: Table, evictions: Table) -> dict[str, Any]:
    landed = reads["class"] == ReadClass.PREFETCH
    late = reads["class"] == ReadClass.LATE
    used = _used_before_eviction(trace, {name: column[landed] for name, column in reads.items()}, layers, evictions)
    prefetched_bytes = int(reads["bytes"][landed | late].sum())
    wasted_bytes = int(reads["bytes"][landed][~used].sum())
    on_time = int(used.sum())
    return {
        "landed_early": int(landed.sum()),
        "late": int(late.sum()),
        "used": on_time + int(late.sum()),
        "on_time_ratio": share(on_time, on_time + int(late.sum())),
        "waste_ratio": share(wasted_bytes, prefetched_bytes),
        "waste_of_all_reads": share(wasted_bytes, int(reads["bytes"].sum())),
    }


def _used_before_eviction(trace: Trace, prefetches: Table, layers: Table, evictions: Table) -> np.ndarray:
    """For each landed prefetch: did a later layer of its pool ask for the expert before it lost its slot?"""
    if len(prefetches["step"]) == 0:
        return np.zeros(0, bool)
    row_of_route = np.repeat(np.arange(len(layers["step"])), layers["tokens"] * layers["k"])
    uses = _Timeline(layers["pool"][row_of_route], trace.column("route.experts"), layers["time_ns"][row_of_route])
    ends = _Timeline(evictions["pool"], evictions["expert"], evictions["time_ns"])
    where = (prefetches["pool"], prefetches["expert"], prefetches["end_ns"])
    return uses.next_after(*where) < ends.next_after(*where)


class _Timeline:
    """Times per (pool, expert), to ask for the first one after a given time."""

    NEVER = np.iinfo(np.int64).max

    def __init__(self, pools: np.ndarray, experts: np.ndarray, times_ns: np.ndarray) -> None:
        self.keys = pools * (1 << 20) + experts
        order = np.lexsort((times_ns, self.keys))
        self.keys, self.times_ns = self.keys[order], times_ns[order]

    def next_after(self, pools: np.ndarray, experts: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
        keys = pools * (1 << 20) + experts
        first, last = np.searchsorted(self.keys, keys, "left"), np.searchsorted(self.keys, keys, "right")
        found = np.full(len(keys), self.NEVER)
        for index, (low, high, time_ns) in enumerate(zip(first, last, times_ns, strict=True)):
            place = low + np.searchsorted(self.times_ns[low:high], time_ns, "right")
            if place < high:
                found[index] = self.times_ns[place]
        return found


def _decode_bytes_per_token(steps: Table, reads: Table, tokens: int) -> float | None:
    rows = np.isin(reads["step"], steps["step"][steps["phase"] == Phase.DECODE])
    return share(int(reads["bytes"][rows].sum()), tokens)


def _working_set(trace: Trace, steps: Table, layers: Table) -> dict[str, Any]:
    """Distinct experts that a layer calls in a window of decode steps, averaged over the windows of each layer."""
    decode = np.isin(layers["step"], steps["step"][steps["phase"] == Phase.DECODE])
    experts = trace.column("route.experts")
    means = []
    for layer in np.unique(layers["layer"][decode]):
        rows = np.flatnonzero(decode & (layers["layer"] == layer))
        counts = (layers["tokens"] * layers["k"])[rows]
        starts = layers["route_start"][rows]
        places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        event = np.repeat(np.arange(len(rows)), counts)
        means.append(float(np.mean(distinct_in_windows(experts[places], event, WORKING_SET_TOKENS, len(rows)))))
    if not means:
        return {"window_steps": WORKING_SET_TOKENS, "mean": None, "min": None, "max": None}
    return {
        "window_steps": WORKING_SET_TOKENS,
        "mean": float(np.mean(means)),
        "min": min(means),
        "max": max(means),
    }
