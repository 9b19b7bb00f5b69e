"""The prerouter's heads as modules that are trained: all owners of a model, with the warm start.

The arithmetic, the features and the start are `stoker/adapter/heads.py`'s, which serving uses too. Knows no store,
no training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stoker.adapter import heads as serving
from stoker.adapter.heads import HIDDEN, features

__all__ = ["HIDDEN", "Head", "Heads", "features"]


Embed = Callable[[Tensor], Tensor]  # token ids int64 [...] -> the model's embeddings float32 [..., D]


class Head(nn.Module):
    """Parameters of one head: x [N, X] -> logits [N, E]."""

    def __init__(self, start: serving.Head) -> None:
        super().__init__()
        self.next_scale = start.next_scale
        self.fc1, self.fc2, self.linear_init = (
            nn.Parameter(part.detach().float().clone()) for part in (start.fc1, start.fc2, start.linear_init)
        )

    @property
    def served(self) -> serving.Head:
        """The same tensors as serving holds them."""
        return serving.Head(self.fc1, self.fc2, self.linear_init, self.next_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.served.logits(x)


class Heads(nn.Module):
    """Heads by the number of their MoE layer (the owner)."""

    def __init__(
        self,
        owners: Sequence[int],
        gates: Sequence[Tensor],
        hidden: int = HIDDEN,
        seed: int = 0,
        embed: Embed | None = None,
        next_scale: float = 0.0,
    ) -> None:
        """gates: every MoE layer's router weight [E, D]; a head begins with that of the layer after its owner.
        embed, next_scale: of heads that also see the next token."""
        super().__init__()
        starts = {owner: serving.warm_head(gates[owner + 1], hidden, seed + owner, next_scale) for owner in owners}
        self.by_owner = nn.ModuleDict({str(owner): Head(start) for owner, start in starts.items()})
        self.next_scale = next_scale
        self._embed = (embed,)  # in a tuple: the model's module is no part of this one

    @torch.no_grad()
    def ahead(self, ids: Tensor) -> Tensor | None:
        """What heads that see the next token see of these [...]: float32 [..., D]; None for heads that do not."""
        (embed,) = self._embed
        return None if embed is None or not self.next_scale else embed(ids).float() * self.next_scale

    def ahead_of(self, ids_BT: Tensor) -> Tensor | None:
        """`ahead` of every token's successor, flat [B * T, D]; zeros for the last of each sequence."""
        if not self.next_scale:
            return None
        ahead_BTD = self.ahead(ids_BT)
        assert ahead_BTD is not None
        return torch.cat((ahead_BTD[:, 1:], torch.zeros_like(ahead_BTD[:, :1])), 1).flatten(0, 1)

    @property
    def owners(self) -> list[int]:
        return [int(owner) for owner in self.by_owner]

    @property
    def hidden(self) -> int:
        """The width of a head's inner layer."""
        return self[self.owners[0]].served.hidden

    def __contains__(self, owner: int) -> bool:
        return str(owner) in self.by_owner

    def __getitem__(self, owner: int) -> Head:
        head = self.by_owner[str(owner)]
        assert isinstance(head, Head)
        return head
