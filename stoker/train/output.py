"""What was trained, as an adapter, and back into a student to train on. The format is `stoker/adapter`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stoker.adapter.adapter import open_adapter, save_adapter
from stoker.adapter.lora import LoraPair
from stoker.errors import OptionError
from stoker.train.lora import LoraSettings
from stoker.train.session import Student


def save(
    student: Student, directory: Path, recipe: Mapping[str, Any], data: Mapping[str, str], quality: Mapping[str, Any]
) -> None:
    """Write heads and LoRA in bf16. recipe: stages and settings; data: hashes; quality: what was measured, and how."""
    layers = [block.layer for block in student.model.blocks]
    heads = {} if student.heads is None else {layers[o]: student.heads[o].served for o in student.heads.owners}
    pairs = {path: LoraPair(update.lora_A, update.lora_B, update.scale) for path, update in student.lora.items()}
    save_adapter(
        directory,
        store=student.model.store,
        top_k=student.top_k,
        heads_by_owner=heads,
        pairs=pairs,
        recipe=recipe,
        data=data,
        quality=quality,
        roster=None if student.roster is None else student.roster.as_dict(),
    )


def load_into(student: Student, directory: Path) -> None:
    """Add an adapter's heads and LoRA to a student that has none. Raises AdapterError where they do not fit the store,
    OptionError for another K."""
    adapter = open_adapter(directory, student.model.store)
    if adapter.manifest.top_k != student.top_k:
        raise OptionError(
            "the adapter was trained for another number of experts a token",
            where="--k",
            expected=adapter.manifest.top_k,
            got=student.top_k,
        )
    with torch.no_grad():
        if adapter.heads:
            number = {block.layer: index for index, block in enumerate(student.model.blocks)}
            one = next(iter(adapter.heads.values()))
            student.add_heads(list(adapter.heads), one.hidden, next_scale=one.next_scale)
            assert student.heads is not None
            for layer, head in adapter.heads.items():
                for part, parameter in student.heads[number[layer]].named_parameters():
                    parameter.copy_(getattr(head, part))
        if adapter.lora:
            first = next(iter(adapter.lora.values()))
            student.add_lora(LoraSettings(first.rank, round(first.scale * first.rank)))
            for path, pair in adapter.lora.items():
                student.lora[path].lora_A.copy_(pair.a)
                student.lora[path].lora_B.copy_(pair.b)
