"""Puts native blocks where transformers' eager ones cost more time than arithmetic: norms, routers, attention.

A module is replaced only when its class is in the tables below *and* the replacement gives the same numbers on random
input at load time; whatever was tried and not replaced is reported by name. Nothing here knows a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.errors import StokerError
from stoker.native import attention, kernels
from stoker.native.layer import Router
from stoker.routing.select import LayerRule, one_by_one, select
from stoker.runtime.kv import BLOCK_TOKENS, KVPool, KVShape
from stoker.runtime.layer import LAYER_CLASSES, FusedLayer, same_numbers
from stoker.runtime.linear import QuantLinear, plain_matrix
from stoker.runtime.lora import AttentionLora
from stoker.runtime.step import StepContext

# Attention classes of the plain form: q, k, v, optional norms, half-split rotary, causal softmax, o.
ATTENTION_CLASSES = {
    "Qwen3MoeAttention",
    "Qwen2MoeAttention",
    "MixtralAttention",
    "OlmoeAttention",
    "Glm4MoeAttention",
    "GraniteMoeAttention",
}
# Routers of the form softmax, top-k, optional renormalisation (softmax over the top-k alone is the same thing).
ROUTER_CLASSES = {
    "Qwen3MoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen3_5MoeTopKRouter",
    "GraniteMoeTopKRouter",
    "GptOssTopKRouter",
}
# Routers of the form sigmoid, correction bias, best groups, top-k, optional renormalisation, scaling.
GROUPED_ROUTER_CLASSES = {"DeepseekV3TopkRouter", "Glm4MoeTopkRouter"}
ATTENTION_TOLERANCE = 5e-3  # the paged cache holds IEEE halves
EXACT_TOLERANCE = 1e-5


@dataclass
class FusionReport:
    """How many modules of each kind were replaced, and what was left with its reason."""

    attention: int = 0
    norms: int = 0
    routers: int = 0
    layers: int = 0
    left: dict[str, str] = field(default_factory=dict)

    @property
    def paged(self) -> bool:
        """Whether every layer's keys and values live in the paged cache."""
        return self.attention > 0 and not any(name.startswith("attention") for name in self.left)


class FusedRMSNorm(nn.Module):
    """RMS norm over the last axis, float32 [..., D]."""

    def __init__(self, weight: Tensor, eps: float, unit_offset: bool) -> None:
        super().__init__()
        self.weight = weight  # not a parameter: those are looked up slowly, and nothing trains it
        self.variance_epsilon, self.unit_offset = eps, unit_offset

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        return attention.rms_norm(x, self.weight, self.variance_epsilon, unit_offset=self.unit_offset)


class FusedRouter(nn.Module):
    """softmax, top-k, optional renormalisation: [T, D] -> logits [T, E], weights [T, K], experts [T, K]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, top_k: int, renormalise: bool) -> None:
        super().__init__()
        self.matrix = plain_matrix(weight, bias)
        self.rule = LayerRule(top_k, "softmax", renormalise)
        self.router = Router(self.matrix, top_k, renormalise)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = kernels.matmul(self.matrix, hidden.reshape(-1, hidden.shape[-1]))
        weights_TK, experts_TK = attention.topk_softmax(logits_TE, self.rule.top_k, self.rule.renormalise)
        return logits_TE, weights_TK, experts_TK


class SpacedGate(nn.Module):
    """The gate of a shared expert: one value a token, to which the model's code applies a sigmoid."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        return one_by_one(self.linear(hidden))


class GroupedRouter(nn.Module):
    """DeepSeek-V3's gate with native logits, so that a token's route does not depend on the batch: as FusedRouter."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.matrix = plain_matrix(gate.weight.detach())
        self.rule = LayerRule(
            gate.top_k,
            "sigmoid",
            gate.norm_topk_prob,
            gate.e_score_correction_bias.detach(),
            gate.num_group,
            gate.topk_group,
            gate.routed_scaling_factor,
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = kernels.matmul(self.matrix, hidden.reshape(-1, hidden.shape[-1]))
        experts_TK, weights_TK = select(logits_TE, self.rule)
        return logits_TE, weights_TK, experts_TK


class FusedAttention(nn.Module):
    """One attention block as one native call on the paged cache; tokens are flat, their sequences are in the step."""

    def __init__(self, block: attention.Attention, layer: int, step: StepContext) -> None:
        super().__init__()
        self.block, self.layer_idx, self.step = block, layer, step
        self.lora: AttentionLora | None = None

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        step = self.step
        cos_TR, sin_TR = step.turn(position_embeddings)
        flat_TD = hidden_states.view(-1, hidden_states.shape[-1])
        out_TD = torch.empty_like(flat_TD)
        self.block.forward(flat_TD, cos_TR, sin_TR, *step.cache(), out_TD, self.adapted())
        return out_TD.view(hidden_states.shape), None

    def adapted(self) -> attention.Adapted | None:
        """What the step's LoRAs add in this block."""
        return None if self.lora is None or not self.step.lora else self.lora.adapted(self.step.lora)


def kv_shape(model: PreTrainedModel) -> KVShape | None:
    """The paged cache's axes when every attention layer is of the plain form, else None."""
    modules = _attention_modules(model)
    if not modules or any(_unsupported(module) for _, module in modules):
        return None
    if len(modules) != model.config.get_text_config().num_hidden_layers:
        return None
    config = model.config.get_text_config()
    return KVShape(len(modules), config.num_key_value_heads, modules[0][1].head_dim)


def _attention_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    return [
        (p, m) for p, m in model.named_modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")
    ]


def _unsupported(module: Any) -> str | None:
    """Why this attention module keeps transformers' code, or None."""
    name = type(module).__name__
    if name not in ATTENTION_CLASSES:
        return f"{name} is not of the plain form"
    if getattr(module.config, "clip_qkv", None) is not None:
        return "clipped q, k, v"
    return None


def fuse(model: PreTrainedModel, step: StepContext) -> FusionReport:
    """Replace what can be replaced; the dense weights must be loaded."""
    report = FusionReport()
    shape = kv_shape(model)
    attention_modules = _attention_modules(model)
    if shape is None:
        for _, module in attention_modules:
            report.left["attention: " + type(module).__name__] = _unsupported(module) or "layers without attention"
    else:
        _fuse_attention(model, attention_modules, shape, step, report)
    for path, module in list(model.named_modules()):
        if type(module).__name__ in ROUTER_CLASSES:
            _replace(model, path, module, _router(module), report, "routers")
        elif type(module).__name__ in GROUPED_ROUTER_CLASSES:
            _replace(model, path, module, GroupedRouter(module), report, "routers")
        elif path.endswith(".shared_expert_gate"):
            model.set_submodule(path, SpacedGate(module), strict=True)
        elif type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            _replace(model, path, module, _norm(module), report, "norms")
    if shape is not None:
        _fuse_layers(model, shape, step, report)
    return report


def _fuse_layers(model: PreTrainedModel, shape: KVShape, step: StepContext, report: FusionReport) -> None:
    """Decoder layers whose parts are native by now; one of each form is compared with transformers' code."""
    same: dict[tuple[str, str], bool] = {}
    for path, layer in list(model.named_modules()):
        if type(layer).__name__ not in LAYER_CLASSES or not _plain_parts(layer):
            continue
        fused, form = FusedLayer(layer, step), (type(layer).__name__, type(layer.mlp).__name__)
        if form not in same:
            same[form] = _same_layer(model, layer, fused, shape, step)
        if same[form]:
            model.set_submodule(path, fused, strict=True)
            report.layers += 1
        else:
            report.left[f"layers: {form[0]} with {form[1]}"] = "different numbers on random input"


def _plain_parts(layer: Any) -> bool:
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return isinstance(layer.self_attn, FusedAttention) and all(isinstance(norm, FusedRMSNorm) for norm in norms)


def _same_layer(
    model: PreTrainedModel, layer: Any, fused: FusedLayer, shape: KVShape, step: StepContext, tokens: int = 5
) -> bool:
    with _trial_step(shape, tokens) as trial:
        layer.self_attn.step = fused.step = trial
        try:
            return same_numbers(layer, fused, _rotary(model, tokens), torch.zeros(1, 1, tokens, tokens))
        finally:
            layer.self_attn.step = fused.step = step


@contextmanager
def _trial_step(shape: KVShape, tokens: int) -> Iterator[StepContext]:
    """A step of one sequence's first tokens, with pages of its own."""
    pool = KVPool(shape, BLOCK_TOKENS)
    try:
        yield StepContext(
            kv_base=pool.base,
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            seq_of_token=torch.zeros(tokens, dtype=torch.int32),
            pos_of_token=torch.arange(tokens, dtype=torch.int32),
            start_of_seq=torch.zeros(1, dtype=torch.int32),
        )
    finally:
        pool.close()


def _router(module: Any) -> nn.Module:
    renormalise = bool(getattr(module, "norm_topk_prob", True))
    bias = getattr(module, "bias", None)
    return FusedRouter(module.weight.detach(), None if bias is None else bias.detach(), module.top_k, renormalise)


def _norm(module: Any) -> nn.Module | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or module.weight.dim() != 1:
        return None
    x = torch.randn(3, module.weight.shape[0], generator=torch.Generator().manual_seed(0))
    for unit_offset in (False, True):
        fused = FusedRMSNorm(module.weight.detach(), float(eps), unit_offset)
        if _distance(fused(x), module(x)) < EXACT_TOLERANCE:
            return fused
    return None


def _replace(
    model: PreTrainedModel, path: str, module: Any, fused: nn.Module | None, report: FusionReport, kind: str
) -> None:
    name = f"{kind}: {type(module).__name__}"
    if fused is None:
        report.left[name] = "different numbers on random input"
        return
    if kind == "routers":
        x = torch.randn(3, module.weight.shape[1], generator=torch.Generator().manual_seed(0))
        ours, theirs = fused(x)[1:], module(x)[1:]
        (our_weights, ours_by_id), (their_weights, theirs_by_id) = _by_id(*ours), _by_id(*theirs)
        if not torch.equal(ours_by_id, theirs_by_id) or _distance(our_weights, their_weights) > EXACT_TOLERANCE:
            report.left[name] = "different numbers on random input"
            return
    model.set_submodule(path, fused, strict=True)
    setattr(report, kind, getattr(report, kind) + 1)


def _by_id(weights_TK: Tensor, index_TK: Tensor) -> tuple[Tensor, Tensor]:
    """A route in the order of the experts' ids: some routers leave theirs unsorted."""
    ordered = index_TK.sort(dim=-1)
    return weights_TK.gather(1, ordered.indices), ordered.values


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


def _fuse_attention(
    model: PreTrainedModel,
    modules: list[tuple[str, Any]],
    shape: KVShape,
    step: StepContext,
    report: FusionReport,
) -> None:
    rotary_dim = _rotary(model, 1)[0].shape[-1]
    checked: set[tuple[str, int]] = set()
    for index, (path, module) in enumerate(modules):
        fused = FusedAttention(_native_attention(module, index, shape, rotary_dim), index, step)
        form = (type(module).__name__, module.q_proj.out_features)
        if form not in checked:
            _check_attention(model, path, module, fused, shape)
            checked.add(form)
        model.set_submodule(path, fused, strict=True)
        report.attention += 1


def _rotary(model: PreTrainedModel, tokens: int) -> tuple[Tensor, Tensor]:
    """The model's own cos and sin for positions 0 to tokens - 1: each [1, T, R]."""
    module = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    return module(torch.zeros(1), torch.arange(tokens)[None])


def _native_attention(module: Any, index: int, shape: KVShape, rotary_dim: int) -> attention.Attention:
    q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    return attention.Attention(
        module.q_proj.matrix,
        module.k_proj.matrix,
        module.v_proj.matrix,
        module.o_proj.matrix,
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        eps=0.0 if q_norm is None else float(q_norm.variance_epsilon),
        n_heads=module.q_proj.out_features // shape.head_dim,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=rotary_dim,
        window=getattr(module, "sliding_window", None),
        scale=float(module.scaling),
        layer=index,
        n_layers=shape.layers,
    )


def _check_attention(
    model: PreTrainedModel, path: str, module: Any, fused: FusedAttention, shape: KVShape, tokens: int = 5
) -> None:
    """Refuse to run when the native block and transformers' module disagree on random input."""
    assert isinstance(module.q_proj, QuantLinear)
    x = torch.randn(1, tokens, module.q_proj.in_features, generator=torch.Generator().manual_seed(1))
    cos_sin = _rotary(model, tokens)
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
    theirs = module(hidden_states=x, position_embeddings=cos_sin, attention_mask=mask)[0]
    with _trial_step(shape, tokens) as trial:
        saved, fused.step = fused.step, trial
        distance = _distance(fused(x, cos_sin)[0], theirs)
        fused.step = saved
    if not distance < ATTENTION_TOLERANCE:
        raise StokerError(
            "the native attention block disagrees with transformers' module",
            where=f"{path} ({type(module).__name__})",
            expected=f"relative L2 below {ATTENTION_TOLERANCE}",
            got=f"{distance:.2e}",
            remedy="report this model; load it with fuse=False meanwhile",
        )
