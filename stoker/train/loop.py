"""The loop that every stage shares: optimiser, schedule, progress, metrics, and going on after a kill.

A stage gives parameters and a function that leaves their gradients; what it computes is a function of the step's
number, so that a run that starts again at its last saved step writes the same curve.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.errors import OptionError, StokerError
from stoker.train.workers import Workers

STATE, METRICS, RUN = "state.pt", "metrics.jsonl", "run.json"
# Leaves gradients that add up over processes to the step's; returns figures that are equal on all of them.
Step = Callable[[int], dict[str, float]]


@dataclass(frozen=True)
class Schedule:
    """AdamW without decay of weights. The rate rises over `warmup` steps and falls to a tenth along a cosine."""

    steps: int
    lr: float
    warmup: int = 10
    clip: float = 1.0
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.steps < 1 or self.lr <= 0 or self.warmup < 0 or self.save_every < 1:
            raise OptionError("steps, rate and saving must be positive", where="--steps, --lr", got=asdict(self))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def fit(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    step: Step,
    schedule: Schedule,
    settings: Mapping[str, Any],
    workers: Workers,
    title: str,
) -> list[dict[str, float]]:
    """Train for `schedule.steps`, going on where an earlier run in `directory` was stopped. Returns all metrics.

    `settings` describe the run; a directory of a run with others is refused (OptionError). A gradient that is not
    finite ends the run (StokerError) before it touches a weight.
    """
    held = list(parameters.values())
    optimiser = torch.optim.AdamW(held, lr=schedule.lr, betas=(0.9, 0.99), weight_decay=0.0)
    if workers.leads:
        directory.mkdir(parents=True, exist_ok=True)
        _claim(directory, {**settings, **asdict(schedule), "processes": workers.world})
    workers.wait()
    first = _restore(directory, parameters, optimiser)
    metrics = _kept_metrics(directory, first, rewrite=workers.leads)
    workers.wait()
    with _progress(title, schedule.steps, first, shown=workers.leads) as advance:
        for at in range(first, schedule.steps):
            started = time.perf_counter()
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate(at)
            optimiser.zero_grad(set_to_none=True)
            figures = step(at)
            workers.add_gradients(held)
            norm = _clip(held, schedule.clip, at)
            optimiser.step()
            seconds = time.perf_counter() - started
            metrics.append({"step": at, **figures, "grad_norm": norm, "lr": schedule.rate(at), "seconds": seconds})
            if workers.leads:
                _append(directory / METRICS, metrics[-1])
                if (at + 1) % schedule.save_every == 0 or at + 1 == schedule.steps:
                    _save(directory, at + 1, parameters, optimiser)
            advance(metrics[-1])
    workers.wait()
    return metrics


def _clip(parameters: list[nn.Parameter], limit: float, step: int) -> float:
    norm = float(nn.utils.clip_grad_norm_(parameters, limit))
    if not math.isfinite(norm):
        raise StokerError(
            "the gradient is not finite",
            where=f"step {step}",
            got=norm,
            remedy="lower --lr; with a streamed base, report the model: something may multiply its experts' results",
        )
    return norm


def _claim(directory: Path, settings: dict[str, Any]) -> None:
    """Write down what the run is, or compare with what was begun here."""
    file, wanted = directory / RUN, json.loads(json.dumps(settings))
    if file.exists():
        begun = json.loads(file.read_text())
        other = sorted(k for k in {*begun, *wanted} if begun.get(k) != wanted.get(k))
        if other:
            raise OptionError(
                "another run was begun in this directory",
                where=str(directory),
                expected={key: begun.get(key) for key in other},
                got={key: wanted.get(key) for key in other},
                remedy="give the same options to go on, or another directory",
            )
        return
    _write(file, json.dumps(wanted, indent=1) + "\n")


def _restore(directory: Path, parameters: Mapping[str, nn.Parameter], optimiser: torch.optim.Optimizer) -> int:
    """The first step that is left to do; weights and optimiser as they were before it."""
    file = directory / STATE
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["parameters"][name])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


def _save(directory: Path, step: int, parameters: Mapping[str, nn.Parameter], optimiser: torch.optim.Optimizer) -> None:
    """Whole or not at all: a kill at any time leaves the state before or the one after."""
    held = {name: parameter.detach() for name, parameter in parameters.items()}
    partial = directory / (STATE + ".partial")
    with partial.open("wb") as handle:
        torch.save({"step": step, "parameters": held, "optimiser": optimiser.state_dict()}, handle)
        handle.flush()
        os.fsync(handle.fileno())
    partial.rename(directory / STATE)


def _kept_metrics(directory: Path, first: int, rewrite: bool) -> list[dict[str, float]]:
    """The lines of steps before `first`; later ones, and a half-written last one, will be written again."""
    file, kept = directory / METRICS, []
    if not file.exists():
        return []
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["step"] < first:
            kept.append(entry)
    if rewrite:
        _write(file, "".join(json.dumps(entry) + "\n" for entry in kept))
    return kept


def _append(file: Path, entry: Mapping[str, float]) -> None:
    with file.open("a") as handle:
        handle.write(json.dumps(entry) + "\n")


def _write(file: Path, text: str) -> None:
    partial = file.with_suffix(file.suffix + ".partial")
    partial.write_text(text)
    partial.rename(file)


class _progress:
    """A bar with the time left on a terminal; a line every tenth of the way elsewhere."""

    def __init__(self, title: str, steps: int, first: int, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        live = shown and self._console.is_terminal
        self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=self._console, disable=not live)
        self._task = self._bar.add_task(title, total=steps, completed=first, figures="")
        self._title, self._steps, self._lines = title, steps, shown and not live
        self._started, self._first = time.perf_counter(), first

    def __enter__(self) -> Callable[[dict[str, float]], None]:
        self._bar.__enter__()
        return self._advance

    def __exit__(self, *raised: Any) -> None:
        self._bar.__exit__(*raised)

    def _advance(self, entry: dict[str, float]) -> None:
        told = ("step", "lr", "seconds", "grad_norm")
        figures = "  ".join(f"{name} {value:.4f}" for name, value in entry.items() if name not in told)
        self._bar.update(self._task, advance=1, figures=figures)
        done = int(entry["step"]) + 1
        if self._lines and (done % max(1, self._steps // 10) == 0 or done == self._steps):
            left = (time.perf_counter() - self._started) / (done - self._first) * (self._steps - done)
            self._console.print(f"{self._title}: {done}/{self._steps}  {figures}  {left:.0f} s left", highlight=False)
