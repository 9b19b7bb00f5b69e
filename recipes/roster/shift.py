"""A topic that changes in mid-sequence: how soon rosters are pinned anew, how often without need, and what text costs.

    python -m recipes.roster.shift [e8k2 e32k4] --data models/roster/tokens-committed [--write]

The committed testbeds, rosters pinned after 51 tokens. Changed: 256 tokens inside one document, then 256 inside one of
another domain, all 30 ordered pairs. Steady: 512 tokens inside one document. Perplexity after the change is that of the
tokens from 64 after it on. Results: results/shift.json; --write puts the table into docs/routing.md.
"""

import argparse
import hashlib
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.roster.rules import Free, Rostered
from recipes.roster.study import COMMITTED, HERE, SIZES, interval, losses
from recipes.testbed.data import TOKENS, spread_evenly, tokens
from recipes.testbed.measure import load
from recipes.testbed.sources import DOMAINS
from recipes.testbed.tokenizer import END_ID
from stoker.bench.provenance import provenance
from stoker.bench.tables import put_table
from stoker.routing.roster_options import Prefix, RosterOptions
from stoker.routing.shift import Shift

RESULTS = HERE / "results" / "shift.json"
DOCS = HERE.parents[1] / "docs" / "routing.md"
HALF = 256
PREFIX = HALF // 5
SOON = 64  # tokens after the change in which it shall be over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["e8k2", "e32k4"])
    parser.add_argument("--data", type=Path, default=TOKENS)
    parser.add_argument("--windows", type=int, default=4, help="of each pair of domains")
    parser.add_argument("--steady", type=int, default=16, help="steady windows of each domain")
    parser.add_argument("--delta", type=float, default=0.25)
    parser.add_argument("--split", choices=("test", "valid"), default="test", help="valid: text that chose no setting")
    parser.add_argument("--write", action="store_true", help="the table into docs/routing.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.models:
        results[name if options.split == "test" else f"{name}, {options.split}"] = measured(name, options)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if options.write:
        put_table(DOCS, "shift", table(results))


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = load(COMMITTED / name)
    chosen, m, experts = model.config.num_experts_per_tok, SIZES[name[1:]], model.config.num_experts

    def roster(shift: Shift | None) -> RosterOptions:
        return RosterOptions((m,), Prefix(tokens=PREFIX), options.delta, shift)

    def rules() -> dict[str, Free]:
        return {
            "free": Free(chosen),
            "stays": Watched(chosen, noting=True, options=roster(None)),
            "detects": Rostered(chosen, noting=True, options=roster(Shift())),
        }

    changed_WT, steady_WT = changed(options.windows, options), steady(options.steady, options)
    text = hashlib.sha256(torch.cat((changed_WT, steady_WT)).numpy().tobytes()).hexdigest()
    at_change = rules() | {"fresh": Rostered(chosen, options=roster(None), shift_at=HALF)}
    after = {key: losses(model, changed_WT, rule)[:, HALF + SOON :].mean(1) for key, rule in at_change.items()}
    at_rest = rules()
    whole = {key: losses(model, steady_WT, rule)[:, PREFIX:].mean(1) for key, rule in at_rest.items()}
    return {
        "changed": len(changed_WT), "steady": len(steady_WT), "delta": options.delta, "m": m,
        "perplexity_after": {key: float(np.exp(loss_W.mean())) for key, loss_W in after.items()},
        "detects_over_fresh": ratio(after["detects"] - after["fresh"]),
        "detects_over_stays": ratio(after["detects"] - after["stays"]),
        **delays(at_change["detects"].states, at_change["stays"], m / experts),  # type: ignore[attr-defined]
        "false_alarms_per_1000_tokens": alarms(at_rest["detects"].states),  # type: ignore[attr-defined]
        "perplexity_steady": {key: float(np.exp(loss_W.mean())) for key, loss_W in whole.items()},
        "steady_detects_over_stays": ratio(whole["detects"] - whole["stays"]),
        "shift": vars(Shift()), "text_sha256": text, "provenance": provenance(),
    }  # fmt: skip


class Watched(Rostered):
    """Rosters that stay, and what they hold of each token's free choices, by weight: `held`, [W, T] by layer."""

    held: dict[int, list[np.ndarray]]

    def choose(self, layer: int, scores_BTE: np.ndarray) -> np.ndarray:
        taken_BTK = super().choose(layer, scores_BTE)
        weights_BTE = np.exp(scores_BTE - scores_BTE.max(-1, keepdims=True)).astype(np.float64)
        member_BE = np.stack([state.member_E for state in self.states[layer][-len(scores_BTE) :]])
        free_BTK = np.argsort(-scores_BTE, axis=-1, kind="stable")[..., : self.chosen]
        free_weights_BTK = np.take_along_axis(weights_BTE, free_BTK, -1)
        inside_BTK = np.take_along_axis(np.broadcast_to(member_BE[:, None], weights_BTE.shape), free_BTK, -1)
        self.__dict__.setdefault("held", {}).setdefault(layer, []).append(
            (free_weights_BTK * inside_BTK).sum(-1) / free_weights_BTK.sum(-1)
        )
        return taken_BTK


def delays(states: dict[int, list[Any]], stays: Watched, chance: float) -> dict[str, Any]:
    """When each layer of each window was pinned anew after the change. `lost`: the layers whose roster, left as it is,
    has lost more than half of its lead over chance in the 128 tokens after it: those that need another one."""
    held_LWT = np.stack([np.concatenate(stays.held[layer]) for layer in sorted(stays.held)])
    before_LW = held_LWT[:, :, PREFIX:HALF].mean(2) - chance
    after_LW = held_LWT[:, :, HALF : HALF + 128].mean(2) - chance
    lost_LW = after_LW < before_LW / 2
    after: list[list[float]] = [
        [next((float(t - HALF) for t in state.repinned if t > HALF), np.inf) for state in states[layer]]
        for layer in sorted(states)
    ]
    delay_LW = np.array(after)

    def told(delay_N: np.ndarray) -> dict[str, Any]:
        seen_N = delay_N[np.isfinite(delay_N)]
        return {
            "layers_and_windows": len(delay_N),
            "pinned_anew_share": len(seen_N) / len(delay_N),
            "within_64_share": float((delay_N <= SOON).mean()),
            "tokens_p10_p50_p90": [float(np.percentile(seen_N, p)) for p in (10, 50, 90)],
            "median_of_all": float(np.median(delay_N)) if np.isfinite(np.median(delay_N)) else None,
        }

    by_layer = [round(float((row <= SOON).mean()), 3) for row in delay_LW]
    first_W = delay_LW.min(0)
    return {
        "held_lead_before_after_by_layer": np.stack((before_LW.mean(1), after_LW.mean(1)), 1).round(3).tolist(),
        "all_layers": told(delay_LW.ravel()) | {"within_64_by_layer": by_layer},
        "lost_layers": told(delay_LW[lost_LW]),
        "first_layer_to_pin": {"median": float(np.median(first_W)), "within_64_share": float((first_W <= SOON).mean())},
    }


def alarms(states: dict[int, list[Any]]) -> dict[str, Any]:
    """Rosters given up on steady text, for 1000 pinned tokens of a layer; a roster that explores is not watched."""
    again = {layer: sum(len(state.repinned) for state in each) for layer, each in states.items()}
    pinned = {layer: sum(state.tokens - PREFIX for state in each) for layer, each in states.items()}
    by_layer = [round(1000 * again[layer] / pinned[layer], 3) for layer in sorted(states)]
    return {"mean": 1000 * sum(again.values()) / sum(pinned.values()), "by_layer": by_layer}


def ratio(difference_W: np.ndarray) -> list[float]:
    """exp of the mean over windows, and the ends of its 95% interval."""
    return [float(np.exp(value)) for value in (difference_W.mean(), *interval(difference_W))]


def changed(count: int, options: argparse.Namespace) -> Tensor:
    """int64 [W, 513]: each ordered pair of domains, `count` windows. The last token is only predicted."""
    parts = {domain: inside(domain, HALF, 8 * count, options) for domain in DOMAINS}
    rows = []
    for number, (first, then) in enumerate(permutations(DOMAINS, 2)):
        for one in range(count):
            low, high = parts[first], parts[then]
            a, b = low[(number + one) % len(low)], high[(number + one + 4 * count) % len(high)]
            rows.append(np.concatenate((a[:HALF], b)))
    return torch.from_numpy(np.stack(rows))


def steady(count: int, options: argparse.Namespace) -> Tensor:
    """int64 [W, 513] windows inside one document."""
    return torch.from_numpy(np.concatenate([inside(domain, 2 * HALF, count, options) for domain in DOMAINS]))


def inside(domain: str, width: int, most: int, options: argparse.Namespace) -> np.ndarray:
    """int64 [n, width + 1] windows that lie inside one document each, at most so many, at even distances."""
    stream = tokens(domain, options.split, options.data)
    cuts = np.concatenate(([-1], np.flatnonzero(stream == END_ID), [len(stream)]))
    lows = [
        low
        for begin, end in zip(cuts[:-1] + 1, cuts[1:], strict=True)
        for low in range(begin, end - width, width)
    ]  # fmt: skip
    return np.stack([stream[low : low + width + 1] for low in spread_evenly(np.array(lows), most)]).astype(np.int64)


def table(results: dict[str, Any]) -> str:
    lines = [
        "| | pinned anew within 64 tokens, of layers that lost their roster | of all layers | tokens to that, median "
        "(10 to 90%) | false alarms in 1000 tokens | perplexity from 64 on: free | roster stays | detector | starts "
        "afresh | detector / afresh |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        lost, every, after = row["lost_layers"], row["all_layers"], row["perplexity_after"]
        low, mid, high = lost["tokens_p10_p50_p90"]
        ends = [100 * (one - 1) for one in row["detects_over_fresh"]]
        cells = [
            name, f"{lost['within_64_share']:.0%} (in the end {lost['pinned_anew_share']:.0%})",
            f"{every['within_64_share']:.0%}", f"{mid:.0f} ({low:.0f} to {high:.0f})",
            f"{row['false_alarms_per_1000_tokens']['mean']:.2f}",
            *(f"{after[key]:.1f}" for key in ("free", "stays", "detects", "fresh")),
            f"{ends[0]:+.1f}% ({ends[1]:+.1f} to {ends[2]:+.1f})",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
