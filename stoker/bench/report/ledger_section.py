"""The division of a memory budget as one bar: what `stoker run` prints, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.bench.report import charts, parts

ENTRIES = (
    ("process_bytes", "libraries", "c7"),
    ("dense_bytes", "dense weights", "c1"),
    ("kv_bytes", "KV cache", "c3"),
    ("prefix_bytes", "kept prefixes", "c8"),
    ("grammar_bytes", "grammars", "c9"),
    ("slots_bytes", "expert slots", "c2"),
    ("ring_bytes", "prefill ring", "c4"),
    ("scratch_bytes", "scratch", "c5"),
    ("reserve_bytes", "reserve", "c6"),
    ("free_bytes", "free", "c0"),
)


def ledger_figure(ledgers: Mapping[str, Mapping[str, Any]]) -> str:
    """One bar for each ledger by name, on one scale."""
    entries = [entry for entry in ENTRIES if any(ledger.get(entry[0]) for ledger in ledgers.values())]
    rows = []
    for name, ledger in ledgers.items():
        shares = [
            (kind, float(ledger.get(key, 0)), f"{words}: {parts.gibibytes(ledger.get(key, 0))}")
            for key, words, kind in entries
        ]
        rows.append((name, shares))

    def draw(width: float) -> str:
        return charts.stacked_row(width, "Memory by use", rows, parts.gibibytes)

    head = ["", *(words for _, words, _ in entries), "budget", "floor", "slots a layer", "of all experts"]
    lines = [
        [
            name,
            *(parts.gibibytes(ledger.get(key, 0)) for key, _, _ in entries),
            parts.gibibytes(ledger["budget_bytes"]),
            parts.gibibytes(ledger["floor_bytes"]),
            "-".join(str(n) for n in sorted({min(ledger["slots"]), max(ledger["slots"])})),
            parts.percent(ledger["resident_share"]),
        ]
        for name, ledger in ledgers.items()
    ]
    lead = "Every byte that the process may hold. Slots keep experts between tokens."
    legend = parts.legend([(kind, words) for _, words, kind in entries])
    return parts.figure("Memory ledger", draw, parts.table(head, lines), lead, legend)
