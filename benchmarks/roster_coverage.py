"""What a pinned roster covers of real routes, by size and window, with equal sizes and with sizes by layer.

    python benchmarks/roster_coverage.py --traces FOLDER [--out benchmarks/results/roster_coverage.json]

FOLDER holds qwen3_*.npz (cacheable-by-design, MIT). Writes the result and the table in docs/routing.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from stoker.bench.provenance import provenance
from stoker.bench.tables import put_table
from stoker.plan import roster
from stoker.plan.routes import Routes, load_routes

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "routing.md"
WINDOWS = {256: (16, 32, 48, 64), 1024: (32, 64)}
# What others found with another program on the same traces (no line of it is known): mean over a trace's windows.
KNOWN = {
    (256, 16): ".44 to .60", (256, 32): ".63 to .77", (256, 48): ".76 to .85", (256, 64): ".85 to .91",
    (1024, 32): ".64 to .76", (1024, 64): ".88 to .93",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "roster_coverage.json")
    options = parser.parse_args()
    all_routes = {path.stem: load_routes(str(path)) for path in sorted(options.traces.glob("qwen3_*.npz"))}
    rows = [
        row(name, routes, m, window)
        for window, sizes in WINDOWS.items()
        for m in sizes
        for name, routes in all_routes.items()
    ]
    shifts = [
        {"learned_on": a, "met_by": b, **short(roster.shifted(all_routes[a], all_routes[b], 32))}
        for a in all_routes
        for b in all_routes
    ]
    result = {"rows": rows, "shifts_m32": shifts, "provenance": provenance()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    text = table(rows, shifts)
    put_table(DOCS, "coverage", text)
    print(text)


def row(name: str, routes: Routes, m: int, window: int) -> dict[str, Any]:
    """`equal` over all windows; `halved` and `by_layer` over those of the second half, sizes learned on the first."""
    half = routes.steps // 2
    first, second = routes.between(0, half), routes.between(half, routes.steps)
    sizes = roster.dealt(first, m, window)
    return {
        "trace": name, "window": window, "m": m,
        "equal": short(roster.pinned(routes, m, window)),
        "halved": short(roster.pinned(second, m, window)),
        "by_layer": short(roster.pinned(second, sizes, window)),
        "m_by_layer": list(sizes),
    }  # fmt: skip


def short(coverage: roster.Coverage) -> dict[str, Any]:
    return {"mean": round(coverage.mean, 4), "worst_layer": round(coverage.worst, 4), "windows": coverage.windows}


def table(rows: list[dict[str, Any]], shifts: list[dict[str, Any]]) -> str:
    lines = [
        "| window | m | covered, by trace | found by others | worst layer | sizes by layer: covered | worst layer |",
        "|---|---|---|---|---|---|---|",
    ]
    for window, sizes in WINDOWS.items():
        for m in sizes:
            mine = [one for one in rows if (one["window"], one["m"]) == (window, m)]
            gain = f"{span(mine, 'by_layer', 'mean')} (equal: {span(mine, 'halved', 'mean')})"
            cells = [span(mine, "equal", "mean"), KNOWN[window, m], span(mine, "equal", "worst_layer"), gain]
            lines.append(f"| {window} | {m} | {' | '.join(cells)} | {span(mine, 'by_layer', 'worst_layer')} |")
    same = [one["mean"] for one in shifts if one["learned_on"] == one["met_by"]]
    other = [one["mean"] for one in shifts if one["learned_on"] != one["met_by"]]
    return "\n".join(
        [
            *lines,
            "",
            f"A roster of 32 learned on 256 tokens covers {min(other):.2f} to {max(other):.2f} of 256 tokens of",
            f"another domain (others found .07 to .36; chance is .25), {min(same):.2f} to {max(same):.2f} of tokens",
            "that it was learned on. [All figures](../benchmarks/results/roster_coverage.json).",
            "",
        ]
    )


def span(rows: list[dict[str, Any]], how: str, what: str) -> str:
    found = [one[how][what] for one in rows]
    return f"{min(found):.2f} to {max(found):.2f}"


if __name__ == "__main__":
    main()
