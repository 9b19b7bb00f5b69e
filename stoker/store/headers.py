"""Opens whatever names a model (store, checkpoint, GGUF file, Hub id) by its headers alone, planned at 4 and 8 bits.

Owns telling the four kinds apart and choosing formats; reads no weights and downloads none.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.checkpoint import mlx
from stoker.checkpoint.gguf_header import as_checkpoint, read_gguf_file
from stoker.checkpoint.remote import hub_name, open_remote
from stoker.checkpoint.source import Checkpoint, open_checkpoint
from stoker.errors import CheckpointError, OptionError
from stoker.store import manifest as manifest_file
from stoker.store.manifest import Manifest
from stoker.store.packplan import PackOptions, plan_pack
from stoker.store.reader import open_store

AS_STORED, AS_PUBLISHED = "as stored", "as published"


@dataclass(frozen=True)
class Headers:
    """`manifests`: what is stored or would be packed, by "as stored", "as published", "4", "8". `refused`: why not."""

    name: str
    kind: str  # store, safetensors, mlx, gguf
    config: dict[str, Any]
    manifests: dict[str, Manifest]
    published_bytes: int
    fetched_bytes: int = 0
    directory: Path | None = None  # where it lies on this machine
    refused: dict[str, str] = field(default_factory=dict)


def open_headers(model: str) -> Headers:
    """Raises StoreError, CheckpointError or OptionError, saying what is wrong with a name that is none of the four."""
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return _local_gguf(path)
    if (path / manifest_file.NAME).is_file():
        store = open_store(path)
        return Headers(
            str(path), "store", store.config, {AS_STORED: store.manifest}, store.dense_bytes + store.expert_bytes,
            directory=path,
        )  # fmt: skip
    if path.exists():
        checkpoint = open_checkpoint(path)
        return _planned(model, checkpoint, _kind(checkpoint), checkpoint.nbytes, directory=path)
    hub = hub_name(model)
    if hub is None:
        raise CheckpointError(
            "no such file or directory, and no Hub id",
            where=model,
            expected="a store, a checkpoint, a GGUF file, or OWNER/NAME",
        )
    remote = open_remote(hub)
    kind = remote.kind if remote.kind == "gguf" else _kind(remote.checkpoint)
    return _planned(model, remote.checkpoint, kind, remote.published_bytes, fetched_bytes=remote.fetched_bytes)


def _local_gguf(path: Path) -> Headers:
    parts = sorted(path.parent.glob(path.name.replace("-00001-of-", "-*-of-"))) if "-00001-of-" in path.name else [path]
    checkpoint = as_checkpoint([read_gguf_file(part) for part in parts], str(path))
    nbytes = sum(part.stat().st_size for part in parts)
    return _planned(str(path), checkpoint, "gguf", nbytes, directory=path.parent)


def _kind(checkpoint: Checkpoint) -> str:
    return "mlx" if mlx.is_mlx(checkpoint.config, checkpoint.tensors) else "safetensors"


def _planned(name: str, checkpoint: Checkpoint, kind: str, published_bytes: int, **more: Any) -> Headers:
    manifests: dict[str, Manifest] = {}
    refused: dict[str, str] = {}
    if kind == "mlx":
        manifests[AS_PUBLISHED] = plan_pack(checkpoint, PackOptions()).manifest
    else:
        for bits in (4, 8):
            try:
                manifests[str(bits)] = _at(checkpoint, bits)
            except OptionError as problem:
                refused[str(bits)] = problem.render()
    if not manifests:
        raise CheckpointError("cannot be packed at 4 or 8 bits", where=name, got=refused["4"])
    return Headers(name, kind, checkpoint.config, manifests, published_bytes, refused=refused, **more)


def _at(checkpoint: Checkpoint, bits: int) -> Manifest:
    """With the default group size, or groups of 32 where not every expert matrix fits."""
    try:
        return plan_pack(checkpoint, PackOptions(bits=bits)).manifest
    except OptionError:
        return plan_pack(checkpoint, PackOptions(bits=bits, group_size=32)).manifest
