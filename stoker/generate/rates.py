"""Rates over the last seconds from a model's counters: what a terminal line or a page shows while it runs.

Pure arithmetic on snapshots of `Model.stats()`; the clock is the caller's.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WINDOW_S = 4.0
COUNTED = (
    "decode_tokens",
    "decode_ns",
    "prefill_tokens",
    "prefill_ns",
    "hits",
    "misses",
    "demand_bytes",
    "prefetch_bytes",
    "stall_ns",
)


@dataclass(frozen=True)
class Rates:
    """Over the window; None where nothing happened. tok_s, prefill_tok_s: while that phase was computing.

    stall: share of the time that went by; stall_of_steps: share of the time in steps. read: bytes a second.
    """

    decoded: int
    tok_s: float | None
    prefill_tok_s: float | None
    stall: float | None
    stall_of_steps: float | None
    hit_rate: float | None
    read_bytes_s: float | None
    bytes_per_token: float | None


class Window:
    """Counters of the last few seconds, from which rates are taken."""

    def __init__(self, seconds: float = WINDOW_S) -> None:
        self.seconds = seconds
        self._seen: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, now_s: float, stats: Mapping[str, Any]) -> None:
        self._seen.append((now_s, {name: int(stats[name]) for name in COUNTED}))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > self.seconds:
            self._seen.popleft()

    def rates(self) -> Rates:
        (then_s, then), (now_s, now) = self._seen[0], self._seen[-1]
        grown = {name: now[name] - then[name] for name in COUNTED}
        spent_s, tokens = now_s - then_s, grown["decode_tokens"]
        read, asked = grown["demand_bytes"] + grown["prefetch_bytes"], grown["hits"] + grown["misses"]
        steps_ns, stall_s = grown["decode_ns"] + grown["prefill_ns"], grown["stall_ns"] / 1e9
        return Rates(
            decoded=now["decode_tokens"],
            tok_s=tokens * 1e9 / grown["decode_ns"] if grown["decode_ns"] else None,
            prefill_tok_s=grown["prefill_tokens"] * 1e9 / grown["prefill_ns"] if grown["prefill_ns"] else None,
            stall=min(1.0, stall_s / spent_s) if spent_s > 0 else None,
            stall_of_steps=min(1.0, stall_s * 1e9 / steps_ns) if steps_ns else None,
            hit_rate=grown["hits"] / asked if asked else None,
            read_bytes_s=read / spent_s if spent_s > 0 else None,
            bytes_per_token=read / tokens if tokens else None,
        )
