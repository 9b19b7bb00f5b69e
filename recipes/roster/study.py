"""The roster study: models trained free and under rules of routing, each judged free and with a pinned roster.

    python -m recipes.roster.study s8k2 --seed 1 [--rows base,retrofit,control] [--tokens 2e6] [--minutes 30]
    python -m recipes.roster.study e8k2 --rows base,retrofit,control      # the committed testbed as the base
    python -m recipes.roster.table                                        # tables of what there is

Rows train what they need first; a run that was killed goes on from its last checkpoint and a row that is done is not
done again. Results: results/MODEL-sSEED.json beside this file, one entry a row.
"""

import argparse
import json
import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from recipes.roster.rules import Free, Rostered, working_set
from recipes.roster.training import RulePlan, RuleRun
from recipes.testbed.data import TOKENS, evaluation_windows
from recipes.testbed.measure import load, token_losses
from recipes.testbed.model import SHAPES, layer_step
from recipes.testbed.sources import DOMAINS
from recipes.testbed.tokenizer import DIRECTORY
from recipes.testbed.train import fingerprint
from stoker.bench.provenance import provenance
from stoker.routing.roster_options import Prefix, RosterOptions

HERE = Path(__file__).parent
COMMITTED = HERE.parent / "testbed"
SIZES = {"8k2": 4, "32k4": 8}
WINDOW = 256
STEP_TOKENS = 2048
LARGE = {"step_tokens": 4 * STEP_TOKENS, "optimiser": "muon", "muon_rate": 0.006, "peak_rate": 1e-3}  # of NAME-large


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and judge the rows of the roster study.")
    parser.add_argument("model", choices=("s8k2", "s32k4", "e8k2", "e32k4"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", default="base,retrofit,control,scratch")
    parser.add_argument("--tokens", type=float, default=2e6, help="of a training from scratch")
    parser.add_argument("--steps", type=int, default=600, help="of a retrofit")
    parser.add_argument("--delta", type=float, default=0.15)
    parser.add_argument("--rate", type=float, default=3e-4, help="largest learning rate of a retrofit")
    parser.add_argument("--windows", type=int, default=32, help="test windows of 256 tokens of each domain")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop with a checkpoint after so long")
    parser.add_argument("--data", type=Path, default=TOKENS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    study = Study(options)
    for row in options.rows.split(","):
        study.row(row)


class Study:
    """One model and seed. `until`: when to stop, as time.monotonic()."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.model, self.seed = options, options.model, options.seed
        self.until = time.monotonic() + options.minutes * 60
        self.directory = DIRECTORY.parent / "roster" / f"{self.model}-s{self.seed}"
        self.file = HERE / "results" / f"{self.model}-s{self.seed}.json"
        self.m = SIZES[self.model[1:]]
        ids = {d: evaluation_windows(d, "test", WINDOW, options.windows, options.data) for d in DOMAINS}
        self.ids_WT = torch.cat(list(ids.values()))

    def row(self, name: str) -> None:
        """Train and judge one row, if it is not there."""
        results = json.loads(self.file.read_text()) if self.file.exists() else {}
        if name in results:
            return print(f"{name}: there")
        model = self.trained(name)
        began = time.monotonic()
        results[name] = self.judge(model) | self.origin(name)
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(json.dumps(results, indent=1) + "\n")
        told = {key: round(value, 3) for key, value in results[name].items() if isinstance(value, float)}
        print(f"{name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)

    # ---- training ----------------------------------------------------------------------------------------------------

    def trained(self, name: str) -> Qwen3MoeForCausalLM:
        """The row's model. Raises SystemExit where the time ends first; its checkpoint stands."""
        if name == "base" and self.model in SHAPES:
            return load(COMMITTED / self.model)
        plan = self.plan(name)
        if plan.start and not (Path(plan.start) / "model.safetensors").exists():
            self.trained(name.replace(name.partition("_")[0], "base", 1) if "_" in name else "base")
        run = RuleRun(plan, self.directory / name, self.options.data)
        run.go(until=self.until)
        if run.step < plan.steps:
            raise SystemExit(f"{name}: {run.step} of {plan.steps} steps; run it again to go on")
        return run.model.eval()

    def plan(self, name: str) -> RulePlan:
        """base, scratch, amplifier[_late|_removed]: from scratch. retrofit, control (the same steps without the rule),
        experts (the experts alone are trained), distil: from the base. NAME_half, NAME_double: of a base with half
        or twice the tokens, for erosion. NAME-large: as many steps from the base, each of four times the tokens and
        by the optimiser that trained it."""
        kind, _, variant = name.partition("_")
        kind, _, large = kind.partition("-")
        tokens = self.options.tokens * {"half": 0.5, "double": 2.0}.get(variant, 1.0)
        common = {"model": self.model, "seed": self.seed, "step_tokens": STEP_TOKENS, "window": WINDOW}
        common |= {"size": self.m, "delta": self.options.delta, "optimiser": "adamw"}
        if kind in ("base", "scratch", "amplifier"):
            rule = {"base": "free", "scratch": "roster"}.get(kind, kind)
            parts = {"late": {"from_part": 0.5}, "removed": {"until_part": 0.5}}.get(variant, {})
            return RulePlan(tokens=int(tokens), rule=rule, warmup_steps=50, **common, **parts)
        rules = {"retrofit": "roster", "experts": "roster", "control": "free", "distil": "distil"}
        if kind not in rules:
            raise SystemExit(f"no row {name}")
        base = "base" if variant == "" else f"base_{variant}"
        start = COMMITTED / self.model if self.model in SHAPES else self.directory / base
        common |= {"peak_rate": self.options.rate} if not large else LARGE
        return RulePlan(
            tokens=self.options.steps * common["step_tokens"], rule=rules[kind], start=str(start), warmup_steps=20,
            decay_part=0.9, trains="experts" if kind == "experts" else "all", **common,
        )  # fmt: skip

    def origin(self, name: str) -> dict:
        trained = {} if name == "base" and self.model in SHAPES else asdict(self.plan(name))
        trained.pop("start", None)
        return {
            "plan": trained,
            "data_sha256": fingerprint(self.options.data),
            "test_tokens": int(self.ids_WT[:, 1:].numel()),
            "window": WINDOW,
            "provenance": provenance(),
        }

    # ---- judging -----------------------------------------------------------------------------------------------------

    def judge(self, model: Qwen3MoeForCausalLM) -> dict:
        """Perplexity free and pinned after 20%, their ratio paired over windows; working sets."""
        chosen = model.config.num_experts_per_tok
        free, pinned = Free(chosen, noting=True), Rostered(chosen, noting=True, options=self.roster())
        loss_free, loss_pinned = (losses(model, self.ids_WT, rule).mean(1) for rule in (free, pinned))
        low, high = interval(loss_pinned - loss_free)
        changed = [state.changed / state.tokens / chosen for states in pinned.states.values() for state in states]
        return {
            "perplexity_free": float(np.exp(loss_free.mean())),
            "perplexity_pinned": float(np.exp(loss_pinned.mean())),
            "pinned_over_free": float(np.exp((loss_pinned - loss_free).mean())),
            "interval_95": [float(np.exp(low)), float(np.exp(high))],
            "working_set_free": working_set(free, WINDOW).round(3).tolist(),
            "working_set_pinned": working_set(pinned, WINDOW).round(3).tolist(),
            "changed_share": float(np.mean(changed)),
            "window_losses_free": loss_free.round(5).tolist(),
            "window_losses_pinned": loss_pinned.round(5).tolist(),
        }

    def roster(self) -> RosterOptions:
        return RosterOptions((self.m,), Prefix.parse("20%"), self.options.delta, shift=None)


def losses(model: Qwen3MoeForCausalLM, ids_WT: Tensor, rule: Free) -> np.ndarray:
    return token_losses(model, ids_WT, partial(layer_step, choose=rule))


def interval(differences: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    """95% of the mean of paired differences, by a bootstrap over windows."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(0, len(differences), (resamples, len(differences)))].mean(1)
    return tuple(np.percentile(means, (2.5, 97.5)))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
