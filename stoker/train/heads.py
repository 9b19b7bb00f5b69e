"""The prerouter's heads as modules that are trained: all owners of a model, with the warm start.

Formulas: DESIGN's prerouter. A head of MoE layer n at token t gives layer n + 1's router logits for token t + 1.
Knows no store and no training loop; serving computes the same function on the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN = 512


class Head(nn.Module):
    """fc2(gelu(fc1(x))) + linear(x), no biases: x [..., D + 2E] -> logits [..., E]."""

    def __init__(self, gate_ED: Tensor, hidden: int = HIDDEN, generator: torch.Generator | None = None) -> None:
        """gate_ED: the next layer's router weight, which the head begins with."""
        super().__init__()
        experts, width = gate_ED.shape
        features = width + 2 * experts
        bound = features**-0.5
        self.fc1 = nn.Parameter(torch.empty(hidden, features).uniform_(-bound, bound, generator=generator))
        self.fc2 = nn.Parameter(torch.zeros(experts, hidden))
        self.linear_init = nn.Parameter(torch.cat((gate_ED.detach().float(), torch.zeros(experts, 2 * experts)), 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.fc1)), self.fc2) + F.linear(x, self.linear_init)


class Heads(nn.Module):
    """Heads by the number of their MoE layer (the owner)."""

    def __init__(self, owners: Sequence[int], gates: Sequence[Tensor], hidden: int = HIDDEN, seed: int = 0) -> None:
        """gates: every MoE layer's router weight [E, D]."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        made = {str(owner): Head(gates[owner + 1], hidden, generator) for owner in owners}
        self.by_owner = nn.ModuleDict(made)

    @property
    def owners(self) -> list[int]:
        return [int(owner) for owner in self.by_owner]

    def __contains__(self, owner: int) -> bool:
        return str(owner) in self.by_owner

    def __getitem__(self, owner: int) -> Head:
        head = self.by_owner[str(owner)]
        assert isinstance(head, Head)
        return head


def features(hidden_TD: Tensor, executed_TK: Tensor, before_TK: Tensor, experts: int) -> Tensor:
    """[h ; one-hot of the executed experts ; one-hot of those of the token before] [T, D + 2E].

    before: -1 where there is no token before (zeros).
    """
    now_TE, before_TE = _marked(executed_TK, experts, hidden_TD), _marked(before_TK, experts, hidden_TD)
    return torch.cat((hidden_TD, now_TE, before_TE), -1)


def _marked(index_TK: Tensor, experts: int, like: Tensor) -> Tensor:
    marked = like.new_zeros(len(index_TK), experts + 1)
    return marked.scatter_(1, index_TK % (experts + 1), 1.0)[:, :experts]
