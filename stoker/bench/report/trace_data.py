"""What a page shows of a trace, as arrays and plain numbers: tokens over time, reads, uses, hits against residency.

Measures follow docs/metrics.md and come from trace.summary and plan; nothing here draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.plan.curves import lru_hits_by_size
from stoker.plan.evidence import CURVE_TOKENS, LEAST_CURVE_TOKENS, best_online
from stoker.plan.replay import replay
from stoker.plan.routes import from_trace
from stoker.trace.events import Phase, ReadClass
from stoker.trace.reader import Trace
from stoker.trace.summary import between_steps_ms, summarise

CURVE_SHARES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.75)


@dataclass(frozen=True)
class Bars:
    """Steps gathered into bars over busy time: milliseconds a token, of which stall. phase: 0 prefill, else decode."""

    start_s: np.ndarray
    end_s: np.ndarray
    phase: np.ndarray
    tokens: np.ndarray
    ms: np.ndarray
    stall_ms: np.ndarray


@dataclass(frozen=True)
class Curve:
    """Hit rates against residency (share of a layer's experts). `best`: (share, hit rate, policy)."""

    lru: list[tuple[float, float]]
    best: list[tuple[float, float, str]]
    floor: list[tuple[float, float]]
    tokens: int
    warm_up: int


@dataclass(frozen=True)
class TraceView:
    """One trace, ready to be drawn. uses_LE: decode uses of each expert of each layer."""

    name: str
    about: dict[str, Any]
    figures: dict[str, Any]
    latency_ms: np.ndarray
    uses_LE: np.ndarray
    layers: list[int]
    hit_rate_by_layer: list[float | None]
    bytes_by_phase: dict[str, dict[str, int]]
    busy_s: float
    left_out_s: float
    curve: Curve | None
    trace: Trace

    def bars(self, most: int) -> Bars:
        return step_bars(self.trace, most)

    def reads(self, bins: int) -> dict[str, np.ndarray]:
        return read_rate(self.trace, bins)


def view(trace: Trace) -> TraceView:
    """Everything that the page says of a trace."""
    steps, layers = trace.table("step"), trace.table("layer")
    uses, numbers = uses_by_layer(trace, steps, layers)
    busy_ns = steps["end_ns"] - steps["start_ns"]
    gaps_ns = steps["start_ns"][1:] - steps["end_ns"][:-1]
    return TraceView(
        name=trace.path.name,
        about=trace.about,
        figures=summarise(trace),
        latency_ms=between_steps_ms(steps, steps["phase"] == Phase.DECODE),
        uses_LE=uses,
        layers=numbers,
        hit_rate_by_layer=[_layer_hit_rate(steps, layers, layer) for layer in numbers],
        bytes_by_phase=bytes_by_phase(trace, steps),
        busy_s=float(busy_ns.sum()) / 1e9,
        left_out_s=float(np.maximum(gaps_ns, 0).sum()) / 1e9,
        curve=hit_curve(trace),
        trace=trace,
    )


def step_bars(trace: Trace, most: int) -> Bars:
    """At most about `most` bars; a bar never mixes phases. Time between steps is left out of the axis."""
    steps, layers = trace.table("step"), trace.table("layer")
    stall_ns = np.zeros(len(steps["step"]), np.int64)
    place = _places(steps["step"], layers["step"])
    np.add.at(stall_ns, place[place >= 0], layers["wait_ns"][place >= 0])
    spent_ns = steps["end_ns"] - steps["start_ns"]
    ends_ns = np.cumsum(spent_ns)
    width = max(1, -(-len(spent_ns) // most))
    changes = np.flatnonzero(np.diff(steps["phase"])) + 1
    runs = zip([0, *changes], [*changes, len(spent_ns)], strict=True)
    cuts = [first for low, high in runs for first in range(low, high, width)]
    starts = np.array(cuts, np.int64)
    if not len(starts):
        return Bars(*(np.zeros(0) for _ in range(6)))

    def per_bar(column: np.ndarray) -> np.ndarray:
        return np.add.reduceat(column, starts)

    tokens = np.maximum(per_bar(steps["tokens"]), 1)
    ends = ends_ns[np.append(starts[1:], len(spent_ns)) - 1]
    begins = np.append(0, ends[:-1])
    ms, stall = per_bar(spent_ns) / 1e6 / tokens, per_bar(stall_ns) / 1e6 / tokens
    return Bars(begins / 1e9, ends / 1e9, steps["phase"][starts], tokens, ms, np.minimum(stall, ms))


def read_rate(trace: Trace, bins: int) -> dict[str, np.ndarray]:
    """Bytes per second landed in each of `bins` equal parts of the busy time, by class name."""
    steps, reads = trace.table("step"), trace.table("read")
    spent_ns = steps["end_ns"] - steps["start_ns"]
    total_ns = int(spent_ns.sum())
    begins_ns = np.cumsum(spent_ns) - spent_ns
    place = _places(steps["step"], reads["step"])
    known = place >= 0
    at_ns = begins_ns[place[known]] + np.clip(
        reads["end_ns"][known] - steps["start_ns"][place[known]], 0, spent_ns[place[known]]
    )
    which = np.minimum(at_ns * bins // max(total_ns, 1), bins - 1)
    rates = {}
    for cls in ReadClass:
        mine = reads["class"][known] == cls
        if cls != ReadClass.CANCELLED and mine.any():
            landed = np.bincount(which[mine], weights=reads["bytes"][known][mine], minlength=bins)
            rates[cls.name.lower()] = landed / (total_ns / 1e9 / bins)
    return rates


def _places(step_ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Row of each wanted step in the step table (ids ascend), -1 where it is not there."""
    if not len(step_ids):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(step_ids, wanted), len(step_ids) - 1)
    return np.where(step_ids[place] == wanted, place, -1)


def uses_by_layer(
    trace: Trace, steps: dict[str, np.ndarray], layers: dict[str, np.ndarray]
) -> tuple[np.ndarray, list[int]]:
    """Decode uses [L, E] (of all steps where nothing was decoded), and the model's layer numbers."""
    decode = steps["step"][steps["phase"] == Phase.DECODE]
    rows = np.isin(layers["step"], decode) if len(decode) else np.ones(len(layers["step"]), bool)
    numbers = np.unique(layers["layer"]).tolist()
    experts = trace.column("route.experts")
    size = max(int(trace.about.get("experts") or 0), int(experts.max(initial=0)) + 1)
    uses = np.zeros((len(numbers), size), np.int64)
    for index, layer in enumerate(numbers):
        mine = np.flatnonzero(rows & (layers["layer"] == layer))
        spans = [(layers["route_start"][r], layers["tokens"][r] * layers["k"][r]) for r in mine]
        if spans:
            uses[index] = np.bincount(np.concatenate([experts[s : s + n] for s, n in spans]), minlength=size)
    return uses, numbers


def _layer_hit_rate(steps: dict[str, np.ndarray], layers: dict[str, np.ndarray], layer: int) -> float | None:
    decode = steps["step"][steps["phase"] == Phase.DECODE]
    rows = (layers["layer"] == layer) & np.isin(layers["step"], decode)
    hits, misses = int(layers["hits"][rows].sum()), int(layers["misses"][rows].sum())
    return hits / (hits + misses) if hits + misses else None


def bytes_by_phase(trace: Trace, steps: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """Bytes read by phase and class, where there were any."""
    reads = trace.table("read")
    found: dict[str, dict[str, int]] = {}
    for phase in Phase:
        rows = np.isin(reads["step"], steps["step"][steps["phase"] == phase])
        by_class = {c.name.lower(): int(reads["bytes"][rows & (reads["class"] == c)].sum()) for c in ReadClass}
        by_class = {name: nbytes for name, nbytes in by_class.items() if nbytes}
        if by_class:
            found[phase.name.lower()] = by_class
    return found


def hit_curve(trace: Trace) -> Curve | None:
    """LRU at every size, the best online policy and MIN at some, on the decode steps; None where there are too few."""
    if int((trace.column("step.phase") == Phase.DECODE).sum()) < LEAST_CURVE_TOKENS:
        return None
    routes = from_trace(trace)
    routes = routes.between(0, min(routes.steps, CURVE_TOKENS))
    warm_up = routes.steps // 10
    needed = sum(int(s.needed[s.step >= warm_up].sum()) for s in routes.streams)
    hits = np.sum([lru_hits_by_size(s, routes.experts, warm_up) for s in routes.streams], axis=0)
    floor = max(int(s.needed.max(initial=1)) for s in routes.streams)
    sizes = sorted({max(floor, round(share * routes.experts)) for share in CURVE_SHARES})
    best, least = [], []
    for size in sizes:
        rate, policy = best_online(routes, size, warm_up)
        best.append((size / routes.experts, rate, policy))
        least.append((size / routes.experts, replay(routes, "min", size, warm_up).hit_rate))
    lru = [(size / routes.experts, float(hits[size]) / needed) for size in range(floor, routes.experts + 1)]
    whole = lru[-1][1]
    return Curve(lru, [*best, (1.0, whole, "any")], [*least, (1.0, whole)], routes.steps, warm_up)
