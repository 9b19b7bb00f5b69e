"""Event-atomic replay of routes through a cache: which policy, how many slots, cut how. Counts; timed.py adds time.

The policy objects are the engine's (stoker.residency.policies); `min` and `min:W` are the offline floors, `static`
takes its ranking from the routes. Hits are taken against the residents before the event; then all of it is admitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker.errors import OptionError
from stoker.plan.optimal import min_misses, windowed_min_misses
from stoker.plan.routes import Routes, Stream
from stoker.residency.policies import POLICIES, Policy, make_policy

OFFLINE = "min"
WARM_UP_SHARE = 0.1


@dataclass(frozen=True)
class Outcome:
    """One policy at one size. Rates leave the warm-up out; misses are per event, in `routes.streams` order.

    A compulsory miss is the first use of an expert since the start of the replay, the others are capacity misses.
    """

    policy: str
    partition: str  # "per-layer", "greedy" or "global"
    slots: tuple[int, ...]  # one a pool, or one in all for "global"
    warm_up_steps: int
    misses: tuple[np.ndarray, ...]
    hit_rate: float
    hit_rate_by_pool: tuple[float, ...]
    full_event_hit_rate: float
    misses_per_token: float
    compulsory_per_token: float

    def figures(self) -> dict[str, Any]:
        """The outcome as plain numbers."""
        return {
            "policy": self.policy,
            "partition": self.partition,
            "slots": sum(self.slots),
            "slots_by_pool": list(self.slots),
            "warm_up_tokens": self.warm_up_steps,
            "hit_rate": self.hit_rate,
            "full_event_hit_rate": self.full_event_hit_rate,
            "misses_per_token": self.misses_per_token,
            "compulsory_misses_per_token": self.compulsory_per_token,
            "capacity_misses_per_token": self.misses_per_token - self.compulsory_per_token,
            "hit_rate_by_pool": list(self.hit_rate_by_pool),
        }


def replay(routes: Routes, policy: str, slots: int | Sequence[int], warm_up_steps: int | None = None) -> Outcome:
    """Each pool has its own cache of `slots` slots (one number, or one a pool). Raises OptionError below k slots."""
    sizes = [slots] * len(routes.streams) if isinstance(slots, int) else list(slots)
    if len(sizes) != len(routes.streams):
        raise OptionError("slots for each pool", where="slots", expected=len(routes.streams), got=len(sizes))
    for stream, size in zip(routes.streams, sizes, strict=True):
        _check_floor(stream, size)
    misses = [replay_stream(stream, policy, size) for stream, size in zip(routes.streams, sizes, strict=True)]
    return _outcome(routes, policy, "per-layer", sizes, misses, warm_up_steps)


def replay_global(routes: Routes, policy: str, slots: int, warm_up_steps: int | None = None) -> Outcome:
    """All pools share one cache of `slots` slots; the events come layer by layer, token by token."""
    merged, pool_of_event = merge(routes)
    _check_floor(merged, slots)
    missed = replay_stream(merged, policy, slots)
    misses = [missed[pool_of_event == index] for index in range(len(routes.streams))]
    return _outcome(routes, policy, "global", [slots], misses, warm_up_steps)


def replay_stream(stream: Stream, policy: str, slots: int) -> np.ndarray:
    """Misses of each event of one cache, int64 [events]."""
    base, _, argument = policy.partition(":")
    if base == OFFLINE:
        if not argument:
            return min_misses(stream, slots)
        return windowed_min_misses(stream, slots, _window(policy, argument) * len(stream.layers))
    cache = policy_for(policy, slots, stream)
    access = cache.access
    return np.fromiter((len(access(event)) for event in stream.events()), np.int64, len(stream))


def policy_for(policy: str, slots: int, stream: Stream) -> Policy:
    """The engine's policy object. `static` knows the popularity of the whole stream (an oracle); `static:0.2` of its
    first fifth."""
    base, _, argument = policy.partition(":")
    if base != "static":
        return make_policy(policy, slots)
    seen = stream.experts
    if argument:
        seen = seen[: stream.starts[round(len(stream) * _share(policy, argument))]]
    popularity = np.bincount(seen, minlength=int(stream.experts.max(initial=0)) + 1)
    return make_policy("static", slots, ranking=np.argsort(-popularity, kind="stable").tolist())


def check_policy(policy: str) -> None:
    """Raises OptionError, listing what there is, where `policy` names nothing."""
    base, _, argument = policy.partition(":")
    if base == OFFLINE:
        _window(policy, argument or "1")
    elif base == "static":
        _share(policy, argument or "1")
    elif base in POLICIES:
        make_policy(policy, 8)
    else:
        known = ", ".join([*POLICIES, "static:SHARE", "decayed-lfu:HALF_LIFE", "min", "min:WINDOW"])
        raise OptionError("unknown policy", where="--policy", expected=known, got=policy)


def merge(routes: Routes) -> tuple[Stream, np.ndarray]:
    """One stream of all events in order, experts numbered pool * experts + expert; and each event's stream index."""
    order = np.concatenate([stream.order for stream in routes.streams])
    sorting = np.argsort(order, kind="stable")
    source = np.repeat(np.arange(len(routes.streams)), [len(stream) for stream in routes.streams])[sorting]
    needed = np.concatenate([stream.needed for stream in routes.streams])
    starts = np.concatenate([[0], np.cumsum(needed)])
    flat = np.concatenate([stream.experts + i * routes.experts for i, stream in enumerate(routes.streams)])
    sizes = needed[sorting]
    new_starts = np.concatenate([[0], np.cumsum(sizes)])
    places = np.repeat(starts[sorting] - new_starts[:-1], sizes) + np.arange(len(flat))
    layers = tuple(layer for stream in routes.streams for layer in stream.layers)
    step = np.concatenate([stream.step for stream in routes.streams])[sorting]
    return Stream(-1, layers, flat[places].astype(np.int32), new_starts, step, order[sorting]), source


def relabelled(outcome: Outcome, partition: str) -> Outcome:
    return replace(outcome, partition=partition)


def _outcome(
    routes: Routes,
    policy: str,
    partition: str,
    slots: Sequence[int],
    misses: Sequence[np.ndarray],
    warm_up_steps: int | None,
) -> Outcome:
    warm_up = int(routes.steps * WARM_UP_SHARE) if warm_up_steps is None else warm_up_steps
    if not 0 <= warm_up < routes.steps:
        raise OptionError(
            "warm-up leaves nothing", where="--warm-up", expected=f"below {routes.steps} tokens", got=warm_up
        )
    counted = [stream.step >= warm_up for stream in routes.streams]
    needed = [int(stream.needed[keep].sum()) for stream, keep in zip(routes.streams, counted, strict=True)]
    missed = [int(of_pool[keep].sum()) for of_pool, keep in zip(misses, counted, strict=True)]
    full = sum(int((of_pool[keep] == 0).sum()) for of_pool, keep in zip(misses, counted, strict=True))
    tokens = routes.steps - warm_up
    return Outcome(
        policy=policy,
        partition=partition,
        slots=tuple(int(size) for size in slots),
        warm_up_steps=warm_up,
        misses=tuple(misses),
        hit_rate=1 - sum(missed) / sum(needed),
        hit_rate_by_pool=tuple(1 - m / n if n else 1.0 for m, n in zip(missed, needed, strict=True)),
        full_event_hit_rate=full / sum(int(keep.sum()) for keep in counted),
        misses_per_token=sum(missed) / tokens,
        compulsory_per_token=sum(_first_uses(stream, warm_up) for stream in routes.streams) / tokens,
    )


def _first_uses(stream: Stream, from_step: int) -> int:
    first = np.unique(stream.experts, return_index=True)[1]
    return int((stream.step[stream.event_of[first]] >= from_step).sum())


def _check_floor(stream: Stream, slots: int) -> None:
    floor = int(stream.needed.max(initial=1))
    if slots < floor:
        where = "--slots, the shared cache" if stream.pool < 0 else f"--slots, pool {stream.pool}"
        raise OptionError("fewer slots than one event needs", where=where, expected=f">= {floor}", got=slots)


def _window(policy: str, argument: str) -> int:
    if argument.isdecimal() and int(argument) >= 1:
        return int(argument)
    raise OptionError("the window is a number of tokens", where="--policy", expected="min:8", got=policy)


def _share(policy: str, argument: str) -> float:
    try:
        if 0 < float(argument) <= 1:
            return float(argument)
    except ValueError:
        pass
    raise OptionError("the share of the trace to rank by", where="--policy", expected="static:0.2", got=policy)
