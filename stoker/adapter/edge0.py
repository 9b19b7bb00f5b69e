"""Edge0's published adapter files: prerouter and LoRA tensors under their names, settings as JSON in the metadata.

They name no base weights, so only shapes can be checked. Facts: the files of https://huggingface.co/edge0; ours is the
reading, not their code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.adapter import heads, lora
from stoker.adapter.files import load_tensors, names_and_metadata
from stoker.adapter.heads import Heads
from stoker.adapter.lora import Lora
from stoker.errors import AdapterError

RANK, ALPHA = 16, 32  # theirs, where the metadata do not say


def read(directory: Path) -> tuple[Heads, Lora, int | None, tuple[str, ...]]:
    """(heads, LoRA, K or None, names of the files used) of a directory's safetensors files."""
    found_heads, pairs, top_k, used = Heads(), Lora(), None, []
    for file in sorted(directory.glob("*.safetensors")):
        names, metadata = names_and_metadata(file)
        about = settings(metadata)
        if heads.owns_heads(names):
            found_heads |= heads.from_tensors(load_tensors(file), file.name)
            top_k = _number(about, "K", "k", "top_k") or top_k
        elif names and all(name.rsplit(".", 1)[-1] in ("lora_A", "lora_B") for name in names):
            alpha = float(_number(about, "alpha", "lora_alpha") or ALPHA)
            pairs |= lora.pairs_of(load_tensors(file), lambda _path, rank, alpha=alpha: alpha / rank, file.name)
        else:
            continue
        used.append(file.name)
    if not used:
        raise AdapterError(
            "holds no adapter", where=str(directory),
            expected="manifest.json, adapter_config.json (PEFT), or Edge0's safetensors files",
        )  # fmt: skip
    return found_heads, pairs, top_k, tuple(used)


def settings(metadata: dict[str, str]) -> dict[str, Any]:
    """The settings in a file's metadata: plain values, and the fields of every value that is a JSON object."""
    found: dict[str, Any] = dict(metadata)
    for text in metadata.values():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            found |= value
    return found


def _number(about: dict[str, Any], *names: str) -> int | None:
    for name in names:
        try:
            return int(float(about[name]))
        except (KeyError, TypeError, ValueError):
            continue
    return None
