"""Forecasts decode and prefill speed of a model on a machine at a budget, from parts that were measured one by one.

One token: per layer attention and dense matrices, fixed overhead, then the experts: hits are computed while misses
arrive, each miss as it lands. A prompt: layer by layer through the ring, bound by reads or by arithmetic. Pure: knows
shapes, a profile and routing; no files, no torch.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from stoker.plan.forecast_layers import LayerTimes, ReadAhead, simulate
from stoker.plan.forecast_routing import Routing, hit_rate
from stoker.plan.profile import Profile, rate_at
from stoker.plan.sizes import ModelShape

Quartile = Literal["last", "low", "high"]
GATE_RECALL = 0.85
"""How often a guess of the next layer's gate on this layer's hidden state is right: one figure for all ranks, sent
likeliest first. Measured on the 30B shape: 0.996, 0.95, 0.91, 0.84 for the first four ranks, 0.46 for the eighth."""
STAGED_POLICY = "fifo"  # what the staged path does whatever policy is named
PLAIN_BYTES = 4


@dataclass(frozen=True)
class Setting:
    """How the engine is run. slots: per pool (the mean); prefill_chunk: tokens of one prefill step; scratch_bytes and
    kv_token_bytes: what a first prompt uses besides slots, at once and with each token."""

    slots: float
    ring_records: int
    prefill_chunk: int
    path: str = "auto"
    policy: str = "lru"
    depth: int | None = None  # reads in flight; None: as the engine would choose on this disk
    direct: bool = True
    prefetch: int = 3
    scratch_bytes: float = 0.0
    kv_token_bytes: float = 0.0


@dataclass(frozen=True)
class TokenForecast:
    """One decode step in ms, by what it is spent on; `stall_ms` is waiting for reads."""

    dense_ms: float
    attention_ms: float
    overhead_ms: float
    experts_ms: float
    stall_ms: float
    head_ms: float
    misses: float
    read_bytes: float
    hit_rate: float

    @property
    def total_ms(self) -> float:
        parts = (self.dense_ms, self.attention_ms, self.overhead_ms, self.experts_ms, self.stall_ms, self.head_ms)
        return sum(parts)

    @property
    def tokens_s(self) -> float:
        return 1e3 / self.total_ms

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"total_ms": self.total_ms, "tokens_s": self.tokens_s}


@dataclass(frozen=True)
class PromptForecast:
    """A prompt from an empty cache. `read_s` and `compute_s` overlap; `total_s` is the time to the first token."""

    tokens: int
    total_s: float
    compute_s: float
    read_s: float
    read_bytes: float
    distinct: float

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def bound(self) -> str:
        return "reads" if self.read_s > self.compute_s else "arithmetic"

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_s": self.tokens_s, "bound": self.bound}


@dataclass(frozen=True)
class Machine:
    """A profile as it will behave: which quartile of the disk's times, direct or through the page cache."""

    profile: Profile
    quartile: Quartile = "last"
    direct: bool = True
    disk_factor: float = 1.0  # times on the disk, relative to the profile (a disk re-measured on the spot)

    def burst_ms(self, record_bytes: int, reads: int) -> tuple[float, float]:
        first, last = self.profile.burst_ms(record_bytes, reads, self.quartile)
        slower = self.disk_factor * (1.0 if self.direct else self._buffered_factor())
        return first * slower, last * slower

    def steady_s(self, nbytes: float, record_bytes: int, depth: int) -> float:
        """Seconds for that many bytes of records, back to back."""
        middle = self.profile.burst_ms(record_bytes, 4)[1]
        spread = self.profile.burst_ms(record_bytes, 4, self.quartile)[1] / middle
        slower = self.disk_factor * spread * (1.0 if self.direct else self._buffered_factor())
        return nbytes / self.profile.sustained_bytes_s(record_bytes, depth) * slower

    def _buffered_factor(self) -> float:
        return max(1.0, self.profile.sustained_bytes_s(2_654_208, 8) / self.profile.buffered_bytes_s)


def decode(
    shape: ModelShape,
    machine: Machine,
    setting: Setting,
    routing: Routing,
    context: int = 512,
) -> TokenForecast:
    """One token after `context` others, the cache in its steady state and its slots touched."""
    kernels, costs = machine.profile.kernels, machine.profile.costs
    plain_s = shape.plain_layer_bytes / max(kernels.read_bytes_s.values())
    dense_ms = 1e3 * shape.layers * (shape.dense_layer_bytes / kernels.matvec_bytes_s + plain_s)
    macs = 2 * shape.heads * shape.head_dim * context * shape.attention_layers
    attention_ms = 1e3 * macs / kernels.attention_macs_s["decode"]
    layers_ms = (shape.layers - shape.plain_attention) * costs.layer_ms + shape.plain_attention * costs.plain_layer_ms
    missed = misses_of(shape, setting, routing)
    expected, waiting = float(missed @ np.arange(len(missed))), 1 - float(missed[0])
    keep_ms = costs.keep_ms if setting.path in ("auto", "hot", "staged") and setting.slots < shape.experts else 0.0
    misses_ms = keep_ms + expected * costs.miss_ms + waiting * (costs.wait_ms + cold_ms(shape, machine.profile))
    streaming_ms = (dense_ms + attention_ms) / shape.layers
    between_ms = streaming_ms + layers_ms / shape.layers + misses_ms
    times = times_of(shape, machine, setting, between_ms, streaming_ms)
    depth = setting.depth or machine.profile.depth
    layer = simulate(missed, times, read_ahead(shape, setting, routing, depth))
    return TokenForecast(
        dense_ms=dense_ms,
        attention_ms=attention_ms,
        overhead_ms=costs.step_ms + layers_ms + shape.moe_layers * misses_ms,
        experts_ms=shape.moe_layers * layer.experts_ms,
        stall_ms=shape.moe_layers * layer.stall_ms,
        head_ms=1e3 * shape.head_bytes / kernels.matvec_bytes_s,
        misses=shape.moe_layers * expected,
        read_bytes=shape.moe_layers * layer.reads * shape.record_bytes,
        hit_rate=hit_rate(missed),
    )


def cold_ms(shape: ModelShape, profile: Profile) -> float:
    """What a layer's dense matrices take longer after a wait than back to back."""
    slower = max(0.0, 1 / profile.waits.dense_bytes_s - 1 / profile.kernels.matvec_bytes_s)
    return 1e3 * shape.dense_layer_bytes * slower


def times_of(
    shape: ModelShape, machine: Machine, setting: Setting, between_ms: float, streaming_ms: float
) -> LayerTimes:
    """One layer's times. A read from idle takes a burst of one; each further one what eight at once add."""
    kernels, waits = machine.profile.kernels, machine.profile.waits
    first_ms = machine.burst_ms(shape.record_bytes, 1)[1]
    each_ms = max(0.0, machine.burst_ms(shape.record_bytes, 8)[1] - first_ms) / 7
    if setting.depth == 1:
        each_ms = max(each_ms, first_ms)
    return LayerTimes(
        between_ms=between_ms,
        streaming_ms=streaming_ms,
        together_ms=1e3 * shape.record_bytes / kernels.experts_bytes_s,
        alone_ms=1e3 * shape.record_bytes / waits.alone_bytes_s,
        first_ms=first_ms,
        each_ms=each_ms,
        progress=waits.progress,
    )


def read_ahead(shape: ModelShape, setting: Setting, routing: Routing, depth: int) -> ReadAhead | None:
    """What the engine reads for the next layer while this one waits; None where it does not."""
    strange = routing.strange(setting.slots, shape.experts)
    if setting.path == "staged":
        return ReadAhead(shape.top_k, GATE_RECALL, strange, depth)
    if setting.path in ("auto", "hot") and setting.prefetch:
        return ReadAhead(setting.prefetch, GATE_RECALL, strange, depth)
    return None


def misses_of(shape: ModelShape, setting: Setting, routing: Routing) -> np.ndarray:
    """Share of events with 0 .. k demand misses. `exact` and `whole_layer` keep nothing between steps."""
    none_kept = np.eye(1, shape.top_k + 1, shape.top_k)[0]
    if setting.path in ("exact", "whole_layer"):
        return none_kept
    if setting.slots >= shape.experts:
        return np.eye(1, shape.top_k + 1)[0]
    policy = STAGED_POLICY if setting.path == "staged" else setting.policy
    return routing.misses(setting.slots, shape.experts, shape.top_k, policy)


def prefill(
    shape: ModelShape, machine: Machine, setting: Setting, routing: Routing, tokens: int, warm_share: float = 0.0
) -> PromptForecast:
    """A prompt of `tokens`, in chunks. `warm_share`: of the experts, in memory before (0: just loaded)."""
    still_new = new_share(shape, machine, setting)
    total_s = compute_s = read_s = read_bytes = 0.0
    kept = setting.slots if setting.path not in ("exact", "whole_layer") else 0.0
    done, resident, distinct = 0, warm_share * shape.experts, 0.0
    touched = resident
    while done < tokens:
        chunk = min(setting.prefill_chunk, tokens - done)
        distinct = routing.distinct(chunk, shape.experts, shape.top_k)
        hits = min(distinct, resident * distinct / shape.experts)
        resident = max(resident, min(kept, distinct))
        fresh, touched = max(0.0, resident - touched) * still_new, max(touched, resident)
        layer = _chunk_layer(shape, machine, setting, chunk, done, distinct, distinct - hits, fresh)
        total_s += shape.layers * layer.total_s
        compute_s += shape.layers * (layer.dense_s + layer.experts_s)
        read_s += shape.moe_layers * layer.read_s
        read_bytes += shape.moe_layers * (distinct - hits) * shape.record_bytes
        done += chunk
    end_s = machine.profile.costs.step_ms / 1e3 + shape.head_bytes / machine.profile.kernels.matvec_bytes_s
    if not warm_share:
        found_bytes = setting.scratch_bytes + tokens * setting.kv_token_bytes
        total_s += found_bytes / machine.profile.first_use.alone_bytes_s
    return PromptForecast(tokens, total_s + end_s, compute_s + end_s, read_s, read_bytes, distinct)


@dataclass(frozen=True)
class _Layer:
    dense_s: float
    experts_s: float
    read_s: float
    total_s: float


def new_share(shape: ModelShape, machine: Machine, setting: Setting) -> float:
    """The share of the slots that a prompt right after loading finds untouched.

    The thread that touches them works from the start of loading on (residency/touch.py), ring first.
    """
    slots_bytes = (setting.slots * shape.moe_layers + setting.ring_records) * shape.record_bytes
    costs, rate = machine.profile.costs, machine.profile.first_use.bytes_s
    load_s = costs.load_s + shape.layers * costs.load_layer_s
    load_s += machine.steady_s(shape.dense_bytes, shape.record_bytes, machine.profile.depth)
    return 1 - min(1.0, load_s * rate / slots_bytes)


def _chunk_layer(
    shape: ModelShape,
    machine: Machine,
    setting: Setting,
    chunk: int,
    before: int,
    distinct: float,
    missing: float,
    fresh: float,
) -> _Layer:
    """One layer of one chunk. Reads of the next layer go on under this layer's dense part as far as the ring holds.

    fresh: records that go to memory used for the first time. The reading thread waits for what the touching one has
    not found yet, other reads land meanwhile, and what both hold up of the computing is lost. Once it is done, both
    threads find memory.
    """
    kernels, costs = machine.profile.kernels, machine.profile.costs
    dense_s = chunk * shape.dense_layer_macs / rate_at(kernels.dense_macs_s, chunk)
    scored = chunk * (before + (chunk + 1) / 2)
    attention_share = shape.attention_layers / shape.layers
    dense_s += 2 * shape.heads * shape.head_dim * scored * attention_share / kernels.attention_macs_s["prefill"]
    dense_s += chunk * shape.top_k * shape.hidden * PLAIN_BYTES / kernels.pair_bytes_s
    dense_s += (costs.layer_ms if shape.plain_attention == 0 else costs.plain_layer_ms) / 1e3
    rows = chunk * shape.top_k / max(1.0, distinct)
    experts_s = chunk * shape.top_k * shape.expert_macs / rate_at(kernels.expert_macs_s, rows)
    depth = min(setting.depth or machine.profile.depth, setting.ring_records)
    read_s = machine.steady_s(missing * shape.record_bytes, shape.record_bytes, depth)
    first_use = machine.profile.first_use
    touch_s, held_s = first_use.takes_s(fresh * shape.record_bytes, dense_s + experts_s, threads=2)
    used_before_s = read_s * (missing - fresh) / missing if missing else 0.0
    arrive_s = max(read_s, touch_s)
    record_s = arrive_s / missing if missing else 0.0
    through_ring = setting.path == "whole_layer" or (setting.path == "auto" and distinct > setting.slots)
    under_dense_s = min(dense_s, setting.ring_records * record_s) if through_ring else 0.0
    held_s += min(used_before_s, dense_s + experts_s) * machine.profile.waits.holds
    held_dense_s = held_s * under_dense_s / arrive_s if arrive_s else 0.0
    reading_s = dense_s + held_dense_s - under_dense_s + arrive_s + experts_s / max(1.0, distinct)
    total_s = max(dense_s + experts_s + held_s + record_s, reading_s)
    return _Layer(dense_s, experts_s, arrive_s, total_s if missing >= 0.5 else dense_s + experts_s)


def simple(shape: ModelShape, bytes_s: float, compute_ms: float, hit: float, extra_latency_ms: float = 0.0) -> float:
    """tok/s of the naive calculator: misses x size / bandwidth, added to the compute. Nothing overlaps in it."""
    misses = shape.moe_layers * shape.top_k * (1 - hit)
    return 1e3 / (compute_ms + misses * (1e3 * shape.record_bytes / bytes_s + extra_latency_ms))


def with_slots(setting: Setting, slots: float) -> Setting:
    return replace(setting, slots=slots)
