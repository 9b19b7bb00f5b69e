"""What delta does between exploration and pinning, and without pinning: the testbeds as they are.

    python -m recipes.roster.delta [e8k2 e32k4] --data models/roster/tokens-committed [--write]

Windows of 256 tokens of each domain's test split, all with the same text. `pinned`: barrier until token 51, pinned from
then on; `barrier`: never pinned. Ratios to free routing, paired over windows. Results: results/delta.json; --write puts
the table into docs/routing.md.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.roster.rules import Free, Rostered, working_set
from recipes.roster.shift import ratio
from recipes.roster.study import COMMITTED, HERE, SIZES, WINDOW, losses
from recipes.testbed.data import TOKENS, evaluation_windows
from recipes.testbed.measure import load
from recipes.testbed.sources import DOMAINS
from stoker.bench.provenance import provenance
from stoker.bench.tables import put_table
from stoker.routing.roster_options import Prefix, RosterOptions

RESULTS = HERE / "results" / "delta.json"
DOCS = HERE.parents[1] / "docs" / "routing.md"
DELTAS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, math.inf)
PREFIX = WINDOW // 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["e8k2", "e32k4"])
    parser.add_argument("--data", type=Path, default=TOKENS)
    parser.add_argument("--windows", type=int, default=12, help="of each domain")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.models:
        results[name] = measured(name, options)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if options.write:
        put_table(DOCS, "delta", table(results))


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = load(COMMITTED / name)
    chosen, m = model.config.num_experts_per_tok, SIZES[name[1:]]
    ids_WT = torch.cat([evaluation_windows(d, "test", WINDOW, options.windows, options.data) for d in DOMAINS])
    free = Free(chosen, noting=True)
    base_WT = losses(model, ids_WT, free)
    rows = []
    for delta in DELTAS:
        row: dict[str, Any] = {"delta": delta if math.isfinite(delta) else "inf"}
        for kind, prefix in (("barrier", Prefix()), ("pinned", Prefix(tokens=PREFIX))):
            rule = Rostered(chosen, noting=True, options=RosterOptions((m,), prefix, delta, shift=None))
            loss_WT = losses(model, ids_WT, rule)
            states = [state for each in rule.states.values() for state in each]
            after = slice(PREFIX, None)
            row[kind] = {
                "ratio_before_51": ratio((loss_WT - base_WT)[:, :PREFIX].mean(1)),
                "ratio_after_51": ratio((loss_WT - base_WT)[:, after].mean(1)),
                "working_set": float(working_set(rule, WINDOW).mean()),
                "changed_share": float(np.mean([state.changed / state.tokens / chosen for state in states])),
                "displaced": float(np.mean([state.displaced for state in states])),
            }
        rows.append(row)
        print(name, row, flush=True)
    return {
        "m": m, "windows": len(ids_WT), "perplexity_free": float(np.exp(base_WT.mean())),
        "working_set_free": float(working_set(free, WINDOW).mean()), "rows": rows, "provenance": provenance(),
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    lines = [
        "| | delta | perplexity / free, tokens 0 to 50 (barrier) | from 51 on: barrier, never pinned | pinned at 51 "
        "| members displaced in 51 tokens | experts of 256 tokens: never pinned | pinned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for row in result["rows"]:
            barrier, pinned = row["barrier"], row["pinned"]
            shown = [percent(pinned["ratio_before_51"]), *(percent(one["ratio_after_51"]) for one in (barrier, pinned))]
            sets = [f"{one['working_set']:.1f}" for one in (barrier, pinned)]
            cells = [f"{name}, m = {result['m']}", str(row["delta"]), *shown, f"{pinned['displaced']:.1f}", *sets]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def percent(value: list[float]) -> str:
    mean, low, high = (100 * (one - 1) for one in value)
    return f"{mean:+.1f}% ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    main()
