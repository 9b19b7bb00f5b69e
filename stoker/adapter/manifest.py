"""manifest.json: what an adapter is and for which store it was made, as frozen data. docs/adapters.md describes it.

Knows JSON alone; tensors are in heads.py and lora.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from stoker.adapter.files import read_json
from stoker.errors import AdapterError

FORMAT, VERSION, NAME = "stoker-adapter", 1, "manifest.json"


@dataclass(frozen=True)
class HeadsInfo:
    """owners: decoder layers that have a head; width, experts, hidden: D, E and H of every head; next_scale: what heads
    that see the next token multiply its embedding by, else 0."""

    owners: tuple[int, ...]
    width: int
    experts: int
    hidden: int
    next_scale: float = 0.0


@dataclass(frozen=True)
class LoraInfo:
    """targets: paths of the linears in the transformers model."""

    rank: int
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """base: fingerprint of the store that it was made for ("" where nobody said); model: that store's name.

    layers: the MoE layers of the model, by their number in the decoder. top_k: experts a token uses, in prompts and
    answers. recipe: how it was made; data: sha256 of what it was trained on, by name; quality: what was measured, by
    the names of `stoker eval`; roster: its settings. files: sha256 of every other file, by name.
    """

    base: str
    model: str
    layers: tuple[int, ...]
    top_k: int
    heads: HeadsInfo | None = None
    lora: LoraInfo | None = None
    roster: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    quality: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Last of all files, under a temporary name first: a directory without it is not an adapter."""
    unfinished = directory / (NAME + ".unfinished")
    unfinished.write_text(json.dumps(manifest.as_dict(), indent=2) + "\n")
    os.replace(unfinished, directory / NAME)


def read_manifest(directory: Path) -> Manifest:
    """Raises AdapterError for what is missing, of another kind, newer, or has unknown fields."""
    file = directory / NAME
    found = read_json(file)
    if found.pop("format", None) != FORMAT:
        raise AdapterError("is not a stoker adapter", where=str(file), expected=f'"format": "{FORMAT}"')
    version = found.pop("version", None)
    if version != VERSION:
        raise AdapterError(
            "was written by another version", where=str(file), expected=VERSION, got=version,
            remedy="update stoker, or make the adapter again",
        )  # fmt: skip
    _check_fields(found, Manifest, str(file))
    for name, kind in (("heads", HeadsInfo), ("lora", LoraInfo)):
        if found.get(name) is not None:
            _check_fields(found[name], kind, f"{file}: {name}")
            found[name] = kind(**_frozen(found[name]))
    try:
        return Manifest(**_frozen(found))
    except TypeError as problem:
        raise AdapterError("is not complete", where=str(file), got=str(problem)) from problem


def _frozen(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _check_fields(data: Mapping[str, Any], kind: Any, where: str) -> None:
    known = [f.name for f in fields(kind)]
    if unknown := [name for name in data if name not in known]:
        raise AdapterError("unknown fields", where=where, expected=", ".join(known), got=", ".join(unknown))
