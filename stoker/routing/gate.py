"""The gates' own routes with another number of experts a token: what an adapter's K means where no head decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.routing.rule import LayerInfo, RoutingRule, Rows
from stoker.routing.select import select


class GateRule(RoutingRule):
    """The `top_k` best experts of the gate's logits, weights by the layer's own rule."""

    wants_logits = True

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._layers: list[LayerInfo] = []

    def attach(self, layers: Sequence[LayerInfo]) -> None:
        most = min(layer.experts for layer in layers)
        if not 1 <= self.top_k <= most:
            raise OptionError("K is out of range", where="top_k", expected=f"1 to {most}", got=self.top_k)
        self._layers = list(layers)
        for layer in layers:
            layer.rule  # noqa: B018 (an unknown rule is told now, not in the first step)

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE is not None
        return select(logits_TE.to(torch.float32), self._layers[layer].rule, self.top_k)

    def about(self) -> dict[str, Any]:
        return {"routing": self.name, "top_k": self.top_k}
