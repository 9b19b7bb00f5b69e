"""What a sequence-local roster would cover: the experts most used in a prefix, pinned for the rest of a window.

Reads recorded routes only, so it says how many choices a pinned roster would leave alone, not what the model would then
do. Coverage below 1 is re-routed traffic: a roster changes the output. After "Predatory MoE" (Son, 2026).
"""

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


def pinned(routes: Routes, m: int, window_tokens: int = 256, prefix_share: float = 0.2) -> Coverage:
    """In each whole window the m most used experts of its first `prefix_share` are pinned: what do they cover of the
    rest?"""
    prefix = _check(routes, m, window_tokens, prefix_share)
    windows = range(0, routes.steps - window_tokens + 1, window_tokens)
    by_pool = [
        np.mean(
            [_covered(stream, stream, (low, low + prefix), (low + prefix, low + window_tokens), m) for low in windows]
        )
        for stream in routes.streams
    ]
    return _coverage(by_pool, len(windows), m * len(routes.streams) / window_tokens)


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
    experts, counts = np.unique(seen, return_counts=True)
    last = len(seen) - np.unique(seen[::-1], return_index=True)[1]
    roster = experts[np.lexsort((-last, -counts))[:m]]
    return float(np.isin(met, roster).mean())


def _coverage(by_pool: list[np.floating[Any]], windows: int, loads_per_token: float) -> Coverage:
    shares = tuple(float(share) for share in by_pool)
    return Coverage(float(np.mean(shares)), min(shares), shares, windows, loads_per_token)


def _check(routes: Routes, m: int, window_tokens: int, prefix_share: float) -> int:
    """The prefix in tokens. Raises OptionError where the roster, the window or the prefix cannot be."""
    prefix = round(window_tokens * prefix_share)
    if not routes.k <= m <= routes.experts:
        raise OptionError("roster size", where="roster m", expected=f"{routes.k} to {routes.experts}", got=m)
    if not 1 <= window_tokens <= routes.steps or prefix < 1:
        expected = f"a window of 1 to {routes.steps} tokens with a prefix inside"
        raise OptionError("roster window", where=routes.name, expected=expected, got=(window_tokens, prefix))
    return prefix
