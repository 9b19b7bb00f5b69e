"""What two models say of the same tokens: losses, KL and agreement, position by position. torch alone.

Definitions: docs/eval.md. Everything is computed in float64 sums of float32 logits, in slices of rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 64  # of [rows, V] at a time: float64 copies stay small


@dataclass(frozen=True)
class Scores:
    """Of N predicted tokens. losses: negative log-likelihood in nats; kl: KL(reference || model) in nats; same_top1:
    whether both think the same token the likeliest. Without a reference the last two are empty."""

    losses_N: NDArray[np.float64]
    kl_N: NDArray[np.float64]
    same_top1_N: NDArray[np.bool_]


def losses(logits_NV: Tensor, wanted_N: Tensor) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of `wanted` int64 [N] under logits float [N, V]: float64 [N]."""
    parts = [
        torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="none")
        for logits, wanted in zip(logits_NV.split(ROWS), wanted_N.split(ROWS), strict=True)
    ]
    return torch.cat(parts).numpy()


def kl_divergence(reference_NV: Tensor, logits_NV: Tensor) -> NDArray[np.float64]:
    """KL(reference || model) in nats of each row: sum over tokens of p_ref (log p_ref - log p). float64 [N], >= 0."""
    parts = []
    for theirs, ours in zip(reference_NV.split(ROWS), logits_NV.split(ROWS), strict=True):
        theirs, ours = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        parts.append(torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1))
    return torch.cat(parts).clamp_min(0).numpy()  # rounding can leave -1e-17


def score(logits_NV: Tensor, wanted_N: Tensor, reference_NV: Tensor | None = None) -> Scores:
    """Scores of logits float [N, V] on the tokens that came, int64 [N]."""
    if reference_NV is None:
        return Scores(losses(logits_NV, wanted_N), np.empty(0), np.empty(0, bool))
    same = (logits_NV.argmax(-1) == reference_NV.argmax(-1)).numpy()
    return Scores(losses(logits_NV, wanted_N), kl_divergence(reference_NV, logits_NV), same)
