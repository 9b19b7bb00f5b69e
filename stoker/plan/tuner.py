"""Decides by paired measurements, and keeps what was decided: one file for each store and machine, entries by budget.

Pure but for the cache. A change is kept only when it won; the measuring is stoker/bench/tune.py's.
"""

import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.plan.planner import Choice
from stoker.plan.profile import cache_directory

VERSION = 2
LEAST_GAIN = 1.02  # of the median pair
SAME_BUDGET = 0.12  # a choice serves budgets that differ by no more than this share


@dataclass(frozen=True)
class Trial:
    """One change against the incumbent: ms a token of each block, paired in order; `kept`: it won."""

    change: str
    incumbent_ms: tuple[float, ...]
    changed_ms: tuple[float, ...]
    kept: bool

    @property
    def ratio(self) -> float:
        """Speed of the change over the incumbent's, the median of the pairs."""
        return median_ratio(self.incumbent_ms, self.changed_ms)

    def line(self) -> str:
        before, after = statistics.median(self.incumbent_ms), statistics.median(self.changed_ms)
        word, pairs = "kept" if self.kept else "not kept", len(self.incumbent_ms)
        return (
            f"{self.change}: {1e3 / after:.2f} tok/s against {1e3 / before:.2f}, {self.ratio - 1:+.1%} "
            f"in {f'the median of {pairs} pairs' if pairs > 1 else 'one pair'}: {word}"
        )


def median_ratio(before_ms: Sequence[float], after_ms: Sequence[float]) -> float:
    return statistics.median(b / a for b, a in zip(before_ms, after_ms, strict=True))


def wins(before_ms: Sequence[float], after_ms: Sequence[float]) -> bool:
    """Whether a change is to be kept: the median pair gains, and no more than one pair in four loses."""
    ratios = [b / a for b, a in zip(before_ms, after_ms, strict=True)]
    if len(ratios) < 2:
        return False
    losses = sum(ratio <= 1 for ratio in ratios)
    return statistics.median(ratios) >= LEAST_GAIN and losses <= len(ratios) // 4


def worth_another(before_ms: Sequence[float], after_ms: Sequence[float], most_pairs: int) -> bool:
    """Whether another pair could still tell: not when two pairs agree that it loses clearly, or enough were run."""
    ratios = [b / a for b, a in zip(before_ms, after_ms, strict=True)]
    if len(ratios) >= most_pairs:
        return False
    return not (len(ratios) >= 2 and max(ratios) < 1) and not (len(ratios) >= 1 and max(ratios) < 0.9)


# ---- the cache ---------------------------------------------------------------------------------------------------


def choices_path(fingerprint: str, machine: Mapping[str, str]) -> Path:
    key = json.dumps([fingerprint, dict(machine), VERSION], sort_keys=True)
    return cache_directory() / "choices" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def remember(path: Path, budget_bytes: int, choice: Choice, trials: Sequence[Trial]) -> None:
    """Keep a choice for a budget, in place of one for about the same."""
    entries = [e for e in _entries(path) if not _same(e["budget_bytes"], budget_bytes)]
    entries.append(
        {"budget_bytes": budget_bytes, "choice": asdict(choice), "trials": [asdict(trial) for trial in trials]}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"version": VERSION, "entries": entries}, indent=1) + "\n")
    temporary.replace(path)


def recall(path: Path, budget_bytes: int) -> Choice | None:
    """The choice that was tuned for about this budget; None where there is none."""
    near = [e for e in _entries(path) if _same(e["budget_bytes"], budget_bytes)]
    if not near:
        return None
    best = min(near, key=lambda e: abs(math.log(e["budget_bytes"] / budget_bytes)))
    slots = best["choice"].get("slots")
    if slots is not None and best["budget_bytes"] > budget_bytes:
        slots = None  # they would not fit
    try:
        return Choice(**(best["choice"] | {"slots": tuple(slots) if slots is not None else None}))
    except TypeError:
        return None


def _same(one: int, other: int) -> bool:
    return abs(one - other) <= SAME_BUDGET * max(one, other)


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        body = json.loads(path.read_text())
        return list(body["entries"]) if body.get("version") == VERSION else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
