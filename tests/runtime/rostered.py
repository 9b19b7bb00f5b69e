"""transformers' eager model under a rule of routing that goes token by token: the oracle of what serving does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.runtime.skeleton import moe_blocks


class TokenRule(Protocol):
    def token(self, scores: list[float]) -> list[int]: ...


@contextmanager
def routed_by(model: PreTrainedModel, make: Callable[[int], TokenRule]) -> Iterator[dict[int, list[list[int]]]]:
    """Softmax routers of `model` take the experts that `make(layer)` chooses for each token of one sequence, with the
    weights of their own scores; yields what was chosen, by layer. The rule is told logarithms of the softmax: logits up
    to a constant."""
    rules: dict[int, TokenRule] = {}
    taken: dict[int, list[list[int]]] = {}
    current: list[int] = []
    real = torch.topk

    def topk(scores: Tensor, k: int, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        if not current:
            return real(scores, k, *args, **kwargs)
        layer = current[-1]
        rule = rules.setdefault(layer, make(layer))
        rows = [rule.token(row) for row in scores.double().log().tolist()]
        taken.setdefault(layer, []).extend(rows)
        wanted = torch.tensor(rows).view(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, wanted), wanted))

    def leave(*_: object) -> None:
        current.pop()

    handles = []
    for block in moe_blocks(model):
        assert block.router is not None
        handles.append(block.router.register_forward_pre_hook(lambda *_, layer=block.layer: current.append(layer)))
        handles.append(block.router.register_forward_hook(leave))
    try:
        with mock.patch.object(torch, "topk", topk):
            yield taken
    finally:
        for handle in handles:
            handle.remove()
