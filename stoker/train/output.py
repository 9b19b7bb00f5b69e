"""What was trained, as an adapter directory, and back into a student to train on. Writes whole files or none.

Heads go under the published names (layers.N.{fc1,fc2,linear_init}.weight), LoRA as PEFT writes it; the manifest binds
both to the base by its fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stoker.errors import OptionError, StoreError
from stoker.train.lora import LoraSettings, peft_config
from stoker.train.session import Student

MANIFEST, HEADS, LORA, PEFT_CONFIG = (
    "adapter.json",
    "prerouter.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)
FORMAT = 1


def save(student: Student, directory: Path, recipe: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Write the student's heads and LoRA. recipe: stages, data hashes, seeds; measured: its cost, with conditions."""
    directory.mkdir(parents=True, exist_ok=True)
    if student.heads is not None:
        _save_tensors(directory / HEADS, student.head_parameters())
    if student.lora:
        assert student.lora_settings is not None
        _save_tensors(directory / LORA, student.lora_parameters())
        config = peft_config(student.lora, student.lora_settings, student.model.store.path.name)
        _write(directory / PEFT_CONFIG, config)
    _write(directory / MANIFEST, _manifest(student, recipe, measured))


def load_into(student: Student, directory: Path) -> None:
    """Add the heads and the LoRA of a directory to a student that has none. Raises StoreError where they do not fit."""
    manifest = read_manifest(directory)
    base = student.model.store.fingerprint
    if manifest["base"]["fingerprint"] != base:
        raise StoreError(
            "the adapter was trained beside another base",
            where=str(directory),
            expected=f"a base with fingerprint {manifest['base']['fingerprint']}",
            got=base,
            remedy="name the store that it was trained on, or train it again on this one",
        )
    if manifest["k"] != student.top_k:
        raise OptionError(
            "the adapter was trained for another number of experts a token",
            where="--k",
            expected=manifest["k"],
            got=student.top_k,
        )
    if (directory / HEADS).exists():
        number = {block.layer: index for index, block in enumerate(student.model.blocks)}
        owners = ",".join(str(number[layer]) for layer in manifest["owners"])
        student.add_heads(owners, manifest["hidden"])
        _fill(student.head_parameters(), directory / HEADS)
    if (directory / LORA).exists():
        config = json.loads((directory / PEFT_CONFIG).read_text())
        student.add_lora(LoraSettings(config["r"], config["lora_alpha"]))
        _fill(student.lora_parameters(), directory / LORA)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Raises StoreError for a directory that is no adapter, or of another format."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise StoreError("not an adapter", where=str(directory / MANIFEST), got=str(error)) from error
    if manifest.get("format") != FORMAT:
        raise StoreError(
            "an adapter of another format", where=str(directory), expected=FORMAT, got=manifest.get("format")
        )
    return manifest


def _manifest(student: Student, recipe: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    store, blocks = student.model.store, student.model.blocks
    owners = [] if student.heads is None else student.heads.owners
    return {
        "format": FORMAT,
        "base": {"fingerprint": store.fingerprint, "name": store.path.name},
        "k": student.top_k,
        "owners": [blocks[owner].layer for owner in owners],
        "layers": [blocks[owner + 1].layer for owner in owners],
        "hidden": 0 if student.heads is None else len(student.heads[owners[0]].fc1),
        "recipe": dict(recipe),
        "measured": dict(measured),
    }


def _fill(parameters: Mapping[str, nn.Parameter], file: Path) -> None:
    tensors = load_file(str(file))
    if set(tensors) != set(parameters):
        raise StoreError(
            "the adapter's tensors are not those of this model",
            where=str(file),
            expected=", ".join(sorted(parameters)[:3]) + " ...",
            got=", ".join(sorted(tensors)[:3]) + " ...",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _save_tensors(file: Path, parameters: Mapping[str, nn.Parameter]) -> None:
    partial = file.with_suffix(".partial")
    save_file({name: p.detach().contiguous() for name, p in parameters.items()}, str(partial))
    partial.rename(file)


def _write(file: Path, content: Any) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.rename(file)
