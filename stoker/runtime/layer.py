"""A decoder layer of the plain form with its first part as one native call: norm, attention, residual, norm, route.

    h = x + attention(before(x));   y = h + mlp(after(h))

Computes what the parts compute, bit for bit, LoRAs of the attention included, and leaves the route to the block
wherever somebody steps in between: a rule that can do without the gate, a hook on gate or experts. A rule that asks for
the gate's logits alone is handed them. Knows no store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stoker.native.layer import LayerFront, Norm
from stoker.runtime.step import StepContext

# Decoder layers of that form, and MoE blocks that are a gate and its experts alone.
LAYER_CLASSES = {
    "Qwen3MoeDecoderLayer",
    "Qwen2MoeDecoderLayer",
    "MixtralDecoderLayer",
    "OlmoeDecoderLayer",
    "Glm4MoeDecoderLayer",
}
BLOCK_CLASSES = {"Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock", "OlmoeSparseMoeBlock"}


class FusedLayer(nn.Module):
    """In the place of a decoder layer whose attention, norms (and gate) are native; its children keep their names."""

    def __init__(self, layer: Any, step: StepContext) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        before, after = (
            Norm(norm.weight, norm.variance_epsilon, norm.unit_offset)
            for norm in (self.input_layernorm, self.post_attention_layernorm)
        )
        attention = self.self_attn.block
        self.step, self._width = step, attention.width
        self._front = LayerFront(attention, before, after, None)
        gate: Any = getattr(self.mlp, "gate", None)
        routes = type(self.mlp).__name__ in BLOCK_CLASSES and hasattr(gate, "router")
        self._routing_front = LayerFront(attention, before, after, gate.router) if routes else None
        # In a tuple: modules are found slowly by name, and these are not children under other names.
        self._parts: tuple[Any, Any, Any, Any] = (self.self_attn, self.mlp, gate, getattr(self.mlp, "experts", None))

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        step, (attention, block, gate, experts) = self.step, self._parts
        x_TD = hidden_states.view(-1, self._width)
        shared = (*step.turn(position_embeddings), *step.cache(), attention.adapted())
        if self._routing_front is not None and _alone(block, gate, experts):
            hidden_TD, normed_TD, logits_TE, weights_TK, index_TK = self._routing_front.forward(x_TD, *shared)
            if block._modules["gate"] is not gate:
                experts.streamed.logits = logits_TE
            return experts.streamed.add_to(hidden_TD, normed_TD, index_TK, weights_TK).view(hidden_states.shape)
        front = self._front.forward(x_TD, *shared)
        return front.hidden.view(hidden_states.shape) + block(front.normed.view(hidden_states.shape))


def _alone(block: Any, gate: Any, experts: Any) -> bool:
    """Whether the block's gate is still the one that the native call knows, and nobody listens to it or the experts but
    a rule that wants its logits."""
    found = block._modules["gate"]
    if found is not gate and not (getattr(found, "listens", False) and not found._forward_hooks):
        return False
    return not gate._forward_hooks and not experts._forward_hooks


class EchoExperts:
    """Stands for streamed experts while a layer is checked: reads no disk, and its result shows input and route."""

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return hidden_TD * (weights_TK * (index_TK + 1)).sum(-1, keepdim=True)

    def add_to(self, residual_TD: Tensor, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return residual_TD + self.forward(hidden_TD, index_TK, weights_TK)


def same_numbers(layer: Any, fused: FusedLayer, rotary: tuple[Tensor, Tensor], mask: Tensor) -> bool:
    """Whether both give the same bits on random input. The step that they share must have pages for these tokens."""
    tokens, width = rotary[0].shape[-2], layer.self_attn.block.width
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(2))
    experts = getattr(layer.mlp, "experts", None)
    streamed = getattr(experts, "streamed", None)
    if streamed is not None:
        experts.streamed = EchoExperts()  # type: ignore[union-attr]
    try:
        theirs = layer(x, position_embeddings=rotary, attention_mask=mask)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        return torch.equal(fused(x, position_embeddings=rotary), theirs)
    finally:
        if streamed is not None:
            experts.streamed = streamed  # type: ignore[union-attr]
