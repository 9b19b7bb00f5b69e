"""What a sequence-local roster would cover: the experts most used in a prefix, pinned for the rest of a window.

Reads recorded routes only, so it says how many choices a pinned roster would leave alone, not what the model would then
do. Coverage below 1 is re-routed traffic: a roster changes the output. After "Predatory MoE" (Son, 2026).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stoker.errors import OptionError
from stoker.plan.routes import Routes, Stream


@dataclass(frozen=True)
class Coverage:
    """Shares of expert choices that lie inside the roster: mean over all, the worst pool, and by pool.

    `loads_per_token`: experts that had to be read to fill the rosters, spread over the tokens of the windows.
    """

    mean: float
    worst: float
    by_pool: tuple[float, ...]
    windows: int
    loads_per_token: float

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def pinned(routes: Routes, m: int | Sequence[int], window_tokens: int = 256, prefix_share: float = 0.2) -> Coverage:
    """In each whole window the m most used experts of its first `prefix_share` are pinned: what do they cover of the
    rest? m: one size, or one for each pool."""
    sizes = _sizes(routes, m)
    prefix = _check(routes, min(sizes), window_tokens, prefix_share)
    _check(routes, max(sizes), window_tokens, prefix_share)
    windows = range(0, routes.steps - window_tokens + 1, window_tokens)
    by_pool = [
        np.mean(
            [_covered(stream, stream, (low, low + prefix), (low + prefix, low + window_tokens), n) for low in windows]
        )
        for stream, n in zip(routes.streams, sizes, strict=True)
    ]
    return _coverage(by_pool, len(windows), sum(sizes) / window_tokens)


def dealt(routes: Routes, m: int, window_tokens: int = 256, prefix_share: float = 0.2) -> tuple[int, ...]:
    """A roster size for each pool, m on the average: each further expert goes to the pool whose coverage it raises
    most; at least k each. Learned on the windows of `routes`: judge it on others."""
    prefix = _check(routes, m, window_tokens, prefix_share)
    curves = [_curve(stream, routes.experts, window_tokens, prefix, routes.steps) for stream in routes.streams]
    gains = np.stack([np.diff(curve) for curve in curves])[:, routes.k :]
    sizes = np.full(len(curves), routes.k)
    spare = (m - routes.k) * len(curves)
    # Coverage grows ever more slowly with m, up to noise: from the largest gain down, each pool is served in order.
    smooth = np.minimum.accumulate(gains, axis=1)
    pools = np.argsort(-smooth, axis=None, kind="stable")[:spare] // gains.shape[1]
    return tuple((sizes + np.bincount(pools, minlength=len(curves))).tolist())


def _curve(stream: Stream, experts: int, window_tokens: int, prefix: int, steps: int) -> np.ndarray:
    """Mean coverage of the rest of a window by a roster of 0, 1, ... E of its prefix, [E + 1]."""
    total, count = np.zeros(experts + 1), 0
    for low in range(0, steps - window_tokens + 1, window_tokens):
        order = _by_use(stream.between(low, low + prefix).experts)
        met = np.bincount(stream.between(low + prefix, low + window_tokens).experts.ravel(), minlength=experts)
        covered = np.cumsum(met[order]) / met.sum()
        total[1 : len(order) + 1] += covered
        total[len(order) + 1 :] += covered[-1]
        count += 1
    return total / max(1, count)


def _by_use(seen: np.ndarray) -> np.ndarray:
    """The experts of some steps, the most used first; ties: most recent."""
    flat = seen.ravel()
    experts, counts = np.unique(flat, return_counts=True)
    last = len(flat) - np.unique(flat[::-1], return_index=True)[1]
    return experts[np.lexsort((-last, -counts))]


def _sizes(routes: Routes, m: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (m,) * len(routes.streams) if isinstance(m, int) else tuple(m)
    if len(sizes) != len(routes.streams):
        expected = f"one size, or {len(routes.streams)}"
        raise OptionError("roster sizes", where="roster m", expected=expected, got=len(sizes))
    return sizes


def shifted(learned: Routes, then: Routes, m: int, learn_tokens: int = 256, window_tokens: int = 256) -> Coverage:
    """A roster learned on windows of one topic, met by windows of another: the cost of a shift that nobody notices."""
    _check(learned, m, learn_tokens, 1.0)
    _check(then, m, window_tokens, 1.0)
    count = min(learned.steps // learn_tokens, then.steps // window_tokens)
    by_pool = [
        np.mean(
            [
                _covered(
                    a, b, (i * learn_tokens, (i + 1) * learn_tokens), (i * window_tokens, (i + 1) * window_tokens), m
                )
                for i in range(count)
            ]
        )
        for a, b in zip(learned.streams, then.streams, strict=True)
    ]
    return _coverage(by_pool, count, m * len(learned.streams) / window_tokens)


def _covered(learned: Stream, then: Stream, learn: tuple[int, int], meet: tuple[int, int], m: int) -> float:
    """Share of the choices in steps `meet` that the m most used experts of steps `learn` cover; ties: most recent."""
    seen, met = learned.between(*learn).experts, then.between(*meet).experts
    return float(np.isin(met, _by_use(seen)[:m]).mean())


def _coverage(by_pool: list[np.floating[Any]], windows: int, loads_per_token: float) -> Coverage:
    shares = tuple(float(share) for share in by_pool)
    return Coverage(float(np.mean(shares)), min(shares), shares, windows, loads_per_token)


def _check(routes: Routes, m: int, window_tokens: int, prefix_share: float) -> int:
    """The prefix in tokens. Raises OptionError where the roster, the window or the prefix cannot be."""
    prefix = round(window_tokens * prefix_share)
    if not routes.k <= m <= routes.experts:
        raise OptionError("roster size", where="--roster", expected=f"{routes.k} to {routes.experts}", got=m)
    if not 1 <= window_tokens <= routes.steps or prefix < 1:
        expected = (
            f"2 to {routes.steps} tokens, as many as {routes.name} has, with at least one of them in the --prefix"
        )
        got = f"{window_tokens} tokens with a prefix of {prefix}"
        raise OptionError("a window that cannot be", where="--window", expected=expected, got=got)
    return prefix
