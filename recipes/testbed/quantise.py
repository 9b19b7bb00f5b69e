"""Weights rounded to 2, 3, 4 or 8 bits and back, by stoker's affine rule at any width: what fewer bits do to a model.

The rule of stoker/quant/reference.py (groups of a row, the edge that is larger in magnitude is exact, 0 is a code, bf16
scale and bias); equal to it at 4 and 8 bits. Rounds the matrices that `stoker pack` packs; routers and norms stay.
"""

import torch
from torch import Tensor, nn

GROUP = 64
KEPT = ("mlp.gate.weight",)


def rounded(weights: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Float32 [..., C] after rounding to `bits` in groups of `group` columns."""
    grouped = weights.float().unflatten(-1, (-1, group))
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    steps = 2**bits - 1
    step = ((high - low) / steps).clamp_min(1e-30)
    edge = torch.where(low.abs() > high.abs(), low, high)
    zero_code = torch.round(edge.abs() / step)
    scale = torch.where(zero_code > 0, -edge / zero_code, step).bfloat16().float()
    bias = torch.where(zero_code > 0, edge, torch.zeros_like(edge)).bfloat16().float()
    codes = torch.where(scale == 0, torch.zeros_like(grouped), (grouped - bias) * scale.reciprocal())
    return (codes.round().clamp(0, steps) * scale + bias).flatten(-2)


@torch.no_grad()
def round_model(model: nn.Module, bits: int, experts_only: bool = False) -> None:
    """Round in place, matrix by matrix; 16 bits changes nothing (the weights are bf16 values already)."""
    if bits == 16:
        return
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        if parameter.dim() > 1 and not name.endswith(KEPT) and (is_expert or not experts_only):
            parameter.copy_(rounded(parameter, bits))
