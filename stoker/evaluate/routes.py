"""Which experts each token used and what its gates thought of all of them, taken from a model while it runs.

Works on any model of transformers' experts registry, streamed or whole. Changes nothing in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stoker.runtime.routing import layer_rule
from stoker.runtime.skeleton import MoeBlock, moe_blocks


@dataclass(frozen=True)
class LayerRoutes:
    """Of one MoE layer: the experts that tokens used int64 [T, K'], those that its gate chose int64 [T, K], and the
    gate's score of every expert float32 [T, E] (softmax or sigmoid, as the layer has it)."""

    used_TK: Tensor
    chosen_TK: Tensor
    scores_TE: Tensor

    def rows(self, first: int, last: int) -> "LayerRoutes":
        return LayerRoutes(self.used_TK[first:last], self.chosen_TK[first:last], self.scores_TE[first:last])


class RouteMeter:
    """Records the routes of a model's forward passes, all tokens one after the other, until `take`."""

    def __init__(self, model: Any) -> None:
        width = model.config.get_text_config().hidden_size
        self._layers = [_LayerMeter(block, width) for block in moe_blocks(model)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Listen to the gates and to what the experts are asked for."""
        for layer in self._layers:
            layer.open()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.close()

    def take(self) -> list[LayerRoutes]:
        """What was recorded since the last call (at least one forward pass), by layer."""
        return [layer.take() for layer in self._layers]


class _LayerMeter:
    """One MoE layer. Streamed experts tell what was used through their recorder, which goes on recording."""

    def __init__(self, block: MoeBlock, width: int) -> None:
        # A router under a rule stands around the gate, and does not ask it where the rule knows the route.
        self.router, self.experts = block.router, block.experts
        self.gate = getattr(block.router, "gate", None)
        own: Any = block if self.gate is None else SimpleNamespace(**vars(block), router=self.gate)
        self.streamed = getattr(block.experts, "streamed", None)
        self.is_sigmoid = layer_rule(own, width).score == "sigmoid"
        self.recorder: Any = None
        self.handles: list[Any] = []
        self.seen: list[LayerRoutes] = []
        self.scores_TE = self.chosen_TK = torch.empty(0)
        self.used_TK: Tensor | None = None

    def open(self) -> None:
        assert self.router is not None
        self.handles = [
            self.router.register_forward_hook(self._asked),
            self.experts.register_forward_hook(self._route),
        ]
        if self.streamed is not None:
            self.recorder, self.streamed.recorder = self.streamed.recorder, self

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.streamed is not None:
            self.streamed.recorder = self.recorder

    def _asked(self, _module: nn.Module, inputs: Any, output: tuple[Any, ...]) -> None:
        """The last call before the experts' is the layer's own: earlier ones look ahead."""
        if output[0] is None:
            assert self.gate is not None
            output = self.gate(*inputs)
        logits_TE, self.chosen_TK = output[0].float(), output[-1].long()
        self.scores_TE = logits_TE.sigmoid() if self.is_sigmoid else logits_TE.softmax(-1)

    def layer(self, step: int, pool: int, layer: int, experts_TK: Any, weights_TK: Any, *counts: int) -> None:
        """A recorder's call: what the streamed experts really use."""
        self.used_TK = experts_TK
        if self.recorder is not None:
            self.recorder.layer(step, pool, layer, experts_TK, weights_TK, *counts)

    def _route(self, _module: nn.Module, inputs: tuple[Any, ...], _output: Tensor) -> None:
        used_TK = inputs[1] if self.used_TK is None else self.used_TK
        self.seen.append(LayerRoutes(used_TK.long(), self.chosen_TK, self.scores_TE))
        self.used_TK = None

    def take(self) -> LayerRoutes:
        found, self.seen = self.seen, []
        used, chosen, scores = zip(*((one.used_TK, one.chosen_TK, one.scores_TE) for one in found), strict=True)
        return LayerRoutes(torch.cat(used), torch.cat(chosen), torch.cat(scores))


@dataclass(frozen=True)
class Agreement:
    """Means over T tokens and all layers. slots: share of the chosen experts that were used, |chosen & used| / K;
    mass: the gate's scores summed over the used experts over those of the chosen ones (1 where all are the same)."""

    slots: float
    mass: float
    tokens: int


def agreement(used: list[LayerRoutes], chosen: list[LayerRoutes]) -> Agreement:
    """How the experts that one run used stand to those that another run's gates chose for the same tokens.

    With the same run on both sides: what a routing mode changed, free of drift.
    """
    slots, masses = [], []
    for ours, theirs in zip(used, chosen, strict=True):
        tokens = torch.arange(len(theirs.chosen_TK))[:, None]
        is_used_TE = torch.zeros_like(theirs.scores_TE, dtype=torch.bool)
        is_used_TE[tokens, ours.used_TK] = True
        slots.append(is_used_TE.gather(1, theirs.chosen_TK).double().mean())
        best_T = theirs.scores_TE.gather(1, theirs.chosen_TK).double().sum(-1)
        masses.append(((theirs.scores_TE * is_used_TE).double().sum(-1) / best_T).mean())
    return Agreement(float(torch.stack(slots).mean()), float(torch.stack(masses).mean()), len(used[0].used_TK))
