"""Timed replays and roster coverage as requests in words: parses what a user asks for and runs it. No screen, no files
but the routes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import OptionError
from stoker.plan import roster
from stoker.plan.curves import greedy_for
from stoker.plan.device import DeviceModel
from stoker.plan.predictors import CoOccurrence, Markov, StaleGate, popularity, steps_of
from stoker.plan.replay import check_policy
from stoker.plan.routes import Routes, load_routes
from stoker.plan.sweep import parse_sizes
from stoker.plan.timed import LayerTime, Prefetch, replay_timed

DEFAULT_TOKENS, DEFAULT_WARM_UP = 1400, 200
TRAINING_TOKENS, LEAST_TRAINING_TOKENS = 3000, 500
_PREDICTORS = "none, gate:RECALL[/MOST], co-occurrence[/MOST], markov[/MOST]"


@dataclass(frozen=True)
class Request:
    """What to replay, as the user wrote it. None stands for the default."""

    policies: Sequence[str]
    slots: str
    partition: str = "per-layer"
    warm_up: int | None = None
    tokens: int | None = None
    prefetch: str = "none"
    layer_ms: str = "0.6,0.4"
    seed: int = 0


def timed_rows(
    names: Sequence[str], request: Request, record_ms: float, lanes: int = 1, jitter: float = 0.5
) -> list[dict[str, Any]]:
    """Figures of every trace, policy and size."""
    device = DeviceModel(record_ms, lanes, jitter, request.seed)
    layer_time = parse_layer_time(request.layer_ms)
    for policy in request.policies:
        check_policy(policy)
    rows = []
    for name in names:
        routes = load_routes(name)
        tokens = min(request.tokens or DEFAULT_TOKENS, routes.steps)
        warm_up = min(DEFAULT_WARM_UP, tokens // 5) if request.warm_up is None else request.warm_up
        window = routes.between(0, tokens)
        for size in parse_sizes(request.slots, routes):
            for policy in request.policies:
                prefetch = parse_prefetch(request.prefetch, routes, tokens, request.seed)
                shared = request.partition == "global"
                slots = _dealt(routes, tokens, size) if request.partition == "greedy" else size
                total = size * len(routes.streams) if shared else slots
                figures = replay_timed(window, policy, total, device, layer_time, prefetch, warm_up, shared)
                head = {"trace": routes.name, "policy": policy, "partition": request.partition, "slots_per_layer": size}
                rows.append({**head, "prefetch": request.prefetch, "warm_up_tokens": warm_up, **figures})
    return rows


def refuse_unused(
    with_time: bool, with_roster: bool, timed: dict[str, bool], rostered: dict[str, bool], cached: dict[str, bool]
) -> None:
    """Raises OptionError for an option that was given (True) and would have no effect."""
    for given, needed, lacking in ((timed, with_time, "--record-ms"), (rostered, with_roster, "--roster")):
        for name in (name for name, is_given in given.items() if is_given and not needed):
            raise OptionError(f"has no effect without {lacking}", where=name, remedy=f"add {lacking}")
    for name in (name for name, is_given in {**cached, "--record-ms": with_time}.items() if is_given and with_roster):
        raise OptionError("has no effect with --roster", where=name, remedy="drop one of the two")


def _dealt(routes: Routes, window_tokens: int, size: int) -> list[int]:
    """The greedy allocation, fitted on the tokens after the replayed ones."""
    train = _after(routes, window_tokens, routes.steps, "--greedy")
    return greedy_for(train, size * len(routes.streams), train.steps)


def _after(routes: Routes, window_tokens: int, most: int, where: str) -> Routes:
    """Up to `most` tokens that follow the replayed ones. Raises OptionError where they are too few to learn from."""
    train = routes.between(window_tokens, window_tokens + most)
    if train.steps < LEAST_TRAINING_TOKENS:
        raise OptionError(
            "too few tokens after the replayed ones to count on",
            where=where,
            expected=f">= {LEAST_TRAINING_TOKENS}",
            got=train.steps,
            remedy="replay fewer tokens (--tokens) or use a longer trace",
        )
    return train


def rosters(
    names: Sequence[str], m: int, window: int, prefix: float, tokens: int | None, by_need: bool = False
) -> list[dict[str, Any]]:
    """Pinned coverage of each trace, and for each ordered pair of traces the coverage after a shift of topic. by_need:
    a size for each layer, m on the average, learned on the first half of a trace; coverage is of the second half."""
    all_routes = [load_routes(name) for name in names]
    if tokens is not None:
        all_routes = [routes.between(0, tokens) for routes in all_routes]
    rows = [_pinned_row(routes, m, window, prefix, by_need) for routes in all_routes]
    for learned in all_routes:
        for then in all_routes:
            if learned is not then:
                figures = roster.shifted(learned, then, m, window, window).figures()
                rows.append({"learned_on": learned.name, "met_by": then.name, "m": m, **figures})
    return rows


def _pinned_row(routes: Routes, m: int, window: int, prefix: float, by_need: bool) -> dict[str, Any]:
    row = {"learned_on": routes.name, "met_by": routes.name, "m": m}
    if not by_need:
        return {**row, **roster.pinned(routes, m, window, prefix).figures()}
    half = routes.steps // 2
    first, second = routes.between(0, half), routes.between(half, routes.steps)
    sizes = roster.dealt(first, m, window, prefix)
    equal = roster.pinned(second, m, window, prefix)
    figures = roster.pinned(second, sizes, window, prefix).figures()
    return {**row, **figures, "mean_with_equal_m": equal.mean, "worst_with_equal_m": equal.worst, "m_by_layer": sizes}


def parse_layer_time(text: str) -> LayerTime:
    """`0.6,0.4`: milliseconds of attention and of experts in one layer."""
    try:
        attention_ms, experts_ms = (float(part) for part in text.split(","))
    except ValueError:
        raise OptionError("two times in ms", where="--layer-ms", expected="0.6,0.4", got=text) from None
    return LayerTime(attention_ms, experts_ms)


def parse_prefetch(text: str, routes: Routes, window_tokens: int, seed: int = 0) -> Prefetch | None:
    """A predictor by name. The tables of co-occurrence and markov are counted on tokens after the replayed window."""
    kind, _, most_text = text.partition("/")
    name, _, argument = kind.partition(":")
    if kind == "none" and not most_text:
        return None
    try:
        most = int(most_text) if most_text else routes.k if name == "gate" else 2
        gate = StaleGate(float(argument), popularity(routes), seed) if name == "gate" else None
    except ValueError:
        raise OptionError("cannot be read", where="--prefetch", expected=_PREDICTORS, got=text) from None
    if most < 1 or name not in ("gate", "co-occurrence", "markov") or (argument and gate is None):
        raise OptionError("unknown prefetch", where="--prefetch", expected=_PREDICTORS, got=text)
    if gate is not None:
        return Prefetch(gate, most)
    train = _after(routes, window_tokens, TRAINING_TOKENS, "--prefetch")
    table = CoOccurrence if name == "co-occurrence" else Markov
    return Prefetch(table(steps_of(train), routes.experts), most)
