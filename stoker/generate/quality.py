"""The quality contract: `--quality BOUND` loads the fastest mode that was measured to keep the bound on this model.

Owns bounds, the records that `stoker eval modes` makes, where they are kept, and the choice. Knows no torch and
measures nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stoker.errors import OptionError, StokerError
from stoker.plan.profile import cache_directory

VERSION = 3  # of what the modes do too: 3 is the roster that pins by probability
SAME_BUDGET = 0.1  # what was measured at a budget holds for budgets so close to it
_KL = re.compile(r"kl<=([0-9.]+)")
_PPL = re.compile(r"ppl<=\+?([0-9.]+)%")


@dataclass(frozen=True)
class Bound:
    """exact: the gates' routes. kl: mean KL(exact || mode) in nats a token. ppl: perplexity over exact's, less 1."""

    kind: Literal["exact", "kl", "ppl"]
    limit: float = 0.0

    @staticmethod
    def parse(text: str) -> Bound:
        """`exact`, `kl<=0.01` or `ppl<=+1%`. Raises OptionError."""
        if text == "exact":
            return Bound("exact")
        for kind, pattern, unit in (("kl", _KL, 1.0), ("ppl", _PPL, 0.01)):
            found = pattern.fullmatch(text.replace(" ", ""))
            if found:
                try:
                    return Bound(kind, float(found[1]) * unit)  # type: ignore[arg-type]
                except ValueError:
                    break
        raise OptionError("not a bound", where="--quality", expected="exact, kl<=0.01 or ppl<=+1%", got=text)

    def __str__(self) -> str:
        if self.kind == "exact":
            return "exact"
        return f"kl<={self.limit:g}" if self.kind == "kl" else f"ppl<=+{100 * self.limit:g}%"

    def kept(self, mode: MeasuredMode) -> bool:
        """Whether a mode was measured to keep it: by the upper end of the 95% interval over all text, not by the mean,
        and by the mean of the domain that it costs most: who serves one kind of text only shall have what was bound."""
        if self.kind == "exact":
            return not mode.options
        if self.kind == "kl":
            return max(mode.kl_high, mode.kl_worst) <= self.limit
        return max(mode.ratio_high, mode.ratio_worst) - 1 <= self.limit


@dataclass(frozen=True)
class MeasuredMode:
    """One mode on calibration text at one budget, against the same store's exact routes.

    options: fields of the runtime's Options that make it; none: exact. kl, ratio and their 95% intervals as in
    docs/eval.md; kl_worst, ratio_worst: means of the domain where each is largest; ms_per_token: decode, median;
    read_bytes_per_token: in that decode.
    """

    name: str
    options: Mapping[str, Any]
    kl: float
    kl_high: float
    ratio: float
    ratio_high: float
    ms_per_token: float
    read_bytes_per_token: float
    tokens: int
    fed: str = "prompt"
    adapter_fingerprint: str | None = None
    slot_agreement: float = 1.0
    kl_worst: float = 0.0
    ratio_worst: float = 1.0


@dataclass(frozen=True)
class Records:
    """What was measured of a store at about one budget. about: text, machine, date."""

    budget_bytes: int
    modes: Sequence[MeasuredMode]
    about: Mapping[str, Any] = field(default_factory=dict)


def records_file(fingerprint: str) -> Path:
    return cache_directory() / "quality" / f"{fingerprint[:32]}.json"


def remember(fingerprint: str, records: Records) -> Path:
    """Keep what was measured, in place of what was at about this budget; the file."""
    path = records_file(fingerprint)
    kept = [one for one in recall(fingerprint) if not _same(one.budget_bytes, records.budget_bytes)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    body = {"version": VERSION, "fingerprint": fingerprint, "budgets": [asdict(one) for one in [*kept, records]]}
    temporary.write_text(json.dumps(body, indent=1) + "\n")
    temporary.replace(path)
    return path


def recall(fingerprint: str) -> list[Records]:
    """What was measured of a store; nothing where the file is missing, damaged or of another version."""
    try:
        body = json.loads(records_file(fingerprint).read_text())
        if body["version"] != VERSION or body["fingerprint"] != fingerprint:
            return []
        return [
            Records(one["budget_bytes"], [MeasuredMode(**mode) for mode in one["modes"]], one["about"])
            for one in body["budgets"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def choose(fingerprint: str, bound: Bound, budget_bytes: int, model: str) -> MeasuredMode | None:
    """The fastest mode that keeps the bound; None: exact, which always does.

    Raises OptionError where nothing was measured at about this budget.
    """
    if bound.kind == "exact":
        return None
    known = recall(fingerprint)
    near = [one for one in known if _same(one.budget_bytes, budget_bytes)]
    if not near:
        raise OptionError(
            "no mode of this model was measured" + (" at about this budget" if known else ""),
            where=f"--quality {bound}",
            expected=", ".join(f"{one.budget_bytes / 2**30:.2f} GiB" for one in known) or None,
            got=f"{budget_bytes / 2**30:.2f} GiB",
            remedy=f"run `stoker eval modes {model} --memory {budget_bytes / 2**30:.2f}GiB`, or leave out --quality",
        )
    best = min((mode for mode in near[0].modes if bound.kept(mode)), key=lambda mode: mode.ms_per_token, default=None)
    return best if best is not None and best.options else None


def _same(one: int, other: int) -> bool:
    return abs(one - other) <= SAME_BUDGET * max(one, other)


# ---- what a loaded model has promised ------------------------------------------------------------------------------

# Counters of the modes that replace what the gates chose; the first is the engine's own.
REPLACED = ("dropped_experts", "swapped_choices", "prerouter_routes")


@dataclass(frozen=True)
class Promise:
    """The bound that a model was loaded under, and the mode that keeps it; mode None: exact."""

    bound: Bound
    mode: MeasuredMode | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Fields of the runtime's Options."""
        return {} if self.mode is None else dict(self.mode.options)

    @property
    def probe_limit(self) -> float | None:
        """The KL that a rolling probe holds the mode to: the bound's own, or for a bound on perplexity what was
        measured of the mode, of the domain that it costs most; None where nothing can change."""
        if self.mode is None:
            return None
        return self.bound.limit if self.bound.kind == "kl" else max(self.mode.kl_high, self.mode.kl_worst)

    def about(self) -> dict[str, Any]:
        """What is told in /v1/models."""
        told: dict[str, Any] = {"bound": str(self.bound), "chosen": "exact" if self.mode is None else self.mode.name}
        if self.mode is not None:
            told["measured"] = {
                "kl": self.mode.kl, "kl_95": self.mode.kl_high, "perplexity_ratio": self.mode.ratio,
                "perplexity_ratio_95": self.mode.ratio_high, "tokens": self.mode.tokens,
            }  # fmt: skip
        return told

    def check_adapter(self, fingerprint: str | None) -> None:
        """Raises OptionError where the adapter is not the one that was measured."""
        if self.mode is not None and self.mode.adapter_fingerprint != fingerprint:
            raise OptionError(
                "the adapter has changed since it was measured",
                where=f"--quality {self.bound}: {self.mode.options.get('adapter')}",
                expected=self.mode.adapter_fingerprint,
                got=fingerprint,
                remedy="run `stoker eval modes` again",
            )

    def check(self, stats: Mapping[str, Any]) -> None:
        """Raises StokerError where exact was promised and experts were dropped or replaced."""
        found = {name: stats[name] for name in REPLACED if stats.get(name)}
        if self.mode is None and found:
            raise StokerError("exact routing was promised and not kept", got=found, remedy="report this")


def promised(store: Path, text: str, budget_bytes: int, chosen: Mapping[str, Any]) -> Promise:
    """The promise for `--quality text`. chosen: what was asked for otherwise. Raises OptionError."""
    bound = Bound.parse(text)
    for name in ("routing", "adapter"):
        if chosen.get(name) is not None:
            raise OptionError(
                f"--quality chooses the mode, --{name} names one", where=f"--quality {bound}", remedy="give one of them"
            )
    try:
        fingerprint = str(json.loads((store / "stoker.json").read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return Promise(bound)  # what is wrong with the store is for its reader to say
    return Promise(bound, choose(fingerprint, bound, budget_bytes, str(store)))
