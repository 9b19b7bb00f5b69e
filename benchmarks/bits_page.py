"""The tables of docs/bits-or-experts.md, from benchmarks/results/bits_or_experts.json and the testbed's quality.json.

Owns the form of the tables; the words around them are the page's own. Called by bits_or_experts.py --page.
"""

import json
from pathlib import Path
from typing import Any

from stoker.bench.tables import put_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bits-or-experts.md"
QUALITY = ROOT / "recipes" / "testbed" / "results" / "quality.json"
FULL_K = 8


def write_page(result: Path) -> None:
    """Replace what stands between each pair of marks."""
    speed = json.loads(result.read_text())
    quality = json.loads(QUALITY.read_text()) if QUALITY.exists() else None
    for name, lines in (
        ("both", both_table(speed, quality)),
        ("speed", speed_table(speed)),
        ("quality", quality_table(quality)),
    ):
        put_table(PAGE, name, "\n".join(lines))


def speed_table(speed: dict[str, Any]) -> list[str]:
    """Decode tok/s, one row a choice of bits and experts; beside the modelled columns those that were measured."""
    budgets = sorted({row["budget_gib"] for row in speed["modelled"]})
    measured = {(r["bits"], r["experts_a_token"], r["budget_gib"]): r["decode_tok_s"] for r in speed["measured"]}
    columns = [(gib, kind) for gib in budgets for kind in ("modelled", "measured")
               if kind == "modelled" or any(key[2] == gib for key in measured)]  # fmt: skip
    modelled = {(r["bits"], r["experts_a_token"], r["budget_gib"]): r for r in speed["modelled"]}
    lines = [
        "| bits | experts a token | " + " | ".join(f"{gib} GiB, {kind}" for gib, kind in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for bits, k in sorted({key[:2] for key in modelled}, reverse=True):
        cells = [
            f"{measured[bits, k, gib]:.2f}" if kind == "measured" and (bits, k, gib) in measured
            else "" if kind == "measured"
            else _modelled(modelled[bits, k, gib])
            for gib, kind in columns
        ]  # fmt: skip
        lines.append(f"| {bits} | {k} | " + " | ".join(cells) + " |")
    return lines


def _modelled(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "does not run"
    return f"{row['decode_tok_s']:.2f} ({row['resident_share']:.0%})"


def both_table(speed: dict[str, Any], quality: dict[str, Any] | None) -> list[str]:
    """What each choice costs in quality (testbed, measured) and gives in speed (30B shape, modelled)."""
    rows = {(r["bits"], r["experts_a_token"], r["budget_gib"]): r for r in speed["modelled"] if "refused" not in r}
    budgets = sorted({key[2] for key in rows})
    lines = [
        "| experts | a token | testbed's perplexity for that change alone, measured | "
        + " | ".join(f"speed at {gib} GiB, modelled" for gib in budgets)
        + " |",
        "|---|---|---|" + "---|" * len(budgets),
    ]
    for bits, share in ((4, 1.0), (3, 1.0), (2, 1.0), (4, 0.75), (4, 0.5), (4, 0.25)):
        k = round(FULL_K * share)
        times = [rows[bits, k, gib]["decode_tok_s"] / rows[4, FULL_K, gib]["decode_tok_s"] for gib in budgets]
        cells = " | ".join(f"x {one:.2f}" for one in times)
        lines.append(f"| {bits} bits | {share:.0%} | {_quality(quality, bits, share)} | {cells} |")
    return lines


def _quality(quality: dict[str, Any] | None, bits: int, share: float) -> str:
    """One change alone, on the testbed with the finer experts: experts of fewer bits, or fewer experts at 16 bits."""
    if quality is None or "e32k4" not in quality:
        return "not measured yet"
    rows = quality["e32k4"]["rows"]
    k = round(share * rows[0]["experts_a_token"])
    wanted = (bits, "experts", k) if share == 1 else (16, "all matrices", k)
    fitting = [row for row in rows if (row["bits"], row["rounded"], row["experts_a_token"]) == wanted]
    return _ratio(fitting[0]) if fitting else "not measured"


def quality_table(quality: dict[str, Any] | None) -> list[str]:
    if quality is None:
        return ["Not measured yet: the testbed is being trained (`python -m recipes.testbed.quality`)."]
    lines: list[str] = []
    for name, one in quality.items():
        lines += [
            f"`{name}` after {one['tokens_seen'] / 1e6:.3g} million training tokens, on {one['test_tokens']:,} tokens "
            "of the test split, all **measured**:",
            "",
            "| bits | rounded | experts a token | perplexity | times the original's (95%) |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['bits']} | {row['rounded']} | {row['experts_a_token']} | {row['perplexity']:.2f} | {_ratio(row)} |"
            for row in one["rows"]
        ]
        lines.append("")
    return lines[:-1]


def _ratio(row: dict[str, Any]) -> str:
    low, high = row["ratio_95"]
    return f"x {row['ratio']:.3f} ({low:.3f} to {high:.3f})"
