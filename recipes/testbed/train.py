"""Trains a testbed model from scratch; killed at any moment, it goes on where the last checkpoint stands.

    python -m recipes.testbed.train e32k4 [--tokens 30e6] [--minutes 100] [--directory models/testbed/e32k4]

The directory holds checkpoint.pt (weights, optimiser, step, random state; replaced atomically), metrics.jsonl and
plan.json. Everything depends on seed and step alone, so a resumed run has the loss curve of one that was never stopped
(on a processor of the same kind: products are in bfloat16 where it has them, else in float32).
The learning rate warms up, stays, and falls as a cosine over the last part of `--tokens`; until that part begins,
`--tokens` may be changed on a resume without changing what was done. Windows are short at first, which costs a quarter
less a token, and have their full length once the rate falls.
"""

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recipes.testbed.data import TOKENS, Windows, evaluation_windows
from recipes.testbed.head import cross_entropy
from recipes.testbed.model import CONTEXT_TOKENS, SHAPES, build, hidden_states, layer_step
from recipes.testbed.optim import make_optimiser, products_dtype
from recipes.testbed.sources import DOMAINS
from recipes.testbed.tokenizer import DIRECTORY

CHECKPOINT_S = 120
LOG_STEPS = 10
EVALUATE_STEPS = 250
EVALUATION_WINDOWS = 4  # of each domain: a running figure; evaluate.py reads all


@dataclass(frozen=True)
class Plan:
    """What a run is. Only `tokens` may change after the start."""

    model: str
    tokens: int
    seed: int = 1
    step_tokens: int = 4096
    short_window: int = 128
    optimiser: str = "muon"
    peak_rate: float = 2.5e-3  # of AdamW
    muon_rate: float = 0.015
    last_part: float = 0.02  # of the peak, at the end
    warmup_steps: int = 100
    decay_part: float = 0.4
    weight_decay: float = 0.1
    balance: float = 0.01
    clip: float = 1.0

    @property
    def steps(self) -> int:
        return self.tokens // self.step_tokens

    @property
    def decay_from(self) -> int:
        """The first step of the last part, in which the rate falls and windows are long."""
        return int(self.steps * (1 - self.decay_part))

    def rate(self, step: int) -> float:
        """The learning rate of one step, as a part of its peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step < self.decay_from:
            return 1.0
        done = min(1.0, (step - self.decay_from) / (self.steps - self.decay_from))
        return self.last_part + (1 - self.last_part) * (1 + math.cos(math.pi * done)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a testbed model; resumes by itself.")
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=float, default=30e6, help="length of the whole run")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--optimiser", choices=("muon", "adamw"), default=Plan.optimiser)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop with a checkpoint after so long")
    parser.add_argument("--threads", type=int, default=1, help="2 pay only on cores that nobody else uses")
    parser.add_argument("--directory", type=Path, help="default: models/testbed/MODEL")
    parser.add_argument("--data", type=Path, default=TOKENS, help="token files of recipes.testbed.tokenizer")
    parser.add_argument("--eager", action="store_true", help="without torch.compile: starts sooner, runs 10%% slower")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = Plan(options.model, int(options.tokens), options.seed, optimiser=options.optimiser)
    run = Run(plan, options.directory or DIRECTORY / options.model, options.data, compiled=not options.eager)
    run.go(until=time.monotonic() + options.minutes * 60)


class Run:
    """One training run: model, optimiser and place in the data, on disk and in memory."""

    def __init__(self, plan: Plan, directory: Path, data: Path, compiled: bool) -> None:
        self.plan, self.directory, self.data = plan, directory, data
        self.data_sha256 = fingerprint(data)
        directory.mkdir(parents=True, exist_ok=True)
        self.short = Windows(plan.short_window, plan.seed, data)
        self.long = Windows(CONTEXT_TOKENS, plan.seed, data)
        self.model = build(plan.model, plan.seed).train()
        rates = (plan.peak_rate, plan.muon_rate, plan.weight_decay)
        self.optimiser = make_optimiser(self.model, plan.optimiser, *rates)
        self.layer_step: Callable = torch.compile(layer_step, dynamic=False) if compiled else layer_step
        self.half = products_dtype() == torch.bfloat16
        self.step = 0
        self.resume()

    def resume(self) -> None:
        """Take up the checkpoint if there is one; refuses one of another plan. Later metrics are cut off."""
        path = self.directory / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            if replace(type(self.plan)(**state["plan"]), tokens=self.plan.tokens) != self.plan:
                raise SystemExit(f"{path} belongs to another plan: {state['plan']}; name another --directory")
            if self.plan.decay_from < state["step"] and self.plan.tokens != state["plan"]["tokens"]:
                raise SystemExit(
                    f"--tokens {self.plan.tokens}: its last part would have begun before step {state['step']}"
                )
            if state["data"] != self.data_sha256:
                raise SystemExit(f"{path} was trained on other token files than those in {self.data}")
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            torch.set_rng_state(state["random"])
            self.step = state["step"]
        (self.directory / "plan.json").write_text(json.dumps(asdict(self.plan), indent=1) + "\n")
        metrics = self.directory / "metrics.jsonl"
        kept = [line for line in metrics.read_text().splitlines() if whole(line)] if metrics.exists() else []
        kept = [line for line in kept if json.loads(line)["step"] <= self.step]
        metrics.write_text("".join(line + "\n" for line in kept))

    def save(self) -> None:
        """Replace the checkpoint atomically: a kill leaves the old one or the new one, whole."""
        partial = self.directory / "checkpoint.pt.partial"
        state = {
            "plan": asdict(self.plan),
            "data": self.data_sha256,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": torch.get_rng_state(),
        }
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.directory / "checkpoint.pt")

    def go(self, until: float) -> None:
        """Train to the plan's end, or to `until` (time.monotonic)."""
        saved_at, since, losses = time.monotonic(), time.monotonic(), []
        while self.step < self.plan.steps and time.monotonic() < until:
            figures = self.train_step()
            losses.append(figures["loss"])
            if self.step % LOG_STEPS == 0:
                now = time.monotonic()
                pace = len(losses) * self.plan.step_tokens / (now - since)
                figures |= {"loss": sum(losses) / len(losses), "tokens": self.step * self.plan.step_tokens}
                figures |= {"tokens_s": round(pace)}
                if self.step % EVALUATE_STEPS == 0 or self.step == self.plan.steps:
                    figures["valid_loss"] = self.evaluate()
                self.log(figures)
                since, losses = time.monotonic(), []
            if time.monotonic() - saved_at > CHECKPOINT_S:
                self.save()
                saved_at = time.monotonic()
        self.save()

    def train_step(self) -> dict[str, Any]:
        rate = self.plan.rate(self.step)
        self.optimiser.scale_rates(rate)
        loss, balance, load_LE = self.losses(self.batch())
        (loss + self.plan.balance * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        if not torch.isfinite(loss + norm):
            raise SystemExit(f"step {self.step}: loss {loss}, gradient norm {norm}; the checkpoint is untouched")
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        least = load_LE.amin() * load_LE.shape[1]
        figures = {"loss": loss, "balance": balance, "least_load": least, "gradient": norm}
        return {"step": self.step} | {name: value.item() for name, value in figures.items()} | {"rate": rate}

    def batch(self) -> torch.Tensor:
        """The ids of this step; long windows are counted from the step that starts them."""
        if self.step < self.plan.decay_from:
            return self.short.batch(self.step, self.plan.step_tokens // self.plan.short_window)
        return self.long.batch(self.step - self.plan.decay_from, self.plan.step_tokens // CONTEXT_TOKENS)

    def losses(self, ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            hidden_BTD, balance, load_LE = hidden_states(self.model, ids_BT[:, :-1], self.layer_step)
        head_VD = self.model.model.embed_tokens.weight
        loss = cross_entropy(hidden_BTD.flatten(0, 1), head_VD, ids_BT[:, 1:].reshape(-1), products_dtype())
        return loss, balance, load_LE

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss on a few validation windows of each domain."""
        found = {}
        for domain in DOMAINS:
            ids = evaluation_windows(domain, "valid", CONTEXT_TOKENS, EVALUATION_WINDOWS, self.data)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
                hidden_BTD, _, _ = hidden_states(self.model, ids[:, :-1])
            head_VD = self.model.model.embed_tokens.weight
            targets = ids[:, 1:].reshape(-1)
            found[domain] = cross_entropy(hidden_BTD.flatten(0, 1), head_VD, targets, products_dtype()).item()
        return {domain: round(loss, 4) for domain, loss in found.items()}

    def log(self, figures: dict[str, Any]) -> None:
        short = {name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()}
        with open(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps(short) + "\n")
        left = (self.plan.steps - self.step) * self.plan.step_tokens / max(figures["tokens_s"], 1)
        print(f"step {self.step}/{self.plan.steps} loss {figures['loss']:.3f} left {left / 60:.0f} min", flush=True)


def fingerprint(data: Path) -> str:
    """sha256 over the training and validation token files."""
    digest = hashlib.sha256()
    for file in token_files(data):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def token_files(data: Path) -> Iterator[Path]:
    for domain in DOMAINS:
        for split in ("train", "valid"):
            yield data / f"{domain}.{split}.npy"


def whole(line: str) -> bool:
    """False for a line that a kill cut short."""
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    main()
