"""LoRA beside frozen linears: y = W x + (alpha / r) B A x, never merged. Names and files are PEFT's.

Targets: attention, linear attention and shared experts; never routed experts, never gates. Knows no training loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.errors import OptionError
from stoker.train.frozen import FrozenLinear

PEFT_PREFIX = "base_model.model."
_TARGETS = ("attn", "attention", "shared_expert.", "shared_experts.", "shared_mlp")


@dataclass(frozen=True)
class LoraSettings:
    """Rank and alpha; the update's scale is alpha / r."""

    r: int = 16
    alpha: int = 32

    def __post_init__(self) -> None:
        if self.r < 1 or self.alpha <= 0:
            raise OptionError("rank and alpha must be positive", where="--rank, --alpha", got=(self.r, self.alpha))


class LoraLinear(nn.Module):
    """A frozen linear with its update: x float32 [..., in] -> [..., out]. B begins at zero."""

    def __init__(self, base: FrozenLinear, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale, self.active = base, settings.alpha / settings.r, True
        bound = 1 / math.sqrt(base.in_features)  # PEFT's: kaiming_uniform with a = sqrt(5)
        shape_a, shape_b = (settings.r, base.in_features), (base.out_features, settings.r)
        self.lora_A = nn.Parameter(torch.empty(shape_a).uniform_(-bound, bound, generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(shape_b))

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return self.base(x)
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def attach(model: nn.Module, settings: LoraSettings, seed: int = 0) -> dict[str, LoraLinear]:
    """Put updates beside every target of a loaded base; by module path. Raises OptionError where there is none."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, LoraLinear] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, FrozenLinear) and is_target(path):
            made[path] = LoraLinear(module, settings, generator)
            model.set_submodule(path, made[path], strict=True)
    if not made:
        raise OptionError("the model has no linear that LoRA is meant for", expected=", ".join(_TARGETS))
    return made


def is_target(path: str) -> bool:
    """Whether the linear at this module path is adapted."""
    return any(part in path for part in _TARGETS) and not path.endswith(("gate", "router"))


def named_parameters(updates: Mapping[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """By PEFT's names: base_model.model.PATH.lora_A.weight."""
    return {
        f"{PEFT_PREFIX}{path}.{part}.weight": getattr(update, part)
        for path, update in updates.items()
        for part in ("lora_A", "lora_B")
    }
