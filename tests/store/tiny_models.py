"""Random models of every architecture that packing is held to, small enough to build in a test."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_NARROW = {**_COMMON, "intermediate_size": 32}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_DEEP = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}
_QWEN35 = {k: v for k, v in _COMMON.items() if k != "intermediate_size"} | _MOE | _LINEAR
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_COMMON, **_MOE, "head_dim": 16}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_COMMON, **_MOE, "shared_expert_intermediate_size": 64}),
    "mixtral": ("MixtralConfig", {**_NARROW, **_LOCAL}),
    "olmoe": ("OlmoeConfig", {**_NARROW, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_COMMON,
            **_DEEP,
            **_MLA,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_COMMON, **_DEEP, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_COMMON, **_MOE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "granitemoe": ("GraniteMoeConfig", {**_NARROW, **_LOCAL}),
    "gpt_oss": ("GptOssConfig", {**_NARROW, **_LOCAL, "head_dim": 16}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", _QWEN35),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", {"text_config": _QWEN35, "vision_config": _VISION}),
}


def tiny_model(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A seeded random model; biases and norms are random too, so that a forgotten one shows."""
    torch.manual_seed(0)
    config = _config(name)
    if name == "qwen3_5_moe":
        model = hf.Qwen3_5MoeForConditionalGeneration(config)
    else:
        model = hf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.std() == 0:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def save_tiny(name: str, path: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "5GB") -> torch.nn.Module:
    """Save as published; returns the model."""
    model = tiny_model(name, dtype)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def expert_matrices(model: torch.nn.Module, name: str) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """(layer, expert) -> gate, up, down and their biases as the *loaded* model computes with them."""
    found = {}
    fused = {key: value for key, value in model.state_dict().items() if "experts." in key and "shared" not in key}
    for key, value in fused.items():
        layer = int(key.split("layers.")[1].split(".")[0])
        for expert in range(value.shape[0]):
            matrices = found.setdefault((layer, expert), {})
            matrices.update(_split(key.rsplit(".", 1)[-1], value[expert], oai=name == "gpt_oss"))
    return found


def _split(leaf: str, value: torch.Tensor, oai: bool) -> dict[str, torch.Tensor]:
    if not leaf.startswith("gate_up"):
        return {leaf.replace("_proj", ""): value.T if oai and value.dim() == 2 else value}
    if oai:
        gate, up = value[..., 0::2], value[..., 1::2]
        gate, up = (gate.T, up.T) if value.dim() == 2 else (gate, up)
    else:
        gate, up = value.chunk(2, dim=0)
    suffix = "_bias" if leaf.endswith("bias") else ""
    return {f"gate{suffix}": gate, f"up{suffix}": up}


@lru_cache
def _config(name: str) -> Any:
    kind, settings = CONFIGS[name]
    return getattr(hf, kind)(**settings)
