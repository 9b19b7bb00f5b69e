"""The testbed's two models, as transformers' Qwen3-MoE, and the forward pass that trains them.

Owns shapes and the training forward; knows nothing of data or optimisers. Qwen3-MoE because its router, norms and
attention are those of the models whose real routing traces it is compared with, and because it has no shared expert:
every token's result depends on the routed experts alone, the harder case for anything that changes routes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipes.testbed.attention import ATTENTION_FUNCTION
from recipes.testbed.experts import EXPERTS_FUNCTION
from recipes.testbed.tokenizer import END_ID, ENTRIES

WIDTH, HEAD_WIDTH, HEADS, KV_HEADS = 192, 64, 3, 1
CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """Widths are multiples of 64, so that 4-bit groups of 64 divide them."""

    layers: int
    experts: int
    chosen: int
    expert_width: int


SHAPES = {"e32k4": Shape(6, 32, 4, 64), "e8k2": Shape(4, 8, 2, 128)}
STUDY = {"s8k2": Shape(3, 8, 2, 128), "s32k4": Shape(3, 32, 4, 64)}  # smaller ones, trained many times in a study

# Another rule than the gate's own top-k: (number of the layer, logits [B, T, E]) -> experts [B, T, K].
Choose = Callable[[int, Tensor], Tensor]


def config(name: str) -> Qwen3MoeConfig:
    shape = (SHAPES | STUDY)[name]
    return Qwen3MoeConfig(
        vocab_size=ENTRIES,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 2,  # of dense layers, of which there are none
        moe_intermediate_size=shape.expert_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_WIDTH,
        num_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=CONTEXT_TOKENS * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=None,
        router_aux_loss_coef=0.0,
        architectures=["Qwen3MoeForCausalLM"],
    )


def build(name: str, seed: int) -> Qwen3MoeForCausalLM:
    """A fresh float32 model. Matrices that write into the residual stream start smaller, by the depth."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = Qwen3MoeForCausalLM._from_config(
            config(name), attn_implementation=ATTENTION_FUNCTION, experts_implementation=EXPERTS_FUNCTION
        )
    into_residual = (2 * (SHAPES | STUDY)[name].layers) ** -0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(into_residual)
            layer.mlp.experts.down_proj.mul_(into_residual)
    return model


def layer_step(
    layer: nn.Module, hidden_BTD: Tensor, rotary: tuple[Tensor, Tensor], choose: Choose | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer as transformers computes it; also the balance loss and the load. Under another rule, `choose`,
    the weights are still the router's, over the experts chosen."""
    attended_BTD, _ = layer.self_attn(layer.input_layernorm(hidden_BTD), rotary, None)
    hidden_BTD = hidden_BTD + attended_BTD
    normed_ND = layer.post_attention_layernorm(hidden_BTD).flatten(0, 1)
    logits_NE = F.linear(normed_ND.float(), layer.mlp.gate.weight.float())
    probabilities_NE = logits_NE.softmax(-1)
    if choose is None:
        weights_NK, experts_NK = probabilities_NE.topk(layer.mlp.gate.top_k, dim=-1)
    else:
        logits_BTE = logits_NE.view(*hidden_BTD.shape[:2], -1)
        experts_NK = choose(layer.self_attn.layer_idx, logits_BTE).flatten(0, 1)
        weights_NK = probabilities_NE.gather(1, experts_NK)
    weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    mixed_ND = layer.mlp.experts(normed_ND, experts_NK, weights_NK)
    load_E = F.one_hot(experts_NK, logits_NE.shape[-1]).sum((0, 1)).float() / experts_NK.numel()
    balance = logits_NE.shape[-1] * (load_E * probabilities_NE.mean(0)).sum()
    return hidden_BTD + mixed_ND.view_as(hidden_BTD), balance, load_E


def hidden_states(model: Qwen3MoeForCausalLM, ids_BT: Tensor, step=layer_step) -> tuple[Tensor, Tensor, Tensor]:
    """Final normed hidden states [B, T, D]; the balance loss, a mean over layers (1 is even); loads [L, E]."""
    body = model.model
    hidden_BTD = body.embed_tokens(ids_BT)
    positions_1T = torch.arange(ids_BT.shape[1])[None]
    rotary = body.rotary_emb(hidden_BTD, position_ids=positions_1T)
    balances, loads = [], []
    for layer in body.layers:
        hidden_BTD, balance, load_E = step(layer, hidden_BTD, rotary)
        balances.append(balance)
        loads.append(load_E)
    return body.norm(hidden_BTD), torch.stack(balances).mean(), torch.stack(loads)
