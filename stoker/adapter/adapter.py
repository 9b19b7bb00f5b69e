"""An adapter as it is loaded and saved: manifest, heads, LoRA. Opens stoker's own format, PEFT's and Edge0's files.

The door of the package. Whatever is loaded is checked against the store that it will be used with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stoker.adapter import edge0, heads, lora
from stoker.adapter.files import digest, load_tensors
from stoker.adapter.heads import Heads
from stoker.adapter.lora import Lora
from stoker.adapter.manifest import NAME, HeadsInfo, LoraInfo, Manifest, read_manifest, write_manifest
from stoker.errors import AdapterError
from stoker.store.reader import Store

HEADS_FILE = "heads.safetensors"


@dataclass(frozen=True)
class Adapter:
    """heads: by owner; lora: by module path; either may be empty. `path`: where it came from."""

    path: Path
    manifest: Manifest
    heads: Heads = field(default_factory=dict)
    lora: Lora = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name or self.path.resolve().name

    @property
    def fingerprint(self) -> str:
        """Of everything that changes a number: tensors by their files' hashes, K, owners, roster."""
        m = self.manifest
        parts = [m.files, m.top_k, None if m.heads is None else m.heads.owners, dict(m.roster or {})]
        if m.heads is not None and m.heads.next_scale:
            parts.append(m.heads.next_scale)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()[:32]

    def about(self) -> dict[str, Any]:
        """What results, /v1/models and traces tell of it."""
        m = self.manifest
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "base": m.base or None,
            "top_k": m.top_k,
            "heads": 0 if m.heads is None else len(m.heads.owners),
            "lora_rank": 0 if m.lora is None else m.lora.rank,
            "quality": dict(m.quality),
        }


def open_adapter(path: str | Path, store: Store) -> Adapter:
    """Load an adapter for a store: a directory in stoker's format, PEFT's, or with Edge0's files.

    Raises AdapterError where it is damaged or was made for another store, with both fingerprints.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise AdapterError("there is no such adapter", where=str(path), remedy="name a directory")
    if (directory / NAME).exists():
        adapter = _own(directory, store)
    elif (directory / lora.CONFIG).exists():
        adapter = _peft(directory, store)
    else:
        adapter = _edge0(directory, store)
    _check_shapes(adapter, store)
    return adapter


def save_adapter(
    directory: str | Path,
    *,
    store: Store,
    top_k: int | None = None,
    heads_by_owner: Heads | None = None,
    pairs: Lora | None = None,
    recipe: Mapping[str, Any] | None = None,
    data: Mapping[str, str] | None = None,
    quality: Mapping[str, Any] | None = None,
    roster: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Adapter:
    """Write an adapter for `store` into a directory, over one that is there; the manifest comes last.

    top_k None: the model's own. pairs may also lie there already, as PEFT saves them: they are then described.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / NAME).unlink(missing_ok=True)
    if heads_by_owner:
        save_file(heads.to_tensors(heads_by_owner, dtype), directory / HEADS_FILE, metadata={"format": "pt"})
    if pairs:
        lora.write_lora(directory, pairs, base=store.path.name, dtype=dtype)
    elif (directory / lora.CONFIG).exists():
        pairs = lora.read_lora(directory)
    manifest = Manifest(
        base=store.fingerprint,
        model=store.path.resolve().name,
        layers=moe_layers(store),
        top_k=top_k or model_top_k(store),
        heads=_heads_info(heads_by_owner or {}),
        lora=_lora_info(pairs or {}),
        roster=roster,
        recipe=dict(recipe or {}),
        data=dict(data or {}),
        quality=dict(quality or {}),
        files={name: digest(directory / name) for name in _weights(heads_by_owner, pairs)},
    )
    write_manifest(directory, manifest)
    return open_adapter(directory, store)


def add_quality(directory: str | Path, quality: Mapping[str, Any]) -> None:
    """Note what was measured, beside what is noted already."""
    manifest = read_manifest(Path(directory))
    write_manifest(Path(directory), replace(manifest, quality={**manifest.quality, **quality}))


def moe_layers(store: Store) -> tuple[int, ...]:
    """The decoder layers that have experts."""
    return tuple(sorted(layer for pool in store.pools for layer in pool.layers))


def model_top_k(store: Store) -> int:
    """Experts a token uses, by the model's configuration."""
    config = store.config.get("text_config", store.config)
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"):
        if config.get(name):
            return int(config[name])
    raise AdapterError("the configuration does not say how many experts a token uses", where=str(store.path))


def width_of(store: Store) -> int:
    """D, of the hidden state."""
    return int(store.config.get("text_config", store.config)["hidden_size"])


def experts_of(store: Store) -> int:
    return min(pool.experts for pool in store.pools)


# ---- the formats -----------------------------------------------------------------------------------------------------


def _own(directory: Path, store: Store) -> Adapter:
    manifest = read_manifest(directory)
    if manifest.base != store.fingerprint:
        raise AdapterError(
            "the adapter was made for another store", where=str(directory),
            expected=f"the store {manifest.base} ({manifest.model})", got=f"{store.fingerprint} ({store.path})",
            remedy="use that store, or train an adapter for this one (docs/adapters.md)",
        )  # fmt: skip
    for name, expected in manifest.files.items():
        found = digest(directory / name)
        if found != expected:
            raise AdapterError(
                "a file is not the one that the manifest describes", where=str(directory / name), expected=expected,
                got=found, remedy="copy the adapter again",
            )  # fmt: skip
    found_heads = _own_heads(directory, manifest.heads) if manifest.heads else {}
    if manifest.heads is not None and tuple(found_heads) != manifest.heads.owners:
        raise AdapterError(
            "the heads are not those of the manifest", where=str(directory), expected=list(manifest.heads.owners),
            got=list(found_heads),
        )  # fmt: skip
    return Adapter(directory, manifest, found_heads, lora.read_lora(directory) if manifest.lora else {})


def _own_heads(directory: Path, about: HeadsInfo) -> Heads:
    return heads.from_tensors(load_tensors(directory / HEADS_FILE), HEADS_FILE, about.next_scale)


def _peft(directory: Path, store: Store) -> Adapter:
    pairs = lora.read_lora(directory)
    return Adapter(directory, _unsigned(directory, store, None, {}, pairs, (lora.WEIGHTS, lora.CONFIG)), {}, pairs)


def _edge0(directory: Path, store: Store) -> Adapter:
    found_heads, pairs, top_k, names = edge0.read(directory)
    return Adapter(directory, _unsigned(directory, store, top_k, found_heads, pairs, names), found_heads, pairs)


def _unsigned(
    directory: Path, store: Store, top_k: int | None, found: Heads, pairs: Lora, files: tuple[str, ...]
) -> Manifest:
    """For files that do not say which weights they belong to: only their shapes can be checked."""
    return Manifest(
        base="", model="", layers=moe_layers(store), top_k=top_k or model_top_k(store), heads=_heads_info(found),
        lora=_lora_info(pairs), files={name: digest(directory / name) for name in files},
    )  # fmt: skip


def _weights(found: Heads | None, pairs: Lora | None) -> tuple[str, ...]:
    return ((HEADS_FILE,) if found else ()) + ((lora.WEIGHTS, lora.CONFIG) if pairs else ())


def _heads_info(found: Heads) -> HeadsInfo | None:
    if not found:
        return None
    first = next(iter(found.values()))
    return HeadsInfo(tuple(sorted(found)), first.width, first.experts, first.hidden, first.next_scale)


def _lora_info(pairs: Lora) -> LoraInfo | None:
    if not pairs:
        return None
    first = next(iter(pairs.values()))
    return LoraInfo(first.rank, first.scale, tuple(sorted(pairs)))


def _check_shapes(adapter: Adapter, store: Store) -> None:
    """What fits this store's axes, whoever made it."""
    layers, experts, width = moe_layers(store), experts_of(store), width_of(store)
    where = str(adapter.path)
    if not 1 <= adapter.manifest.top_k <= experts:
        raise AdapterError("K is out of range", where=where, expected=f"1 to {experts}", got=adapter.manifest.top_k)
    for owner, head in adapter.heads.items():
        if owner not in layers[:-1]:
            raise AdapterError(
                "no MoE layer follows this owner", where=f"{where}: layer {owner}",
                expected=f"owners among {layers[0]} to {layers[-2] if len(layers) > 1 else layers[0]}",
            )  # fmt: skip
        if (head.experts, head.width) != (experts, width):
            raise AdapterError(
                "the heads are for a model of another shape", where=f"{where}: layer {owner}",
                expected=f"{experts} experts, hidden size {width}", got=f"{head.experts} experts, {head.width}",
            )  # fmt: skip
