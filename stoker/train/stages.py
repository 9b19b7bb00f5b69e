"""The three stages: heads that imitate, LoRA on text, distillation on the student's own answers.

Each is a step for `loop.fit`: it draws its batch from the step's number, leaves gradients, returns figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.errors import OptionError
from stoker.train.data import Batch, Source
from stoker.train.loop import Schedule, fit
from stoker.train.losses import HEAD_LOSSES, HeadLoss, Likeliest, reverse_kl
from stoker.train.sample import answer
from stoker.train.session import Student, targets
from stoker.train.student import HeadLessons, StudentRoutes
from stoker.train.teacher import Teacher, end_ids
from stoker.train.workers import Workers


@dataclass(frozen=True)
class StageOptions:
    """`sequences` a step over all processes. train_heads, imitation: heads go on learning in sft and distill, by the
    text's loss and by `imitation` times that of stage heads."""

    sequences: int = 8
    loss: HeadLoss = "kl"
    train_heads: bool = False
    imitation: float = 0.1
    answer_tokens: int = 128
    prompt_tokens: int = 32
    temperature: float = 1.0
    likeliest: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in HEAD_LOSSES:
            raise OptionError("unknown loss", where="--loss", expected=", ".join(HEAD_LOSSES), got=self.loss)
        if min(self.sequences, self.answer_tokens, self.prompt_tokens, self.likeliest) < 1 or self.imitation < 0:
            raise OptionError(
                "sequences, tokens and weights must be positive", where="--sequences, --answer-tokens ..."
            )


@dataclass(frozen=True)
class Stage:
    """Where a stage writes, for how long, and what its run.json says beside that."""

    directory: Path
    schedule: Schedule
    options: StageOptions
    settings: Mapping[str, Any]
    workers: Workers


def train_heads(student: Student, source: Source, stage: Stage) -> list[dict[str, float]]:
    """Imitation of the next layer's gate, all owners in one exact pass without gradient (memory: one layer's heads)."""
    heads, workers = student.heads, stage.workers
    assert heads is not None, "heads are added before they are trained"

    def step(at: int) -> dict[str, float]:
        whole = source.batch(at, stage.options.sequences)
        batch = whole.share(workers.rank, workers.world)
        lessons = HeadLessons(heads, student.rules, student.top_k, batch, stage.options.loss, whole.count)
        with student.model.follow(lessons), torch.no_grad():
            student.model.hidden_states(batch.ids_BT)
        owners = len(lessons.losses)
        loss, agreement = workers.sums(
            [sum(lessons.losses.values()) / owners, sum(lessons.agreements.values()) / owners]
        )
        return {"loss": loss, "agreement": agreement}

    return _fit(stage, student.train_only(heads=True, lora=False), step, "heads")


def train_sft(student: Student, source: Source, stage: Stage) -> list[dict[str, float]]:
    """LoRA on text, along the student's routes: cross-entropy of every answer token."""

    def step(at: int) -> dict[str, float]:
        whole = source.batch(at, stage.options.sequences)
        batch = whole.share(stage.workers.rank, stage.workers.world)
        wanted_N = targets(batch)
        loss, routes = student.loss(
            batch, lambda logits, rows: F.cross_entropy(logits, wanted_N[rows], reduction="none")
        )
        return _finish(loss, routes, whole.count, stage)

    return _fit(stage, student.train_only(heads=stage.options.train_heads, lora=True), step, "sft")


def train_distill(student: Student, teacher: Teacher, prompts: Source, stage: Stage) -> list[dict[str, float]]:
    """The student answers, the teacher scores, reverse KL on the teacher's likeliest tokens and a tail."""
    options, workers = stage.options, stage.workers

    def step(at: int) -> dict[str, float]:
        whole = prompts.batch(at, options.sequences)
        own = whole.share(workers.rank, workers.world)
        draws = torch.rand(
            options.sequences, options.answer_tokens, generator=torch.Generator().manual_seed(options.seed * 2**20 + at)
        )
        batch = student_answers(student, own, draws[workers.rank :: workers.world], options)
        scores = teacher.scores(batch, options.likeliest)
        loss, routes = student.loss(batch, lambda logits, rows: reverse_kl(logits, _rows(scores, rows)))
        (count,) = workers.sums([batch.count])
        return _finish(loss, routes, count, stage)

    return _fit(stage, student.train_only(heads=options.train_heads, lora=True), step, "distill")


def student_answers(student: Student, prompts: Batch, draws_BN: Tensor, options: StageOptions) -> Batch:
    """Answers of the student to the first tokens of each row."""
    along = None if student.heads is None else (student.heads, student.rules, student.top_k)
    ends = end_ids(student.model)
    prompt_BP = prompts.ids_BT[:, : options.prompt_tokens]
    return answer(student.model, prompt_BP, draws_BN, temperature=options.temperature, student=along, end_ids=ends)


def _rows(scores: Likeliest, rows: slice) -> Likeliest:
    return Likeliest(*(part[rows] for part in scores))


def _finish(loss: Tensor, routes: StudentRoutes | None, count: float, stage: Stage) -> dict[str, float]:
    """Backward, and the step's figures over all processes."""
    options, total = stage.options, loss / count
    figures = {"loss": float(loss.detach())}
    if routes is not None:
        figures["agreement"] = float(routes.agreement())
        if options.train_heads and options.imitation:
            total = total + options.imitation * routes.imitation(options.loss) / count
    total.backward()
    return dict(zip(figures, (value / count for value in stage.workers.sums(list(figures.values()))), strict=True))


def _fit(stage: Stage, parameters: Mapping[str, torch.nn.Parameter], step: Any, title: str) -> list[dict[str, float]]:
    if not parameters:
        raise OptionError("there is nothing to train", where=title)
    return fit(stage.directory, parameters, step, stage.schedule, stage.settings, stage.workers, title)
