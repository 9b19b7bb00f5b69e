"""What a store or a checkpoint is, in numbers: layers, experts, sizes at each width, the least memory that decodes.

Reads headers and manifests only. Owns no printing.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.checkpoint.experts import expert_count
from stoker.checkpoint.source import Checkpoint, open_checkpoint
from stoker.errors import OptionError, StoreError
from stoker.store import manifest as manifest_file
from stoker.store.files import dense_parts, lay_out
from stoker.store.manifest import DenseEntry, Manifest, PoolEntry
from stoker.store.packplan import PackOptions, plan_pack
from stoker.store.reader import Store, open_store
from stoker.store.writer import JOURNAL

PROCESS_BYTES = 400 << 20  # interpreter, torch and transformers with a small model, measured
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class Sizes:
    """One way to store the model. floor: dense weights, one token's experts of every layer, and the process itself."""

    formats: list[str]
    record_bytes: list[int]
    expert_bytes: int
    dense_bytes: int
    total_bytes: int
    floor_bytes: int


@dataclass(frozen=True)
class Description:
    """`sizes`: "as stored" for what is there, "4", "8", "16" for what packing would make (or why it cannot)."""

    path: str
    kind: str
    model_type: str
    layers: int
    moe_layers: int
    experts_per_layer: int
    top_k: int
    hidden_size: int
    expert_width: int
    fingerprint: str
    sizes: dict[str, Sizes | str]
    notes: dict[str, list[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: str | Path) -> Description:
    """Describe a store or a checkpoint. Raises StoreError or CheckpointError for what is neither."""
    directory = Path(path)
    if (directory / manifest_file.NAME).exists() or (directory / JOURNAL).exists():
        return _describe_store(open_store(directory))
    if directory.is_dir() and not (directory / "config.json").exists():
        raise StoreError(
            "neither a store nor a checkpoint", where=str(directory),
            expected="stoker.json of a store, or config.json of a checkpoint", got="neither of them",
            remedy="name a store; `stoker pack SRC DST` makes one out of a checkpoint",
        )  # fmt: skip
    return _describe_checkpoint(open_checkpoint(directory))


def sizes_of(manifest: Manifest, top_k: int) -> Sizes:
    """Sizes of a store, planned or packed."""
    expert_bytes = sum(pool.experts * pool.layout.record_bytes for pool in manifest.pools)
    total = sum(file.nbytes for file in lay_out(manifest.pools, manifest.dense))
    dense = sum(_dense_bytes(entry) for entry in manifest.dense)
    slots = sum(min(top_k, pool.experts) * pool.layout.record_bytes for pool in manifest.pools)
    return Sizes(
        formats=sorted({label for pool in manifest.pools for label in _labels(pool)}),
        record_bytes=sorted({pool.layout.record_bytes for pool in manifest.pools}),
        expert_bytes=expert_bytes,
        dense_bytes=dense,
        total_bytes=total,
        floor_bytes=dense + slots + PROCESS_BYTES,
    )


def top_k_of(config: dict[str, Any]) -> int:
    """Experts that one token uses in a layer, as the config says; 0 when it does not."""
    text = config.get("text_config", config)
    return next((int(text[key]) for key in TOP_K_KEYS if text.get(key)), 0)


def _describe_store(store: Store) -> Description:
    sizes = sizes_of(store.manifest, top_k_of(store.config))
    return _description(store.path, "store", store.config, store.manifest, {"as stored": sizes}, store.fingerprint)


def _describe_checkpoint(checkpoint: Checkpoint) -> Description:
    top_k = top_k_of(checkpoint.config)
    if "quantization" in checkpoint.config:
        manifest = plan_pack(checkpoint, PackOptions()).manifest
        sizes: dict[str, Sizes | str] = {"as published": sizes_of(manifest, top_k)}
    else:
        manifest = plan_pack(checkpoint, PackOptions(bits=16)).manifest
        sizes = {str(bits): _sizes_at(checkpoint, bits, top_k) for bits in (4, 8)}
        sizes["16"] = sizes_of(manifest, top_k)
    kind = f"{manifest.source['kind']} checkpoint"
    return _description(checkpoint.path, kind, checkpoint.config, manifest, sizes, manifest.source["fingerprint"])


def _sizes_at(checkpoint: Checkpoint, bits: int, top_k: int) -> Sizes | str:
    """With the default group size, or the largest smaller one that every expert matrix fits."""
    try:
        return sizes_of(plan_pack(checkpoint, PackOptions(bits=bits)).manifest, top_k)
    except OptionError:
        pass
    try:
        return sizes_of(plan_pack(checkpoint, PackOptions(bits=bits, group_size=32)).manifest, top_k)
    except OptionError as problem:
        return problem.render()


def _description(
    path: Path, kind: str, config: dict[str, Any], manifest: Manifest, sizes: dict[str, Sizes | str], fingerprint: str
) -> Description:
    text, first = config.get("text_config", config), manifest.pools[0]
    return Description(
        path=str(path),
        kind=kind,
        model_type=str(config.get("model_type", "")),
        layers=int(text["num_hidden_layers"]),
        moe_layers=len({layer for pool in manifest.pools for layer in pool.layers}),
        experts_per_layer=expert_count(text) or first.experts,
        top_k=top_k_of(config),
        hidden_size=first.layout.gate.spec.cols,
        expert_width=first.layout.gate.spec.rows,
        fingerprint=fingerprint,
        sizes=sizes,
        notes=manifest.notes,
    )


def _labels(pool: PoolEntry) -> list[str]:
    return [matrix.spec.format.label() for matrix in (pool.layout.gate, pool.layout.up, pool.layout.down)]


def _dense_bytes(entry: DenseEntry) -> int:
    return sum(part.nbytes for part in dense_parts(entry).values())
