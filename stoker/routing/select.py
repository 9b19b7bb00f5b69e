"""How a layer turns router logits into a route: its own rule as data, applied to any logits, for any number of experts.

Softmax or sigmoid, top-k, groups, renormalisation, scaling. A token's route does not depend on what else is in the
call. Knows no model; `runtime/routing.py` finds a layer's rule and checks it against the layer's own router.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerRule:
    """Softmax over all experts, or sigmoid of each; the `top_k` best; weights from the scores.

    correction float32 [E]: added to the scores for the choice alone (DeepSeek-V3, arXiv 2412.19437). groups,
    top_groups: only the experts of the best groups, by the sum of each group's two best, can be chosen. renormalise:
    the weights of a token add up to 1 before `scaling`. Softmax over the chosen logits alone is softmax renormalised.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    correction: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0

    @cached_property
    def plain(self) -> bool:
        """Softmax, the best of all experts and nothing else: what native calls compute themselves."""
        return self.score == "softmax" and self.correction is None and self.groups == 1 and self.scaling == 1.0


def select(logits_TE: Tensor, rule: LayerRule, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits float32 [T, E] -> experts int64 [T, K], the best first, and weights float32 [T, K].

    top_k: another number of experts than the rule's own. Equal choices: the order is torch.topk's.
    """
    scores_TE = _scores(logits_TE, rule)
    choice_TE = scores_TE if rule.correction is None else scores_TE + rule.correction
    if rule.groups > 1:
        choice_TE = _best_groups(choice_TE, rule.groups, rule.top_groups)
    index_TK = choice_TE.topk(top_k or rule.top_k, dim=-1).indices
    return index_TK, _weigh(scores_TE, index_TK, rule)


def ranks(logits_TE: Tensor, rule: LayerRule) -> Tensor:
    """What the layer's top-k orders experts by, float32 [T, E]: logits, or sigmoids with their correction. A layer with
    groups has no such order over all experts."""
    assert rule.groups == 1
    if rule.score == "softmax" and rule.correction is None:
        return logits_TE
    scores_TE = _scores(logits_TE, rule)
    return scores_TE if rule.correction is None else scores_TE + rule.correction


def weigh(logits_TE: Tensor, index_TK: Tensor, rule: LayerRule) -> Tensor:
    """The weights float32 [T, K] that the layer's own rule gives to experts that something else chose."""
    return _weigh(_scores(logits_TE, rule), index_TK, rule)


def _scores(logits_TE: Tensor, rule: LayerRule) -> Tensor:
    return logits_TE.softmax(-1) if rule.score == "softmax" else one_by_one(logits_TE).sigmoid().contiguous()


def _weigh(scores_TE: Tensor, index_TK: Tensor, rule: LayerRule) -> Tensor:
    weights_TK = scores_TE.gather(1, index_TK)
    if rule.renormalise:  # cumsum adds in one order whatever T is; sum does not
        weights_TK = weights_TK / (weights_TK.cumsum(-1)[:, -1:] + 1e-20)
    return weights_TK if rule.scaling == 1.0 else weights_TK * rule.scaling


def _best_groups(choice_TE: Tensor, groups: int, top_groups: int) -> Tensor:
    """-inf for the experts of all but the best groups."""
    choice_TGE = choice_TE.view(len(choice_TE), groups, -1)
    best_TG = choice_TGE.topk(2, dim=-1).values.sum(dim=-1).topk(top_groups, dim=-1, sorted=False).indices
    barred_TG = torch.ones(choice_TGE.shape[:2], dtype=torch.bool).scatter_(1, best_TG, False)
    return choice_TGE.masked_fill(barred_TG[..., None], float("-inf")).view_as(choice_TE)


def one_by_one(x: Tensor) -> Tensor:
    """`x` with gaps between its values. torch computes sigmoid and the like of dense values in vectors and of the last
    few apart, with another last bit: a token's numbers would depend on how many tokens there are. With gaps all are
    computed apart."""
    spaced = x.new_empty(*x.shape, 2)
    spaced[..., 0] = x
    return spaced[..., 0]
