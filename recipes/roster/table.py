"""Tables of the roster study from its results: printed, and put into docs/routing.md between its marks.

python -m recipes.roster.table [--write]
"""

import argparse
import json
from typing import Any

import numpy as np

from recipes.roster.study import HERE, interval
from stoker.bench.tables import put_table

DOCS = HERE.parents[1] / "docs" / "routing.md"
NAMES = {
    "base": "attach: pinned without any training",
    "retrofit": "retrofit, pinning active",
    "retrofit-large": "retrofit, 8,192 tokens a step (Muon)",
    "experts": "retrofit, the experts alone",
    "control": "the same steps without the rule",
    "control-large": "the large steps without the rule",
    "scratch": "from scratch under the rule",
    "amplifier": "amplifier from the start",
    "amplifier_late": "amplifier in the second half",
    "amplifier_removed": "amplifier in the first half",
    "distil": "router distilled on its biased choices",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/routing.md")
    options = parser.parse_args()
    files = sorted((HERE / "results").glob("*-s*.json"))
    text = "\n".join(table(file.stem, json.loads(file.read_text())) for file in files)
    print(text)
    if options.write:
        put_table(DOCS, "study", text)


def table(name: str, rows: dict[str, Any]) -> str:
    """One model and seed. Ratios are to the base, and to the control where there is one, free both."""
    base, control = rows["base"], rows.get("control")
    head = f"{name}, base perplexity {base['perplexity_free']:.2f}"
    lines = [
        f"| {head} | steps | free | pinned | pinned / base | pinned / control | working set of 256, free | pinned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, row in rows.items():
        plan = row["plan"]
        steps = plan["tokens"] // plan["step_tokens"] if plan else "-"
        sets = (float(np.mean(row[f"working_set_{how}"])) for how in ("free", "pinned"))
        against = [over(row, base), over(row, control) if control else "-"]
        figures = [f"{row['perplexity_free']:.2f}", f"{row['perplexity_pinned']:.2f}", *against]
        cells = [NAMES.get(key, key), str(steps), *figures, *(f"{size:.2f}" for size in sets)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def over(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Pinned perplexity over the base's free one, in percent, with a 95% interval over windows."""
    differences = np.array(row["window_losses_pinned"]) - np.array(base["window_losses_free"])
    low, high = interval(differences)
    return " ".join(
        [f"{100 * np.expm1(differences.mean()):+.1f}%", f"({100 * np.expm1(low):+.1f} to {100 * np.expm1(high):+.1f})"]
    )


if __name__ == "__main__":
    main()
