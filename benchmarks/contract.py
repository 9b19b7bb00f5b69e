"""The quality contract on text that did not choose the mode: what was measured on one half, checked on the other.

    python benchmarks/contract.py STORE[:SHARE]... [--out benchmarks/results/contract.json] [--write]

Measures the modes of each store as `stoker eval modes` does, on the calibrating half of the bundled text, with slots
for SHARE of the experts (1/2 where none is said), then the same modes on the held-out half: other documents of the same
six domains. For each bound the modes that the contract admits must keep it there. For contrast: what a choice by the
mean alone would admit. --write puts the table into docs/quality.md.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.bench.provenance import provenance
from stoker.bench.tables import put_table
from stoker.evaluate.modes import candidates, measure_modes
from stoker.evaluate.run import Text
from stoker.evaluate.text import USES, bundled
from stoker.generate.quality import Bound, MeasuredMode
from stoker.runtime.model import Options
from stoker.store.reader import open_store

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "quality.md"
BOUNDS = ("kl<=0.003", "kl<=0.01", "kl<=0.03", "kl<=0.1", "kl<=0.3",
          "ppl<=+0.5%", "ppl<=+1%", "ppl<=+2%", "ppl<=+5%", "ppl<=+20%")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="+", metavar="STORE[:SHARE]")
    parser.add_argument("--windows", type=int, help="of each domain; default: all")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "contract.json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.exists() else {"what": __doc__.splitlines()[0]}
    for named in options.stores:
        name, _, share = named.partition(":")
        result.setdefault("stores", {})[Path(name).name] = measured(Path(name), float(share or 0.5), options)
        result["provenance"] = provenance()
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if options.write:
        put_table(DOCS, "held-out", table(result))


def measured(path: Path, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Every mode on both halves."""
    store = open_store(path)
    slots = tuple(round(share * pool.experts) for pool in store.pools)
    loading = Options(memory=options.memory, ctx_size=512, slots=slots)
    found = {}
    for use in USES:
        text = Text(f"bundled:{use}", bundled(use), options.windows)
        print(f"{path.name}, {use}", file=sys.stderr)
        modes = measure_modes(path, candidates(store, []), text, loading, lambda line: print(line, file=sys.stderr))
        found[use] = [asdict(mode) for mode in modes]
    return {"slots": slots[0], "experts": store.pools[0].experts, "windows": options.windows, "halves": found}


def checked(halves: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bound: whom it admits, and how much of the bound they take on the held-out half."""
    first, other = ({one["name"]: MeasuredMode(**one) for one in halves[use]} for use in USES)
    rows = []
    for text in BOUNDS:
        bound = Bound.parse(text)
        admitted = [name for name, mode in first.items() if mode.options and bound.kept(mode)]
        by_mean = [name for name, mode in first.items() if mode.options and of(bound, mode) <= bound.limit]
        rows.append(
            {
                "bound": text,
                "chosen": min(["exact", *admitted], key=lambda name: first[name].ms_per_token),
                "admitted": {name: [of(bound, other[name]), worst(bound, other[name])] for name in admitted},
                "broken": [name for name in admitted if of(bound, other[name]) > bound.limit],
                "broken_in_worst_domain": [name for name in admitted if worst(bound, other[name]) > bound.limit],
                "mean_only": len(by_mean),
                "mean_only_broken": [name for name in by_mean if of(bound, other[name]) > bound.limit],
                "mean_only_broken_in_worst_domain": [n for n in by_mean if worst(bound, other[n]) > bound.limit],
            }
        )
    return rows


def of(bound: Bound, mode: MeasuredMode) -> float:
    return mode.kl if bound.kind == "kl" else mode.ratio - 1


def worst(bound: Bound, mode: MeasuredMode) -> float:
    return mode.kl_worst if bound.kind == "kl" else mode.ratio_worst - 1


def table(result: dict[str, Any]) -> str:
    lines = [
        "| store, slots | bound | fastest that is admitted | admitted | held-out mean, the largest of them | its worst "
        "domain | broken: mean, worst domain | by the mean alone: admitted | broken: mean, worst domain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, part in result["stores"].items():
        for row in checked(part["halves"]):
            unit = "{:.4f}" if row["bound"].startswith("kl") else "{:+.2%}"
            most = [max(values) for values in zip(*row["admitted"].values(), strict=True)] or ["-", "-"]
            shown = [value if isinstance(value, str) else unit.format(value) for value in most]
            broken = [f"{len(row[k])}, {len(row[k + '_in_worst_domain'])}" for k in ("broken", "mean_only_broken")]
            cells = [f"{name}, {part['slots']} of {part['experts']}", f"`{row['bound']}`", row["chosen"]]
            cells += [str(len(row["admitted"])), *shown, broken[0], str(row["mean_only"]), broken[1]]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
