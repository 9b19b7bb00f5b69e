"""Builds the transformers model that belongs to a store, without weights. Owns the mapping of names.

Parameters stay on the meta device until `dense.py` fills them; experts' parameters are never filled. No modelling code
lives here: the class comes from transformers, and so does the mapping from published tensor names to module names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from stoker.errors import CheckpointError, StoreError

EXPERTS_IMPLEMENTATION = "stoker"


@dataclass(frozen=True)
class MoeBlock:
    """One MoE layer of the model: `layer` is its index in the decoder, `path` the module path of its experts."""

    layer: int
    path: str
    experts: Any
    parent: nn.Module

    @property
    def router(self) -> nn.Module | None:
        """The module that returns (logits, weights_TK, experts_TK)."""
        return None if self.router_path is None else self.parent.get_submodule(self.router_path.rsplit(".", 1)[-1])

    @property
    def router_path(self) -> str | None:
        """Where the router is in the model."""
        for name in ("gate", "router"):
            if isinstance(getattr(self.parent, name, None), nn.Module):
                return f"{self.path.rsplit('.', 1)[0]}.{name}"
        return None


def load_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            "transformers does not know this model configuration",
            where=str(directory / "config.json"),
            got=str(error).splitlines()[0],
            remedy="use a model type that the installed transformers supports",
        ) from error


def build_skeleton(directory: Path) -> PreTrainedModel:
    """The model on the meta device, in eval mode, float32; buffers that no checkpoint holds are computed."""
    config = load_config(directory)
    if EXPERTS_IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        raise AssertionError("the streamed experts function is registered on import of stoker.runtime.experts")
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except ValueError as error:
            raise CheckpointError(
                "no causal language model class for this configuration",
                where=str(directory / "config.json"),
                got=config.model_type,
                remedy="use a model type that transformers' AutoModelForCausalLM supports",
            ) from error
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = EXPERTS_IMPLEMENTATION
    model.config._experts_implementation = EXPERTS_IMPLEMENTATION
    _materialise_buffers(model)
    model.eval()
    model.requires_grad_(False)
    return model


def _materialise_buffers(model: PreTrainedModel) -> None:
    """Compute non-persistent buffers (rotary frequencies and the like) with the model's own initialiser."""
    for module in model.modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        with torch.no_grad():
            model._init_weights(module)


def moe_blocks(model: PreTrainedModel) -> list[MoeBlock]:
    """The MoE layers in the order of execution, found by the flags that the experts registry puts on its classes."""
    blocks = []
    for path, module in model.named_modules():
        if not hasattr(module, "is_concatenated") or not hasattr(module, "has_gate"):
            continue
        layer = next((int(part) for part in path.split(".") if part.isdigit()), None)
        if layer is None:
            raise CheckpointError("experts outside a decoder layer are not supported", where=path)
        blocks.append(MoeBlock(layer, path, module, model.get_submodule(path.rsplit(".", 1)[0])))
    if not blocks:
        raise CheckpointError(
            "the model has no experts that stoker can stream",
            where=type(model).__name__,
            expected="a Mixture-of-Experts class that uses transformers' experts registry",
            remedy="run a dense model with transformers itself",
        )
    return sorted(blocks, key=lambda block: block.layer)


class NameMap:
    """Published tensor names to module parameter names, by transformers' own conversion mapping."""

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()

    def __call__(self, source: str) -> str:
        name, converter = rename_source_key(source, self._renamings, self._converters, self._prefix, self._state)
        if name not in self._state and name.removeprefix("language_model.") in self._state:
            name = name.removeprefix("language_model.")
        if converter is not None:
            raise StoreError(
                "this dense tensor needs a conversion that stoker does not do",
                where=source,
                got=f"converter {converter!r} to {name}",
                remedy="report the model type",
            )
        return name
