"""Tiny random checkpoints of the architectures that stoker promises, written in their published layout.

Weights are scaled so that every block matters (a wrong expert or a missing bias is visible in the logits), and biases,
router corrections and sinks are not zero.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 160
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _COMMON | {"intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 32, "num_experts": 8,
                   "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _COMMON | {"intermediate_size": 128, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
                   "num_experts": 8},
    ),
    "mixtral": (
        "MixtralConfig",
        _COMMON | {"intermediate_size": 96, "num_local_experts": 8, "sliding_window": None,
                   "tie_word_embeddings": True},
    ),
    "olmoe": ("OlmoeConfig", _COMMON | {"intermediate_size": 32, "num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        _COMMON | {"intermediate_size": 128, "moe_intermediate_size": 32, "num_key_value_heads": 4,
                   "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
                   "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
                   "qk_nope_head_dim": 16, "v_head_dim": 16},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _COMMON | {"intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 32, "n_routed_experts": 8,
                   "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                   "use_qk_norm": True},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _COMMON | {"intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_experts": 8,
                   "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        _COMMON | {"intermediate_size": 32, "num_local_experts": 8, "attention_multiplier": 0.2,
                   "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "gpt_oss": (
        "GptOssConfig",
        _COMMON | {"intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 8,
                   "sliding_window": 8},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {"text_config": _COMMON | _LINEAR | {
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 32,
            "num_experts": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
         "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                           "out_hidden_size": 64}},
    ),
}  # fmt: skip


def make_checkpoint(architecture: str, directory: Path, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a bf16 checkpoint and return the model that was written (bf16 weights)."""
    class_name, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, class_name)(**(settings | overrides))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if tensor.dim() >= 2:
                width = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * width)
            elif name.endswith(("bias", "_bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
            elif name.endswith("sinks"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
            elif name.endswith("norm.weight"):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.save_pretrained(directory)
    return model.eval()
