"""The prerouter's heads as modules that are trained: all owners of a model, with the warm start.

The arithmetic, the features and the start are `stoker/adapter/heads.py`'s, which serving uses too. Knows no store,
no training loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from stoker.adapter import heads as serving
from stoker.adapter.heads import HIDDEN, features

__all__ = ["HIDDEN", "Head", "Heads", "features"]


class Head(nn.Module):
    """Parameters of one head: x [N, D + 2E] -> logits [N, E]."""

    def __init__(self, start: serving.Head) -> None:
        super().__init__()
        self.fc1, self.fc2, self.linear_init = (
            nn.Parameter(part.detach().float().clone()) for part in (start.fc1, start.fc2, start.linear_init)
        )

    @property
    def served(self) -> serving.Head:
        """The same tensors as serving holds them."""
        return serving.Head(self.fc1, self.fc2, self.linear_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.served.logits(x)


class Heads(nn.Module):
    """Heads by the number of their MoE layer (the owner)."""

    def __init__(self, owners: Sequence[int], gates: Sequence[Tensor], hidden: int = HIDDEN, seed: int = 0) -> None:
        """gates: every MoE layer's router weight [E, D]; a head begins with that of the layer after its owner."""
        super().__init__()
        made = {str(owner): Head(serving.warm_head(gates[owner + 1], hidden, seed + owner)) for owner in owners}
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
