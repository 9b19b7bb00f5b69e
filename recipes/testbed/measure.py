"""Losses and routes of a testbed model over windows of text, in float32: what evaluate and quality have in common.

Runs transformers' model with the recipe's own attention and experts functions, which a test holds equal to eager ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from recipes.testbed.attention import ATTENTION_FUNCTION
from recipes.testbed.experts import EXPERTS_FUNCTION
from recipes.testbed.model import hidden_states, layer_step

BATCH_WINDOWS = 8
HEAD_ROWS = 1024


def load(directory: Path) -> Qwen3MoeForCausalLM:
    """The exported model in `directory`, its weights widened to float32."""
    functions = {"attn_implementation": ATTENTION_FUNCTION, "experts_implementation": EXPERTS_FUNCTION}
    return Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32, **functions).eval()


@torch.no_grad()
def token_losses(model: Qwen3MoeForCausalLM, ids_WT: Tensor, step=layer_step) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Negative log-likelihood in nats of each token after the first of each window, float32 [W, T - 1]. step: a layer's
    forward, for other rules of routing."""
    head_VD = model.model.embed_tokens.weight
    rows = []
    for ids_BT in ids_WT.split(BATCH_WINDOWS):
        hidden_BTD, _, _ = hidden_states(model, ids_BT[:, :-1], step)
        losses = [
            torch.nn.functional.cross_entropy(hidden_ND @ head_VD.t(), wanted_N, reduction="none")
            for hidden_ND, wanted_N in zip(
                hidden_BTD.flatten(0, 1).split(HEAD_ROWS), ids_BT[:, 1:].reshape(-1).split(HEAD_ROWS), strict=True
            )
        ]
        rows.append(torch.cat(losses).view(len(ids_BT), -1))
    return torch.cat(rows).numpy()


@torch.no_grad()
def routes(model: Qwen3MoeForCausalLM, ids_WT: Tensor) -> np.ndarray:
    """The experts that each token of consecutive windows chooses, strongest first: int16 [L, W * T, K]."""
    chosen: list[list[Tensor]] = [[] for _ in model.model.layers]

    def note(layer: int):  # type: ignore[no-untyped-def]
        return lambda module, inputs: chosen[layer].append(inputs[1].to(torch.int16))

    hooks = [layer.mlp.experts.register_forward_pre_hook(note(index)) for index, layer in enumerate(model.model.layers)]
    try:
        for ids_BT in ids_WT.split(BATCH_WINDOWS):
            hidden_states(model, ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([torch.cat(layer) for layer in chosen]).numpy()


@contextmanager
def experts_a_token(model: Qwen3MoeForCausalLM, chosen: int) -> Iterator[None]:
    """Let every router choose another number of experts; their weights are renormalised as the model does."""
    gates = [layer.mlp.gate for layer in model.model.layers]
    before = [gate.top_k for gate in gates]
    for gate in gates:
        gate.top_k = chosen
    try:
        yield
    finally:
        for gate, top_k in zip(gates, before, strict=True):
            gate.top_k = top_k
