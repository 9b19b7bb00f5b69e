"""What MLX changed: its quantised matrices, its names, and two conventions that other runtimes do not share.

Owns reading config["quantization"] and undoing mlx-lm's renames, moved convolution axes and norms stored as w + 1.
Codes, scales and biases are never touched. Opens no file.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.safetensors_file import TensorEntry
from stoker.errors import CheckpointError
from stoker.quant.formats import ScaleDtype, WeightFormat

_SCALE_DTYPES: dict[str, ScaleDtype] = {"BF16": "bf16", "F16": "f16"}

# Prefixes of mlx-lm's vision models -> the published ones.
_PREFIXES = (
    (re.compile(r"^language_model\.model\."), "model.language_model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
)
# Further renames, per model type.
_RENAMES = {
    "lfm2_moe": (
        (re.compile(r"\.feed_forward\.gate_proj\."), ".feed_forward.w1."),
        (re.compile(r"\.feed_forward\.down_proj\."), ".feed_forward.w2."),
        (re.compile(r"\.feed_forward\.up_proj\."), ".feed_forward.w3."),
    ),
}
# Model types whose RMSNorm multiplies by 1 + w: mlx-lm adds the 1 when it moves the convolution's axes.
_OFFSET_NORM_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_OFFSET_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_CONVOLUTION = re.compile(r"\bconv(?:1d)?\.weight$")
_UNSUPPORTED = re.compile(r"\.(?:embed_q|unembed_out)\.")


def is_mlx(config: dict[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint was quantised by MLX: its config says so and scales lie beside the weights."""
    quantisation = config.get("quantization")
    return isinstance(quantisation, dict) and "bits" in quantisation and any(n.endswith(".scales") for n in names)


def module_format(config: dict[str, Any], weight: TensorEntry, scales: TensorEntry) -> WeightFormat:
    """The format of one quantised module, from the config's defaults and overrides, checked against the shapes."""
    quantisation = config["quantization"]
    module = weight.name.removesuffix(".weight")
    own = quantisation.get(module)
    settings = {**quantisation, **own} if isinstance(own, dict) else quantisation
    mode, bits, group = settings.get("mode", "affine"), settings["bits"], settings["group_size"]
    where = f"{weight.file}: {module}"
    if mode != "affine":
        raise CheckpointError(f"MLX's {mode!r} mode is not supported", where=where, expected="affine")
    if scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError("unsupported dtype of scales", where=where, expected="BF16 or F16", got=scales.dtype)
    try:
        fmt = WeightFormat("affine", bits, group, _SCALE_DTYPES[scales.dtype])
    except ValueError as problem:
        raise CheckpointError(str(problem), where=where) from problem
    cols = scales.shape[-1] * group
    if weight.dtype != "U32" or weight.shape[-1] != fmt.words(cols):
        raise CheckpointError(
            "codes and scales disagree with the config's bits and group size",
            where=where,
            expected=f"U32 with {fmt.words(cols)} words a row",
            got=f"{weight.dtype} with {weight.shape[-1]}",
        )
    return fmt


def published_name(name: str, model_type: str) -> str:
    """The name that the model's authors gave a tensor."""
    if _UNSUPPORTED.search(name):
        raise CheckpointError(
            "this MLX checkpoint splits kv_b_proj into embed_q and unembed_out, which cannot be put together exactly",
            where=name,
            remedy="pack the original checkpoint",
        )
    for pattern, replacement in (*_PREFIXES, *_RENAMES.get(model_type, ())):
        name = pattern.sub(replacement, name)
    return name


def has_moved_convolutions(entries: Iterable[TensorEntry]) -> bool:
    """Whether convolutions are [C, k, 1]: the mark of a checkpoint that mlx-lm has rewritten."""
    return any(_is_moved(entry) for entry in entries)


def restored_shape(entry: TensorEntry) -> tuple[int, ...]:
    return (entry.shape[0], 1, entry.shape[1]) if _is_moved(entry) else entry.shape


def restore(entry: TensorEntry, value: Tensor, model_type: str, moved: bool) -> Tensor:
    """Undo mlx-lm's rewriting of one plain tensor: convolutions back to [C, 1, k], norms back to w (in float32)."""
    if _is_moved(entry):
        return value.transpose(1, 2).contiguous()
    if is_offset_norm(entry, model_type, moved):
        return value.to(torch.float32) - 1.0  # exact: a 16-bit value minus 1 fits float32
    return value


def is_offset_norm(entry: TensorEntry, model_type: str, moved: bool) -> bool:
    """Whether a norm is stored as w + 1. Only rewritten checkpoints are; the moved convolutions tell."""
    named = any(entry.name.endswith(suffix) for suffix in _OFFSET_NORMS)
    return moved and model_type in _OFFSET_NORM_TYPES and named and len(entry.shape) == 1


def _is_moved(entry: TensorEntry) -> bool:
    is_convolution = _CONVOLUTION.search(entry.name) is not None and len(entry.shape) == 3
    return is_convolution and entry.shape[2] == 1 and entry.shape[1] > 1
