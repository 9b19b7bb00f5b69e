"""Checkpoints as mlx-lm writes them: stacked experts, affine matrices of mixed width, renamed and rewritten tensors."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stoker.quant.formats import WeightFormat
from stoker.quant.reference import Parts, quantize_rows

WIDTH, EXPERTS, HIDDEN, LAYERS, VOCABULARY = 64, 4, 128, 2, 96


@dataclass
class MlxCheckpoint:
    """What was written: `parts` by MLX module name, with formats; plain tensors by name, as they are in the file."""

    path: Path
    parts: dict[str, tuple[Parts, WeightFormat]] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)


def save_mlx(path: Path, *, scales: torch.dtype = torch.bfloat16, router_bits: int = 8) -> MlxCheckpoint:
    """A Qwen3.5-MoE shaped checkpoint: 4 bits, routers 8 bits, one linear left alone, expert codes random."""
    made = MlxCheckpoint(path)
    kind = "bf16" if scales == torch.bfloat16 else "f16"
    four, eight = WeightFormat("affine", 4, 64, kind), WeightFormat("affine", router_bits, 64, kind)
    overrides: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(5)

    def matrix(module: str, shape: tuple[int, ...], fmt: WeightFormat = four) -> None:
        rows = quantize_rows(torch.randn(shape, generator=generator).flatten(0, -2), fmt)
        made.parts[module] = (Parts(*(part.view(*shape[:-1], -1) for part in rows)), fmt)
        if fmt != four:
            overrides[module] = {"group_size": fmt.group_size, "bits": fmt.bits}

    def plain(name: str, shape: tuple[int, ...], offset: float = 0.0) -> None:
        made.plain[name] = (torch.randn(shape, generator=generator) * 0.1 + offset).to(scales)

    prefix = "language_model.model"
    matrix(f"{prefix}.embed_tokens", (VOCABULARY, HIDDEN))
    matrix("language_model.lm_head", (VOCABULARY, HIDDEN))
    plain(f"{prefix}.norm.weight", (HIDDEN,), 1.0)
    for layer in range(LAYERS):
        block = f"{prefix}.layers.{layer}"
        plain(f"{block}.input_layernorm.weight", (HIDDEN,), 1.0)
        plain(f"{block}.linear_attn.norm.weight", (32,), 1.0)
        plain(f"{block}.linear_attn.conv1d.weight", (96, 4, 1))
        plain(f"{block}.linear_attn.in_proj_a.weight", (4, HIDDEN))
        overrides[f"{block}.linear_attn.in_proj_a"] = False
        matrix(f"{block}.linear_attn.out_proj", (HIDDEN, HIDDEN))
        matrix(f"{block}.mlp.gate", (EXPERTS, HIDDEN), eight)
        matrix(f"{block}.mlp.switch_mlp.gate_proj", (EXPERTS, WIDTH, HIDDEN))
        matrix(f"{block}.mlp.switch_mlp.up_proj", (EXPERTS, WIDTH, HIDDEN))
        matrix(f"{block}.mlp.switch_mlp.down_proj", (EXPERTS, HIDDEN, WIDTH), eight)
    _write(made, overrides)
    return made


def _write(made: MlxCheckpoint, overrides: dict[str, Any]) -> None:
    made.path.mkdir(parents=True)
    tensors = dict(made.plain)
    for module, (parts, _) in made.parts.items():
        assert parts.scales is not None and parts.biases is not None
        tensors |= {f"{module}.weight": parts.codes, f"{module}.scales": parts.scales, f"{module}.biases": parts.biases}
    save_file(tensors, made.path / "model.safetensors", metadata={"format": "mlx"})
    quantisation = {"group_size": 64, "bits": 4, "mode": "affine", **overrides}
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
    }
    config = {
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "quantization": quantisation,
        "quantization_config": quantisation,
    }
    (made.path / "config.json").write_text(json.dumps(config))
