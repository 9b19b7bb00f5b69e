"""Chooses how to run a model at a budget, by forecast, and says why in a line for each choice. Pure.

A choice that the forecast cannot tell from the default stays the default: planning must not lose where it cannot win.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stoker.plan.curves import greedy_for
from stoker.plan.forecast import Machine, Setting, TokenForecast, decode, misses_of, prefill
from stoker.plan.forecast_routing import Routing, hit_rate
from stoker.plan.replay import replay
from stoker.plan.routes import Routes
from stoker.plan.sizes import ModelShape

POLICIES = ("lru", "lfru", "decayed-lfu:64", "s3-fifo")
DEPTHS = (2, 4, 8)
PREFETCHES = (0, 1, 3)
WORTH = 1.02  # a forecast gain below this is noise
ALLOCATION_TOKENS = 2000
KEPT_FREE = 16  # slots
# Heads that see the next token: a step over the larger of its reads and of its arithmetic, theirs included
# (benchmarks/prerouter.py), the gain from which it is worth to train some, and their inner width.
HEADS_OVER_BOUND, HEADS_WORTH, HEADS_HIDDEN = 1.15, 1.15, 512


@dataclass(frozen=True)
class Choice:
    """What the engine is told. slots: per pool, None for the ledger's even split."""

    path: str = "auto"
    policy: str = "lru"
    depth: int | None = None  # measured on the store when it is loaded
    direct: bool = True
    prefetch: int = 3
    prefill_chunk: int | None = None
    slots: tuple[int, ...] | None = None

    def options(self) -> dict[str, Any]:
        """As fields of the runtime's Options."""
        named = {key: value for key, value in asdict(self).items() if key != "slots"}
        return named | ({"slots": tuple(self.slots)} if self.slots is not None else {})


@dataclass(frozen=True)
class RunPlan:
    """A choice, a reason for each part of it, the forecast, and what else is worth trying live, best first."""

    choice: Choice
    reasons: dict[str, str]
    token: TokenForecast
    candidates: tuple[tuple[str, Choice], ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "choice": asdict(self.choice),
            "reasons": self.reasons,
            "forecast": self.token.figures(),
            "candidates": [{"change": name, **asdict(choice)} for name, choice in self.candidates],
        }


@dataclass(frozen=True)
class Situation:
    """Everything that a plan depends on. `setting`: the default at this budget; `slots`: the ledger's, per pool."""

    shape: ModelShape
    machine: Machine
    setting: Setting
    routing: Routing
    slots: tuple[int, ...]
    routes: Routes | None = None
    prompt_tokens: int = 512


def plan(situation: Situation) -> RunPlan:
    """The best choice by forecast."""
    reasons: dict[str, str] = {}
    choice = Choice(prefetch=situation.setting.prefetch)
    whole = min(situation.slots) >= situation.shape.experts
    steps: Sequence[tuple[str, Callable[[Situation, Choice], tuple[Choice, str]]]] = (
        ("slots", _slots),
        ("path", _path),
        ("policy", _policy),
        ("prefetch", _prefetch),
        ("depth", _depth),
        ("reads", _reads),
        ("prefill chunk", _chunk),
        ("heads", _heads),
    )
    for name, decide in steps:
        if whole and name in ("policy", "prefetch", "depth"):
            value = getattr(choice, name)
            shown = "as measured at load" if value is None else value
            reasons[name] = f"{shown}: every expert stays in memory, so nothing is decided by it"
            continue
        if whole and name == "heads":
            reasons[name] = "not worth training: every expert stays in memory, so there are no reads to hide"
            continue
        choice, reasons[name] = decide(situation, choice)
    token = forecast_of(situation, choice)
    return RunPlan(choice, reasons, token, () if whole else _candidates(situation, choice))


def forecast_of(situation: Situation, choice: Choice) -> TokenForecast:
    """One token as the choice would run it."""
    path = "hot" if choice.path == "auto" else choice.path
    setting = replace(
        situation.setting,
        path=path,
        policy=choice.policy,
        depth=choice.depth or situation.setting.depth,
        direct=choice.direct,
        prefetch=choice.prefetch,
    )
    machine = replace(situation.machine, direct=choice.direct)
    return decode(situation.shape, machine, setting, situation.routing)


def _speed(situation: Situation, choice: Choice) -> float:
    return forecast_of(situation, choice).tokens_s


def _slots(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    slots, routes = situation.slots, situation.routes
    least, most = min(slots), max(slots)
    even = f"{least}" if least == most else f"{least} to {most}"
    if least >= situation.shape.experts:
        return choice, f"{even} a layer: all experts fit"
    if routes is None:
        return choice, f"{even} a layer, evenly: without recorded routes of this model no layer is known to need more"
    if len(routes.streams) != len(slots):
        return choice, f"{even} a layer, evenly: the routes have {len(routes.streams)} layers, the model {len(slots)}"
    part = routes.between(0, ALLOCATION_TOKENS)
    half = part.steps // 2
    spare = max(KEPT_FREE, sum(slots) // 50)  # another process may start a little larger
    greedy = greedy_for(part, max(sum(slots) - spare, len(slots) * part.k), train_steps=half)
    judged = part.between(half, part.steps)
    before, after = (replay(judged, choice.policy, list(one)).hit_rate for one in (slots, greedy))
    told = f"hits {before:.1%} evenly, {after:.1%} by need, on the half of the routes that was not used for it"
    if after <= before:
        return choice, f"{even} a layer, evenly: {told}"
    return replace(choice, slots=tuple(greedy)), f"{min(greedy)} to {max(greedy)} a layer, by need: {told}"


def _path(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    kept = _speed(situation, choice)
    none = _speed(situation, replace(choice, path="exact"))
    return choice, (
        f"auto: prompts stream layer by layer, decoding keeps experts in slots "
        f"({kept:.2f} tok/s by forecast; keeping nothing would give {none:.2f})"
    )


def _policy(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    known = [name for name in POLICIES if _has(situation.routing, name)]
    rates = {
        name: hit_rate(
            misses_of(situation.shape, replace(situation.setting, path="hot", policy=name), situation.routing)
        )
        for name in known
    }
    speeds = {name: _speed(situation, replace(choice, policy=name)) for name in known}
    best = max(known, key=lambda name: speeds[name])
    told = ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items())
    if speeds[best] < WORTH * speeds["lru"]:
        return choice, f"lru: forecast hits {told}; no other is worth {WORTH - 1:.0%} of the speed"
    gain = speeds[best] / speeds["lru"] - 1
    return replace(choice, policy=best), f"{best}: forecast hits {told}; {gain:.0%} faster than lru"


def _has(routing: Routing, policy: str) -> bool:
    known = getattr(routing, "misses_per_event", None)
    return known is None or policy in known


def _prefetch(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    token = forecast_of(situation, choice)
    window_ms = (token.total_ms - token.stall_ms) / situation.shape.layers
    record_ms = situation.machine.burst_ms(situation.shape.record_bytes, 1)[1]
    speeds = {most: _speed(situation, replace(choice, prefetch=most)) for most in PREFETCHES}
    best = max(speeds, key=lambda most: speeds[most])
    told = ", ".join(f"{speed:.2f} tok/s with {most}" for most, speed in speeds.items())
    told += f"; a layer computes {window_ms:.2f} ms, a record takes {record_ms:.2f} ms"
    if speeds[best] < WORTH * speeds[choice.prefetch]:
        best = choice.prefetch
    return replace(choice, prefetch=best), f"{best} reads ahead a layer: forecast {told}"


def _depth(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    profile, size = situation.machine.profile, situation.shape.record_bytes
    rates = {depth: profile.sustained_bytes_s(size, depth) for depth in (1, 4, 8)}
    told = ", ".join(f"{rate / 1e9:.2f} GB/s at {depth}" for depth, rate in rates.items())
    return choice, f"measured when the store is loaded, the least that reaches nine tenths of the best: {told}"


def _reads(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    profile = situation.machine.profile
    if not profile.direct:
        return replace(choice, direct=False), "buffered: the file system refuses direct reads"
    direct = profile.sustained_bytes_s(situation.shape.record_bytes, 8)
    told = f"direct {direct / 1e9:.2f} GB/s, through the page cache {profile.buffered_bytes_s / 1e9:.2f} GB/s from cold"
    if profile.buffered_bytes_s > WORTH * direct:
        return choice, f"direct: {told}; it leaves the page cache alone, so the budget holds (tune tries buffered)"
    return choice, f"direct: {told}; no copy, and the page cache stays free"


def _chunk(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    setting = situation.setting
    found = prefill(situation.shape, situation.machine, setting, situation.routing, situation.prompt_tokens)
    return choice, (
        f"{setting.prefill_chunk} tokens: the most whose activations take a twentieth of the budget; a prompt of "
        f"{found.tokens} takes {found.total_s:.1f} s by forecast, bound by {found.bound}"
    )


def heads_bytes(shape: ModelShape) -> int:
    """Of heads that see the next token, in bf16, on every layer: what a token reads of memory for them."""
    return 2 * shape.moe_layers * (HEADS_HIDDEN + shape.experts) * 2 * shape.hidden


def _heads(situation: Situation, choice: Choice) -> tuple[Choice, str]:
    """What a prerouter could gain; it changes the output, so it is told and never chosen."""
    shape, token = situation.shape, forecast_of(situation, choice)
    setting = replace(situation.setting, path="hot", policy=choice.policy)
    misses = shape.moe_layers * shape.top_k * (1 - hit_rate(misses_of(shape, setting, situation.routing)))
    bytes_s = situation.machine.profile.sustained_bytes_s(shape.record_bytes, setting.depth or DEPTHS[1])
    resident = replace(situation.setting, slots=shape.experts)
    compute_ms = decode(shape, situation.machine, resident, situation.routing).total_ms
    compute_ms += token.dense_ms * heads_bytes(shape) / max(1, shape.layers * shape.dense_layer_bytes)
    read_ms = 1e3 * misses * shape.record_bytes / bytes_s
    speed = 1e3 / (HEADS_OVER_BOUND * max(read_ms, compute_ms))
    told = (
        f"the gates' own routes {token.tokens_s:.2f} tok/s, routes known at a step's start about {speed:.2f} "
        f"(a token reads for {read_ms:.0f} ms and computes for {compute_ms:.0f})"
    )
    if speed < HEADS_WORTH * token.tokens_s:
        return choice, f"not worth training: {told}"
    return choice, f"worth training (`stoker train all`; they change the output): {told}"


def _candidates(situation: Situation, choice: Choice) -> tuple[tuple[str, Choice], ...]:
    """Single changes whose gain the forecast leaves open, the most promising first."""
    token = forecast_of(situation, choice)
    found: list[tuple[float, str, Choice]] = []
    for policy in POLICIES:
        if policy != choice.policy and _has(situation.routing, policy):
            other = replace(choice, policy=policy)
            found.append((_speed(situation, other) / token.tokens_s, f"policy {policy}", other))
    if token.stall_ms > 0.05 * token.total_ms:
        staged = replace(choice, path="staged")
        found.append((_speed(situation, staged) / token.tokens_s, "path staged", staged))
        for most in PREFETCHES:
            if most != choice.prefetch:
                other = replace(choice, prefetch=most)
                found.append((_speed(situation, other) / token.tokens_s, f"prefetch {most}", other))
        for depth in DEPTHS:
            if depth != choice.depth:
                found.append((0.99, f"depth {depth}", replace(choice, depth=depth)))
        if situation.machine.profile.direct:
            rate = situation.machine.profile.buffered_bytes_s
            gain = rate / situation.machine.profile.sustained_bytes_s(situation.shape.record_bytes, 8)
            found.append((gain, "buffered reads", replace(choice, direct=False)))
    found.sort(key=lambda one: -one[0])
    return tuple((name, other) for _, name, other in found)
