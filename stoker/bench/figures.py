"""From the runs of a benchmark to its result: medians and spreads by variant and session, one plain document.

Owns the result's form (`kind` "stoker-bench", version 1). Prefill, decode and total stand apart, cold and warm too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.bench.cases import COLD, MEASURED, Plan
from stoker.bench.interleave import Run
from stoker.bench.provenance import spread
from stoker.trace.measures import latency

KIND, VERSION = "stoker-bench", 1
SPREADS = (
    "prefill_tok_s", "prefill_s", "prefill_bytes", "prefill_stall_s",
    "decode_tok_s", "decode_ms_median", "decode_bytes_per_token", "hit_rate", "stall_ms_per_token",
    "total_s",
)  # fmt: skip
RUN_SPREADS = ("load_s", "rss_peak_bytes", "cgroup_peak_bytes", "device_bytes", "major_faults")
# Room of two runs that differ by more than this is not the same room.
SLOTS_TOLERANCE = 0.02


def result(plan: Plan, runs: Mapping[str, Sequence[Run]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The document: `about` (model, options, device), then each variant with spreads by session, then every run."""
    variants = {variant.name: variant_figures(runs[variant.name]) for variant in plan.variants}
    return {
        "kind": KIND,
        "version": VERSION,
        **about,
        "variants": variants,
        "notes": notes(plan, runs),
        "runs": {name: list(of_variant) for name, of_variant in runs.items()},
    }


def variant_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Median, least, most and count over the runs for each session, latencies of all counted tokens together."""
    figures: dict[str, Any] = {name: _spread_of(runs, name) for name in RUN_SPREADS}
    figures = {name: value for name, value in figures.items() if value is not None}
    for name in MEASURED:
        sessions = [run["sessions"][name] for run in runs if name in run["sessions"]]
        if sessions:
            figures[name] = {key: value for key in SPREADS if (value := _spread_of(sessions, key)) is not None}
            figures[name]["token_ms"] = latency([ms for session in sessions for ms in session["decode_ms"]])
            figures[name] |= {key: sessions[0][key] for key in ("prefill_tokens", "decode_tokens", "total_tokens")}
    if all("cold" in run for run in runs):
        figures["cold_by"] = runs[0]["cold"]["by"]
        figures["cold_verified"] = all(run["cold"]["verified"] for run in runs)
    if "ledger" in runs[0]:
        figures["ledger"] = runs[0]["ledger"]
    return figures


def _spread_of(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float] | None:
    values = [row.get(key) for row in rows]
    return spread([v for v in values if v is not None]) if all(v is not None for v in values) else None


def notes(plan: Plan, runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    for name, of_variant in runs.items():
        if any("cold" in run and not run["cold"]["verified"] for run in of_variant):
            found.append(f"{name}: {COLD} is not verified: the page cache may have served some of it")
        if any(run.get("confined") is False for run in of_variant) and plan.limit_bytes is None and plan.separate:
            found.append(f"{name}: no memory limit")
    slots = [sum(run["ledger"]["slots"]) for of_variant in runs.values() for run in of_variant if "ledger" in run]
    if slots and min(slots) < (1 - SLOTS_TOLERANCE) * max(slots):
        found.append(f"runs had between {min(slots)} and {max(slots)} expert slots: their rooms differ")
    return found
