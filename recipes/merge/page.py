"""Puts the figures of recipes/merge/results.json into docs/merge.md.

python -m recipes.merge.page
"""

import json
from pathlib import Path

from stoker.bench.tables import put_table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/merge.md"
TOLD = {
    "recovery": "Recovery (imitates the 16-bit model on all domains)",
    "domain": "Domain (learns more of one domain's text)",
}


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    for name, table in (("logits", logits(results)), ("weights", weights(results))):
        put_table(PAGE, name, table)


def logits(results: dict) -> str:
    """One row a LoRA and width: what is left of it in what the model says."""
    rows = [
        "| LoRA | merged into | KL of the LoRA | KL to the LoRA beside | effect left | perplexity over beside (95%) |"
    ]
    rows.append("|---" * 6 + "|")
    for name, told in TOLD.items():
        for width, one in results.get(name, {}).get("merged", {}).items():
            low, high = one["perplexity_over_beside_95"]
            rows.append(
                f"| {told} | {width} | {one['kl_of_the_lora']:.5f} | {one['kl_to_beside']:.5f} "
                f"| {one['effect_left']:.0%} | x {one['perplexity_over_beside']:.4f} ({low:.4f} to {high:.4f}) |"
            )
    return "\n".join(rows)


def weights(results: dict) -> str:
    """One row a LoRA, width and kind of projection: what is left of the delta."""
    rows = ["| LoRA | merged into | matrices | RMS of the delta | 4-bit step | norm left | share left | cosine |"]
    rows.append("|---" * 8 + "|")
    for name in TOLD:
        for width, one in results.get(name, {}).get("merged", {}).items():
            for kind, left in one["weights"].items():
                rows.append(
                    f"| {name} | {width} | `{kind}` | {left['delta_rms']:.2e} | {left['step_median']:.2e} "
                    f"| {left['norm']:.2f} | {left['share']:.1%} | {left['cosine']:.2f} |"
                )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
