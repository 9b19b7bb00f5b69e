"""The shapes that `stoker synth` knows: a config, and every tensor with its size and the spread of its values.

Data only; owns no bytes. Spreads keep the residual stream near 1 in RMS and logits near 2, so that routing varies
with the tokens; random weights say nothing about quality, only about speed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker.errors import OptionError
from stoker.quant.formats import MatrixSpec, WeightFormat

Fill = Literal["affine", "normal", "log_uniform"]


@dataclass(frozen=True)
class SynthTensor:
    """A dense tensor. affine: a quantised matrix; normal: plain with mean and std; log_uniform: log of U(1, 16)."""

    name: str
    shape: tuple[int, ...]
    fill: Fill = "affine"
    std: float = 0.0
    mean: float = 0.0
    dtype: Literal["bf16", "f32"] = "bf16"

    def matrix(self, fmt: WeightFormat) -> MatrixSpec:
        """An affine tensor in a format."""
        rows, cols = self.shape
        return MatrixSpec(rows, cols, fmt)


@dataclass(frozen=True)
class SynthShape:
    """One model: `config` is its config.json; experts are [width, hidden], [width, hidden], [hidden, width]."""

    name: str
    config: dict[str, Any]
    dense: tuple[SynthTensor, ...]
    layers: int
    experts: int
    hidden: int
    width: int
    vocabulary: int
    text: dict[str, Any] = field(default_factory=dict)  # the part of config that describes the decoder

    @property
    def expert_stds(self) -> tuple[float, float, float]:
        """gate, up, down: pre-activations near 1, and an output that adds a quarter to the residual stream."""
        return 1 / math.sqrt(self.hidden), 1 / math.sqrt(self.hidden), 1 / math.sqrt(self.width)


@dataclass(frozen=True)
class _Sizes:
    layers: int
    hidden: int
    width: int
    experts: int
    top_k: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_head_dim: int = 0


_QWEN3_30B = _Sizes(48, 2048, 768, 128, 8, 151936, 32, 4, 128)
_QWEN3_MINI = _Sizes(4, 128, 64, 16, 4, 512, 4, 2, 32)
_QWEN35_35B = _Sizes(40, 2048, 512, 256, 8, 248320, 16, 2, 256, 16, 32, 128)
_QWEN35_MINI = _Sizes(4, 128, 64, 16, 4, 512, 4, 2, 32, 2, 4, 32)


def shape(name: str, layers: int | None = None) -> SynthShape:
    """A shape by name, optionally with fewer or more layers. Raises OptionError for an unknown name."""
    if name not in SHAPES:
        raise OptionError("unknown shape", where="SHAPE", expected=", ".join(SHAPES), got=name)
    if layers is not None and layers < 1:
        raise OptionError("a model has at least one layer", where="--layers", expected=">= 1", got=layers)
    build, sizes = SHAPES[name]
    if layers is not None:
        sizes = _Sizes(**{**sizes.__dict__, "layers": layers})
    return build(name, sizes)


def _qwen3_moe(name: str, s: _Sizes) -> SynthShape:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_common(s),
        "intermediate_size": 3 * s.hidden,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "num_experts": s.experts,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }
    dense = [*_ends("model", s, norm_mean=1.0)]
    for layer in range(s.layers):
        block = f"model.layers.{layer}"
        dense += [*_norms(block, s, mean=1.0), *_attention(block, s, q_factor=1, norm_mean=1.0)]
        dense.append(_router(block, s))
    return _finish(name, config, config, dense, s)


def _qwen35_moe(name: str, s: _Sizes) -> SynthShape:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(s.layers)]
    text = {
        "model_type": "qwen3_5_moe_text",
        **_common(s),
        "shared_expert_intermediate_size": s.width,
        "num_experts": s.experts,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": s.linear_head_dim,
        "linear_value_head_dim": s.linear_head_dim,
        "linear_num_key_heads": s.linear_key_heads,
        "linear_num_value_heads": s.linear_value_heads,
        "rope_parameters": {
            "rope_theta": 1e7,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": _mrope_section(s.head_dim),
        },
    }
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text,
    }
    dense = [*_ends("model.language_model", s, norm_mean=0.0)]
    for layer, kind in enumerate(kinds):
        block = f"model.language_model.layers.{layer}"
        dense += _norms(block, s, mean=0.0)
        dense += _attention(block, s, q_factor=2, norm_mean=0.0) if kind == "full_attention" else _linear(block, s)
        dense += [_router(block, s), *_shared_expert(block, s)]
    return _finish(name, config, text, dense, s)


def _common(s: _Sizes) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": s.vocabulary - 1,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "max_position_embeddings": 40960,
        "moe_intermediate_size": s.width,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": s.vocabulary,
    }


def _mrope_section(head_dim: int) -> list[int]:
    """Thirds of the rotated frequencies for time, height and width; the first takes what is left over."""
    half = head_dim // 8
    third = half // 3
    return [half - 2 * third, third, third]


def _ends(prefix: str, s: _Sizes, *, norm_mean: float) -> Iterator[SynthTensor]:
    yield SynthTensor(f"{prefix}.embed_tokens.weight", (s.vocabulary, s.hidden), std=1.0)
    yield SynthTensor(f"{prefix}.norm.weight", (s.hidden,), "normal", 0.05, norm_mean)
    yield SynthTensor("lm_head.weight", (s.vocabulary, s.hidden), std=2 / math.sqrt(s.hidden))


def _norms(block: str, s: _Sizes, *, mean: float) -> Iterator[SynthTensor]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield SynthTensor(f"{block}.{norm}.weight", (s.hidden,), "normal", 0.05, mean)


def _attention(block: str, s: _Sizes, *, q_factor: int, norm_mean: float) -> Iterator[SynthTensor]:
    inputs, width = 1 / math.sqrt(s.hidden), s.heads * s.head_dim
    name = f"{block}.self_attn"
    yield SynthTensor(f"{name}.q_proj.weight", (q_factor * width, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.k_proj.weight", (s.kv_heads * s.head_dim, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.v_proj.weight", (s.kv_heads * s.head_dim, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.o_proj.weight", (s.hidden, width), std=0.5 / math.sqrt(width))
    for norm in ("q_norm", "k_norm"):
        yield SynthTensor(f"{name}.{norm}.weight", (s.head_dim,), "normal", 0.05, norm_mean)


def _linear(block: str, s: _Sizes) -> Iterator[SynthTensor]:
    keys, values = s.linear_key_heads * s.linear_head_dim, s.linear_value_heads * s.linear_head_dim
    inputs, name = 1 / math.sqrt(s.hidden), f"{block}.linear_attn"
    yield SynthTensor(f"{name}.in_proj_qkv.weight", (2 * keys + values, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.in_proj_z.weight", (values, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.in_proj_a.weight", (s.linear_value_heads, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.in_proj_b.weight", (s.linear_value_heads, s.hidden), std=inputs)
    yield SynthTensor(f"{name}.out_proj.weight", (s.hidden, values), std=0.5 / math.sqrt(values))
    yield SynthTensor(f"{name}.conv1d.weight", (2 * keys + values, 1, 4), "normal", 0.5)
    yield SynthTensor(f"{name}.norm.weight", (s.linear_head_dim,), "normal", 0.05, 1.0, "f32")
    yield SynthTensor(f"{name}.A_log", (s.linear_value_heads,), "log_uniform", dtype="f32")
    yield SynthTensor(f"{name}.dt_bias", (s.linear_value_heads,), "normal", 0.1, 1.0)


def _router(block: str, s: _Sizes) -> SynthTensor:
    return SynthTensor(f"{block}.mlp.gate.weight", (s.experts, s.hidden), "normal", 1.5 / math.sqrt(s.hidden))


def _shared_expert(block: str, s: _Sizes) -> Iterator[SynthTensor]:
    name = f"{block}.mlp.shared_expert"
    for matrix, (rows, cols) in {
        "gate_proj": (s.width, s.hidden),
        "up_proj": (s.width, s.hidden),
        "down_proj": (s.hidden, s.width),
    }.items():
        yield SynthTensor(f"{name}.{matrix}.weight", (rows, cols), std=1 / math.sqrt(cols))
    yield SynthTensor(f"{name}_gate.weight", (1, s.hidden), "normal", 1 / math.sqrt(s.hidden))


def _finish(name: str, config: dict[str, Any], text: dict[str, Any], dense: list[SynthTensor], s: _Sizes) -> SynthShape:
    return SynthShape(name, config, tuple(dense), s.layers, s.experts, s.hidden, s.width, s.vocabulary, text)


SHAPES: dict[str, tuple[Callable[[str, _Sizes], SynthShape], _Sizes]] = {
    "qwen3-30b-a3b": (_qwen3_moe, _QWEN3_30B),
    "qwen3-30b-a3b-mini": (_qwen3_moe, _QWEN3_MINI),
    "qwen3.5-35b-a3b": (_qwen35_moe, _QWEN35_35B),
    "qwen3.5-35b-a3b-mini": (_qwen35_moe, _QWEN35_MINI),
}
