"""Runs a model, and beside it a reference, over windows of text; keeps sums by document, so that memory does not grow.

Both see a window one after the other; nothing of one model's run reaches the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.evaluate.models import Scored, Scorer
from stoker.evaluate.routes import Agreement, agreement
from stoker.evaluate.scores import Scores, score
from stoker.evaluate.text import Window

Progress = Callable[[int, int], None]


@dataclass
class Document:
    """What was seen of one document: N tokens' losses in nats, the reference's, KL and whether the best token is the
    same (the last three empty without a reference)."""

    domain: str
    losses: list[NDArray[np.float64]] = field(default_factory=list)
    reference: list[NDArray[np.float64]] = field(default_factory=list)
    kl: list[NDArray[np.float64]] = field(default_factory=list)
    same_top1: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, ours: Scores, theirs: Scores | None) -> None:
        self.losses.append(ours.losses_N)
        if theirs is not None:
            self.reference.append(theirs.losses_N)
            self.kl.append(ours.kl_N)
            self.same_top1.append(ours.same_top1_N)


@dataclass
class Measured:
    """By document number; agreements by window: of the used experts with the reference's, and with the model's own
    gates on its own hidden states."""

    documents: dict[int, Document] = field(default_factory=dict)
    with_reference: list[Agreement] = field(default_factory=list)
    with_gate: list[Agreement] = field(default_factory=list)


def measure(
    model: Scorer,
    windows: Sequence[Window],
    *,
    reference: Scorer | None = None,
    first: int = 0,
    progress: Progress | None = None,
) -> Measured:
    """Score rows from `first` on of every window: row i predicts token i + 1. Windows too short for that are left out.

    progress(done, of all) is called after each window.
    """
    result = Measured()
    for done, window in enumerate(windows, 1):
        if len(window.ids) >= first + 2:
            theirs = None if reference is None else reference.score(window, first)
            _add(result, window, first, model.score(window, first), theirs)
        if progress is not None:
            progress(done, len(windows))
    return result


def _add(result: Measured, window: Window, first: int, ours: Scored, theirs: Scored | None) -> None:
    wanted_N = torch.tensor(window.ids[first + 1 :])
    document = result.documents.setdefault(window.document, Document(window.domain))
    if theirs is None:
        document.add(score(ours.logits_NV, wanted_N), None)
    else:
        document.add(score(ours.logits_NV, wanted_N, theirs.logits_NV), score(theirs.logits_NV, wanted_N))
    if ours.routes:
        result.with_gate.append(agreement(ours.routes, ours.routes))
    if ours.routes and theirs is not None and theirs.routes:
        result.with_reference.append(agreement(ours.routes, theirs.routes))
