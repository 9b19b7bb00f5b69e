"""What is minimised: imitating a gate, predicting text, and coming near a teacher on its likeliest tokens. Pure torch.

N rows (tokens), E experts, K chosen, V vocabulary, C of a teacher's likeliest tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.routing.select import LayerRule, select

HeadLoss = Literal["kl", "set"]
HEAD_LOSSES = ("kl", "set")


def imitation(logits_NE: Tensor, gate_NE: Tensor, rule: LayerRule, top_k: int, kind: HeadLoss) -> Tensor:
    """How far a head's logits are from the gate's, a loss a row [N].

    kl: KL(gate || head), of the softmax over all experts, or summed over each expert's sigmoid. set: cross-entropy with
    the gate's chosen experts, each with the same share (softmax), or as so many yes-or-no questions (sigmoid).
    """
    if kind == "kl":
        if rule.score == "softmax":
            return F.kl_div(logits_NE.log_softmax(-1), gate_NE.log_softmax(-1), reduction="none", log_target=True).sum(
                -1
            )
        wanted_NE = gate_NE.sigmoid()
        cross = F.binary_cross_entropy_with_logits(logits_NE, wanted_NE, reduction="none")
        own = F.binary_cross_entropy_with_logits(gate_NE, wanted_NE, reduction="none")
        return (cross - own).sum(-1)
    chosen_NK, _ = select(gate_NE, rule, top_k)
    if rule.score == "softmax":
        return -logits_NE.log_softmax(-1).gather(1, chosen_NK).mean(-1)
    wanted_NE = torch.zeros_like(gate_NE).scatter_(1, chosen_NK, 1.0)
    return F.binary_cross_entropy_with_logits(logits_NE, wanted_NE, reduction="none").sum(-1) / top_k


def slot_agreement(logits_NE: Tensor, gate_NE: Tensor, rule: LayerRule, top_k: int) -> Tensor:
    """|chosen by both| / K of every row [N]."""
    ours, theirs = (
        torch.zeros_like(gate_NE).scatter_(1, select(logits, rule, top_k)[0], 1.0) for logits in (logits_NE, gate_NE)
    )
    return (ours * theirs).sum(-1) / top_k


class Likeliest(NamedTuple):
    """A teacher's C likeliest tokens: ids int64 [N, C], log-probabilities [N, C], and that of all others [N]."""

    ids: Tensor
    logp: Tensor
    tail_logp: Tensor

    @staticmethod
    def of(logits_NV: Tensor, count: int) -> Likeliest:
        logp_NV = logits_NV.log_softmax(-1)
        logp_NC, ids_NC = logp_NV.topk(count, dim=-1)
        return Likeliest(ids_NC, logp_NC, _log_rest(logp_NC))


def reverse_kl(logits_NV: Tensor, teacher: Likeliest) -> Tensor:
    """KL(student || teacher) [N] over the teacher's likeliest tokens and one more that stands for all the others.

    A lower bound of the KL over the whole vocabulary (data processing), and 0 for equal distributions.
    """
    logp_NC = logits_NV.log_softmax(-1).gather(1, teacher.ids)
    tail_N = _log_rest(logp_NC)
    inside = (logp_NC.exp() * (logp_NC - teacher.logp)).sum(-1)
    return inside + tail_N.exp() * (tail_N - teacher.tail_logp)


def _log_rest(logp_NC: Tensor) -> Tensor:
    """The log of the probability that is left, without cancellation and never below that of a float's last bit."""
    return torch.log1p(-logp_NC.exp().sum(-1).clamp(max=1 - 1e-6))
