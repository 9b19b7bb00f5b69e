"""LoRA in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors`, read and written with torch alone.

y = W x + scale * B (A x), never merged into W (arXiv 2106.09685). What PEFT can say and this cannot do is refused by
name. Knows files and tensors, no modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stoker.adapter.files import load_tensors, read_json
from stoker.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(r"^(?:base_model\.model\.)?(?:language_model\.)?(.+)\.lora_([AB])(?:\.default)?(?:\.weight)?$")
# Options of PEFT that change the arithmetic; only these values of them mean what is computed here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}
_BARRED = (".experts.", ".switch_mlp.", ".gate.", ".router.")


@dataclass(frozen=True)
class LoraPair:
    """a [r, in], b [out, r], any float dtype; `scale` multiplies B A x."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


Lora = dict[str, LoraPair]
"""By the path of the linear in the transformers model, such as `model.layers.0.self_attn.q_proj`."""


def read_lora(directory: Path) -> Lora:
    """A PEFT directory. Raises AdapterError for what is missing, damaged or beyond plain LoRA."""
    file = directory / CONFIG
    config = read_json(file)
    for name, allowed in _PLAIN.items():
        if name in config and config[name] not in allowed:
            raise AdapterError(
                f"this kind of adapter is not supported: {name}", where=str(file),
                expected=" or ".join(repr(value) for value in allowed), got=repr(config[name]),
            )  # fmt: skip
    rank, alpha = int(config.get("r", 8)), float(config.get("lora_alpha", 8))
    alphas, rslora = dict(config.get("alpha_pattern") or {}), bool(config.get("use_rslora"))

    def scale(path: str, own_rank: int) -> float:
        own = next((value for key, value in alphas.items() if re.match(rf"(.*\.)?({key})$", path)), alpha)
        return float(own) / (own_rank**0.5 if rslora else own_rank)

    lora = pairs_of(load_tensors(directory / WEIGHTS), scale, str(directory / WEIGHTS))
    patterned = dict(config.get("rank_pattern") or {})
    for path, pair in lora.items():
        if not patterned and pair.rank != rank:
            raise AdapterError(
                "a rank is not the configuration's", where=f"{file}: {path}", expected=rank, got=pair.rank
            )
    return lora


def pairs_of(tensors: Mapping[str, Tensor], scale: Any, where: str) -> Lora:
    """`<path>.lora_A` and `.lora_B` (PEFT's names or Edge0's) as pairs; scale(path, rank) -> float."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.match(name)
        if match is None or tensor.dim() != 2:
            raise AdapterError(
                "a tensor that is no part of a LoRA of linears", where=f"{where}: {name}",
                expected="<module path>.lora_A.weight [r, in] and .lora_B.weight [out, r]", got=list(tensor.shape),
            )  # fmt: skip
        halves.setdefault(match[1], {})[match[2]] = tensor
    lora = {}
    for path, half in sorted(halves.items()):
        if len(half) != 2 or half["A"].shape[0] != half["B"].shape[1]:
            raise AdapterError(
                "A and B do not belong together", where=f"{where}: {path}", expected="A [r, in] and B [out, r]",
                got={key: list(tensor.shape) for key, tensor in half.items()},
            )  # fmt: skip
        if any(part in f".{path}." for part in _BARRED):
            raise AdapterError(
                "routed experts and gates take no LoRA: experts must stay replaceable, gates are the prerouter's",
                where=f"{where}: {path}", expected="attention, linear attention, shared experts, dense layers",
            )  # fmt: skip
        lora[path] = LoraPair(half["A"], half["B"], scale(path, half["A"].shape[0]))
    return lora


def write_lora(directory: Path, lora: Lora, *, base: str = "", dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a PEFT directory that PEFT itself can load. All pairs must share rank and scale."""
    ranks, scales = {pair.rank for pair in lora.values()}, {pair.scale for pair in lora.values()}
    if len(ranks) != 1 or len(scales) != 1:
        raise AdapterError("one rank and one scale for all", where=str(directory), got=f"{ranks}, {scales}")
    rank, scale = ranks.pop(), scales.pop()
    tensors = {}
    for path, pair in lora.items():
        for half, tensor in (("A", pair.a), ("B", pair.b)):
            tensors[f"{PREFIX}{path}.lora_{half}.weight"] = tensor.detach().to(dtype).contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in lora}),
    }  # fmt: skip
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
