"""Prerouter heads: their arithmetic in plain torch, how they begin, and their names in files.

Head of layer N, at token t: x = [h ; onehot(experts that N used at t) ; onehot(the same at t - 1)], h the MoE block's
input, and fc2(gelu(fc1 x)) + linear_init x are the logits of the next MoE layer at t + 1. No biases; gelu by erf
(Edge0, arXiv 2609.18063; names of its published files). The formulas here are the reference of `runtime/heads.py`.

Ours alone: a head may also see the token that the route is for, x = [h ; c e ; onehots] with e the model's embedding
of token t + 1. Its route is known when that token is, before any layer computes it, and is much nearer to the gate's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.errors import AdapterError

HIDDEN = 512
PARTS = ("fc1", "fc2", "linear_init")
_NAME = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(?:mlp\.prerouter\.)?(fc1|fc2|linear_init)\.weight$")


@dataclass(frozen=True)
class Head:
    """fc1 [H, X], fc2 [E, H], linear_init [E, X], all of one float dtype; X = D + 2E, or 2D + 2E where the head sees
    the next token: next_scale is c then, else 0."""

    fc1: Tensor
    fc2: Tensor
    linear_init: Tensor
    next_scale: float = 0.0

    @property
    def experts(self) -> int:
        return self.fc2.shape[0]

    @property
    def hidden(self) -> int:
        return self.fc1.shape[0]

    @property
    def width(self) -> int:
        """D, of the hidden state."""
        return self.dense // 2 if self.next_scale else self.dense

    @property
    def dense(self) -> int:
        """How many inputs are no one-hot ones: D or 2D."""
        return self.fc1.shape[1] - 2 * self.experts

    def logits(self, x_TX: Tensor) -> Tensor:
        """Features [T, X] -> logits [T, E] of the next MoE layer for each token's successor."""
        return F.linear(F.gelu(F.linear(x_TX, self.fc1)), self.fc2) + F.linear(x_TX, self.linear_init)


Heads = dict[int, Head]
"""By owner: the decoder layer whose features a head sees."""


def features(
    hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor, experts: int, ahead_TD: Tensor | None = None
) -> Tensor:
    """[T, X]; used and before: experts of each token and of its predecessor, -1 where there is none; ahead: c times the
    embedding of its successor, for heads that see it."""
    seen = [hidden_TD] if ahead_TD is None else [hidden_TD, ahead_TD]
    return torch.cat([*seen, one_hot(used_TK, experts), one_hot(before_TK, experts)], -1)


def scale_for(embedding_ND: Tensor) -> float:
    """c: brings embeddings to the size of a normed hidden state, a mean square of 1."""
    return float(embedding_ND.float().pow(2).mean().clamp_min(1e-12).rsqrt())


def one_hot(index_TK: Tensor, experts: int) -> Tensor:
    """float32 [T, E]: 1 for the experts of each row; an entry -1 names none."""
    padded = torch.zeros(len(index_TK), experts + 1)
    padded.scatter_(1, index_TK.long() % (experts + 1), 1.0)
    return padded[:, :experts]


def warm_head(next_gate_ED: Tensor, hidden: int = HIDDEN, seed: int = 0, next_scale: float = 0.0) -> Head:
    """Where training begins: "apply the next layer's gate to this hidden state". fc2 is 0, fc1 as torch starts it."""
    experts, width = next_gate_ED.shape
    size = _size(experts, width, next_scale)
    generator = torch.Generator().manual_seed(seed)
    fc1 = (torch.rand(hidden, size, generator=generator) * 2 - 1) * size**-0.5
    linear = torch.cat([next_gate_ED.float(), torch.zeros(experts, size - width)], 1)
    return Head(fc1, torch.zeros(experts, hidden), linear, next_scale)


def random_head(experts: int, width: int, hidden: int = HIDDEN, seed: int = 0, next_scale: float = 0.0) -> Head:
    """For measuring speed: routes that mean nothing and hardly repeat, the worst case of every cache."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    size = _size(experts, width, next_scale)
    return Head(normal(hidden, size), normal(experts, hidden), normal(experts, size), next_scale)


def _size(experts: int, width: int, next_scale: float) -> int:
    return (2 if next_scale else 1) * width + 2 * experts


def to_tensors(heads: Mapping[int, Head], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Under their names in a file. bf16 is what the engine computes with; f32 is served as it is."""
    return {
        f"layers.{owner}.{part}.weight": getattr(head, part).detach().to(dtype).contiguous()
        for owner, head in sorted(heads.items())
        for part in PARTS
    }


def from_tensors(tensors: Mapping[str, Tensor], where: str, next_scale: float = 0.0) -> Heads:
    """Heads of a file's tensors, in their dtype; next_scale as in `Head`. Raises AdapterError for missing parts and
    wrong shapes."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.match(name)
        if match is None:
            raise AdapterError(
                "a tensor that is no part of a head", where=f"{where}: {name}",
                expected="layers.N.{fc1,fc2,linear_init}.weight",
            )  # fmt: skip
        found.setdefault(int(match[1]), {})[match[2]] = tensor
    heads = {}
    for owner, parts in sorted(found.items()):
        if missing := [part for part in PARTS if part not in parts]:
            raise AdapterError("a head is not complete", where=f"{where}: layer {owner}", expected=missing)
        head = Head(**parts, next_scale=next_scale)
        _check_shapes(head, f"{where}: layer {owner}")
        heads[owner] = head
    return heads


def owns_heads(names: Sequence[str]) -> bool:
    """Whether a file with these tensors holds heads."""
    return bool(names) and all(_NAME.match(name) for name in names)


def _check_shapes(head: Head, where: str) -> None:
    good = all(tensor.dim() == 2 for tensor in (head.fc1, head.fc2, head.linear_init))
    experts, hidden = head.fc2.shape if good else (0, 0)
    wanted = {"fc1": (hidden, head.fc1.shape[-1]), "linear_init": (experts, head.fc1.shape[-1])}
    odd = head.dense < 1 or bool(head.next_scale and head.dense % 2) if good else True
    if odd or any(tuple(getattr(head, part).shape) != shape for part, shape in wanted.items()):
        got = {part: list(getattr(head, part).shape) for part in PARTS}
        raise AdapterError(
            "a head's shapes do not fit together", where=where,
            expected=f"fc1 [H, X], fc2 [E, H], linear_init [E, X], X {'2D' if head.next_scale else 'D'} + 2E", got=got,
        )  # fmt: skip
