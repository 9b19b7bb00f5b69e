"""Text by the training model itself: the student's own answers, or a teacher's, many sequences at once.

The prompt follows the gate, the answer the heads, as in serving; the first answer token's route comes from the last
prompt position. Draws are a function of the numbers given, so that processes and restarts draw the same.

B sequences, P prompt tokens, N answer tokens.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import DynamicCache

from stoker.routing.select import LayerRule, select
from stoker.train.data import Batch
from stoker.train.heads import Heads, features
from stoker.train.model import TrainingModel
from stoker.train.student import Seen, StudentRoutes


class StepRoutes:
    """A route function for one token of each sequence: state goes from step to step, starting with a prompt's end."""

    def __init__(self, heads: Heads, rules: list[LayerRule], top_k: int, prompt: StudentRoutes) -> None:
        self.heads, self.rules, self.top_k = heads, rules, top_k
        sequences = len(prompt.batch.ids_BT)
        self._before = {index: _last(prompt.executed[index], sequences) for index in heads.owners}
        self._predicted: dict[int, Tensor] = {}
        self._next: dict[int, Tensor | Seen] = {owner + 1: found for owner, found in prompt.last.items()}

    def begin(self, ids_B1: Tensor) -> None:
        """A step with these tokens begins: what the step before predicted is its route."""
        ahead_B1D, self._predicted = self.heads.ahead(ids_B1), {}
        for index, found in self._next.items():
            if isinstance(found, Seen):
                assert ahead_B1D is not None
                experts = self.heads[index - 1].served.experts
                found = self.heads[index - 1](features(*found, experts, ahead_B1D[:, 0]))
            self._predicted[index] = found
        self._next = {}

    def __call__(
        self, index: int, hidden_TD: Tensor, logits_TE: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if index in self._predicted:
            experts_TK, weights_TK = select(self._predicted[index], self.rules[index], self.top_k)
        if index in self.heads:
            seen = Seen(hidden_TD, experts_TK, self._before[index])
            later = bool(self.heads.next_scale)
            self._next[index + 1] = seen if later else self.heads[index](features(*seen, logits_TE.shape[-1]))
            self._before[index] = experts_TK
        return experts_TK, weights_TK


def _last(values: Tensor, sequences: int) -> Tensor:
    return values.view(sequences, -1, values.shape[-1])[:, -1]


@torch.no_grad()
def answer(
    model: TrainingModel,
    prompt_BP: Tensor,
    uniform_BN: Tensor,
    *,
    temperature: float = 1.0,
    student: tuple[Heads, list[LayerRule], int] | None = None,
    end_ids: tuple[int, ...] = (),
) -> Batch:
    """Answers drawn by inverse transform from `uniform_BN`, float32 in [0, 1); 0 temperature: the likeliest token.

    A row ends with its first end token. student: heads, rules and K; None: the gate's routes.
    """
    sequences, prompt = prompt_BP.shape
    cache = DynamicCache(config=model.config)
    whole = Batch(prompt_BP, torch.full((sequences,), prompt), torch.full((sequences,), prompt))
    routes = None if student is None else StudentRoutes(*student, whole, model.passes)
    with model.follow(routes) if routes else nullcontext():
        hidden_BTD = model.hidden_states(prompt_BP, cache=cache, use_cache=True)
    steps = None if student is None or routes is None else StepRoutes(*student, routes)
    ids = [prompt_BP]
    with model.follow(steps) if steps else nullcontext():
        for at in range(uniform_BN.shape[1]):
            ids.append(_draw(model.logits(hidden_BTD[:, -1]), uniform_BN[:, at : at + 1], temperature))
            if at + 1 < uniform_BN.shape[1]:
                if steps:
                    steps.begin(ids[-1])
                hidden_BTD = model.hidden_states(ids[-1], cache=cache, use_cache=True)
    ids_BT = torch.cat(ids, 1)
    return Batch(ids_BT, _lengths(ids_BT, prompt, end_ids), torch.full((sequences,), prompt))


def _draw(logits_BV: Tensor, uniform_B1: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    summed_BV = (logits_BV / temperature).double().softmax(-1).cumsum(-1)
    places = torch.searchsorted(summed_BV, uniform_B1.double() * summed_BV[:, -1:], right=True)
    return places.clamp(max=logits_BV.shape[-1] - 1)


def _lengths(ids_BT: Tensor, prompt: int, end_ids: tuple[int, ...]) -> Tensor:
    """Tokens up to the answer's first end token, itself included."""
    ends_BT = torch.isin(ids_BT, torch.tensor(end_ids, dtype=torch.int64))
    ends_BT[:, :prompt] = False
    first_B = ends_BT.int().argmax(1) + 1
    return torch.where(ends_BT.any(1), first_B, ids_BT.shape[1])
