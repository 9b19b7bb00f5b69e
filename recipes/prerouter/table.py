"""The ablation's table, from results.json: `python -m recipes.prerouter.table [FILE]` prints it, or writes it between
the marks in FILE (README.md beside this)."""

import json
import sys
from pathlib import Path
from typing import Any

from stoker.bench.tables import put_table

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def main() -> None:
    text = table(json.loads(RESULTS.read_text()))
    if len(sys.argv) < 2:
        print(text)
        return
    put_table(Path(sys.argv[1]), "ablation", text)


def table(results: dict[str, Any]) -> str:
    """One table a testbed and its weights; rows that differ in their seed alone share a line, with their spread."""
    return "\n\n".join(_one(name, entry) for name, entry in results.items())


def _one(name: str, entry: dict[str, Any]) -> str:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in entry["rows"].values():
        groups.setdefault((row["name"], row["k"], row["owners"]), []).append(row)
    steps = ", ".join(f"{stage} {count}" for stage, count in entry["steps"].items())
    lines = [
        f"**{name}**: {entry['test_windows']} windows of {entry['width']} tokens; "
        f"steps of {entry['sequences']} sequences: {steps}.",
        "",
        "| | K | perplexity | to int4 exact | 95% | slots named right | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    exact = next((row["perplexity"] for row in entry["rows"].values() if row["name"] == "int4 exact"), None)
    lines += [_line(*key, rows, exact) for key, rows in groups.items()]
    return "\n".join(lines)


def _line(name: str, k: int, owners: str, rows: list[dict[str, Any]], perplexity_exact: float | None) -> str:
    first = rows[0]
    if first["bits"] == 16 and perplexity_exact:  # measured before int4 was: not paired
        return f"| {name} | {k} | {first['perplexity']:.2f} | {first['perplexity'] / perplexity_exact:.3f} | | | 1 |"
    exact = [row["to_int4_exact"]["ratio"] for row in rows]
    spread = (
        f"{exact[0]:.3f}" if len(rows) == 1 else f"{sum(exact) / len(exact):.3f} ({min(exact):.3f} to {max(exact):.3f})"
    )
    low, high = first["to_int4_exact"]["ratio_95"]
    agreement = "" if first["slot_agreement"] is None else f"{first['slot_agreement']:.2f}"
    named = name if owners == "all" else f"{name} (owners {owners})"
    ppl = sum(row["perplexity"] for row in rows) / len(rows)
    return f"| {named} | {k} | {ppl:.2f} | {spread} | {low:.3f} to {high:.3f} | {agreement} | {len(rows)} |"


if __name__ == "__main__":
    main()
