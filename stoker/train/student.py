"""Routes of the student, teacher-forced: a head's logits at token t become the next layer's route at token t + 1.

Layer by layer over whole sequences at once, because every route that a head sees was executed in an earlier layer or at
an earlier token. The rule that makes a route of logits is the one that serving uses.

B sequences of T tokens, flat as B * T rows; E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.routing.select import LayerRule, select
from stoker.runtime.routing import layer_rule
from stoker.train.data import Batch
from stoker.train.experts import Passes
from stoker.train.frozen import FrozenLinear, dequantised
from stoker.train.heads import Heads, features
from stoker.train.losses import HeadLoss, imitation, slot_agreement
from stoker.train.model import TrainingModel


def rules_of(model: TrainingModel) -> list[LayerRule]:
    """Every MoE layer's own rule. Raises OptionError for a router of an unknown kind."""
    return [layer_rule(block, model.config.hidden_size) for block in model.blocks]


def gates_of(model: TrainingModel) -> list[Tensor]:
    """Every MoE layer's router weight, float32 [E, D]."""
    return [_gate(block.router) for block in model.blocks]


def _gate(router: Any) -> Tensor:
    return dequantised(router.matrix) if isinstance(router, FrozenLinear) else router.weight.detach().float()


def shifted(values_BTX: Tensor, first: float) -> Tensor:
    """What the token before has, flat [B * T, X]; `first` for the first of each sequence."""
    head = values_BTX.new_full((len(values_BTX), 1, values_BTX.shape[-1]), first)
    return torch.cat((head, values_BTX[:, :-1]), 1).flatten(0, 1)


class Seen(NamedTuple):
    """What an owner saw of one token of each sequence: hidden [B, D], experts of it and of the token before [B, K]."""

    hidden: Tensor
    used: Tensor
    before: Tensor


@dataclass
class StudentRoutes:
    """A route function for `TrainingModel.follow`, for one forward pass (and its backward pass) over one batch.

    Tokens from `answer_from` on, but never a sequence's first, follow the heads; the others follow the gate. Keeps, by
    MoE layer, the predicted logits [B * T, E], the gate's and the executed experts.
    """

    heads: Heads
    rules: list[LayerRule]
    top_k: int
    batch: Batch
    passes: Passes
    predicted: dict[int, Tensor] = field(default_factory=dict)
    gate_logits: dict[int, Tensor] = field(default_factory=dict)
    executed: dict[int, Tensor] = field(default_factory=dict)
    # By owner, for the token after the batch: logits [B, E], or what heads that will see it have so far.
    last: dict[int, Tensor | Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ahead_TD = self.heads.ahead_of(self.batch.ids_BT)

    def __call__(
        self, index: int, hidden_TD: Tensor, logits_TE: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if index in self.predicted:
            chosen_TK, chosen_weights_TK = select(self.predicted[index], self.rules[index], self.top_k)
            follows = self.batch.answers_BT.reshape(-1, 1)
            experts_TK = torch.where(follows, chosen_TK, experts_TK)
            weights_TK = torch.where(follows, chosen_weights_TK, weights_TK)
        following = None
        if index in self.heads:
            sequences, tokens = self.batch.ids_BT.shape
            before_TK = shifted(experts_TK.view(sequences, tokens, -1), -1)
            x = features(hidden_TD, experts_TK, before_TK, logits_TE.shape[-1], self.ahead_TD)
            ahead_BTE = self.heads[index](x).view(sequences, tokens, -1)
            following = shifted(ahead_BTE, 0.0)
            if self.ahead_TD is None:
                self.last[index] = ahead_BTE[:, -1].detach()
            else:
                seen = (hidden_TD.detach(), experts_TK, before_TK)
                self.last[index] = Seen(*(part.view(sequences, tokens, -1)[:, -1] for part in seen))
        if not self.passes.recomputing:  # what a second computation gives is equal, but outside the graph
            self.executed[index], self.gate_logits[index] = experts_TK, logits_TE
            if following is not None:
                self.predicted[index + 1] = following
        return experts_TK, weights_TK

    def imitation(self, kind: HeadLoss) -> Tensor:
        """Loss of all heads against the gates they stand for: a sum over the rows they serve, a mean over heads."""
        rows = self.batch.answers_BT.flatten()
        losses = [
            imitation(logits[rows], self.gate_logits[index].detach()[rows], self.rules[index], self.top_k, kind).sum()
            for index, logits in self.predicted.items()
        ]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def agreement(self) -> Tensor:
        """Slot agreement of heads and gates, summed over rows, a mean over heads."""
        rows = self.batch.answers_BT.flatten()
        each = [
            slot_agreement(logits[rows], self.gate_logits[index][rows], self.rules[index], self.top_k).sum()
            for index, logits in self.predicted.items()
        ]
        return torch.stack(each).mean()


@dataclass
class HeadLessons:
    """A route function that changes no route: heads learn, layer by layer, while an exact pass without gradient runs.

    Each head's loss is differentiated as soon as the next layer's gate has spoken, so that memory does not grow with
    the number of heads. `count`: rows of all processes, by which losses are divided.
    """

    heads: Heads
    rules: list[LayerRule]
    top_k: int
    batch: Batch
    kind: HeadLoss
    count: float
    learn: bool = True
    losses: dict[int, float] = field(default_factory=dict)
    agreements: dict[int, float] = field(default_factory=dict)
    _waiting: Tensor | None = None

    def __post_init__(self) -> None:
        self.ahead_TD = self.heads.ahead_of(self.batch.ids_BT)

    def __call__(
        self, index: int, hidden_TD: Tensor, logits_TE: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._waiting is not None:
            self._lesson(index, logits_TE)
        self._waiting = None
        if index in self.heads:
            before_TK = shifted(experts_TK.view(*self.batch.ids_BT.shape, -1), -1)
            self._waiting = features(hidden_TD, experts_TK, before_TK, logits_TE.shape[-1], self.ahead_TD)
        return experts_TK, weights_TK

    def _lesson(self, index: int, gate_TE: Tensor) -> None:
        assert self._waiting is not None
        rows_BT = self.batch.answers_BT
        before_BT = torch.cat((rows_BT[:, 1:], torch.zeros_like(rows_BT[:, :1])), 1)  # the rows whose features they use
        x, gate_NE = self._waiting[before_BT.flatten()], gate_TE[rows_BT.flatten()]
        with torch.set_grad_enabled(self.learn):
            logits_NE = self.heads[index - 1](x)
            loss = imitation(logits_NE, gate_NE, self.rules[index], self.top_k, self.kind).sum() / self.count
        if self.learn:
            loss.backward()
        self.losses[index - 1] = float(loss.detach())
        agreed = slot_agreement(logits_NE.detach(), gate_NE, self.rules[index], self.top_k).sum()
        self.agreements[index - 1] = float(agreed) / self.count
