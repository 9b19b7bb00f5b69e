"""The manifest of a store (`stoker.json`): what it holds, in which formats, with which checksums.

Owns the JSON form and its checks. Opens no weight file. The manifest is the last thing written: a directory without
one is not a store. Checksums are CRC-32 (zlib's polynomial), as 8 hex digits.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import StoreError
from stoker.quant.formats import ExpertLayout, MatrixSpec, PlacedMatrix, WeightFormat

NAME = "stoker.json"
KIND = "stoker-store"
VERSION = 1


@dataclass(frozen=True)
class PoolEntry:
    """One pool: `layers` route into it; every record has `layout`; checksums[e] is that of record e."""

    id: int
    layers: tuple[int, ...]
    experts: int
    layout: ExpertLayout
    checksums: tuple[str, ...] = ()


@dataclass(frozen=True)
class DenseEntry:
    """One always-resident tensor. `spec` None: plain, in `dtype` (bf16, f16, f32, i64 ...), part "data"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: MatrixSpec | None
    checksums: dict[str, str] = field(default_factory=dict)


class FileEntry(NamedTuple):
    """A weight file: its size, and the checksum of its header (length prefix and padding included)."""

    nbytes: int
    header: str


@dataclass(frozen=True)
class Manifest:
    """`source`: kind, name and fingerprint of what was packed. `files`: the weight files.

    `side_files`: everything else (config, tokenizer) with checksums. `notes`: what packing left out or kept plain.
    """

    source: dict[str, str]
    quantisation: dict[str, Any]
    pools: tuple[PoolEntry, ...]
    dense: tuple[DenseEntry, ...]
    files: dict[str, FileEntry]
    side_files: dict[str, str]
    notes: dict[str, list[str]] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """sha256 over config, formats and checksums: equal when and only when the model is."""
        content = {
            "config": self.side_files.get("config.json"),
            "pools": [_pool_json(pool) for pool in self.pools],
            "dense": [_dense_json(tensor) for tensor in self.dense],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def dumps(self) -> str:
        body = {
            "kind": KIND,
            "version": VERSION,
            "fingerprint": self.fingerprint(),
            "source": self.source,
            "quantisation": self.quantisation,
            "checksum": "crc32",
            "files": {name: {"bytes": f.nbytes, "header": f.header} for name, f in self.files.items()},
            "side_files": self.side_files,
            "notes": self.notes,
            "pools": [_pool_json(pool) for pool in self.pools],
            "dense": [_dense_json(tensor) for tensor in self.dense],
        }
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The checked manifest of a store. Raises StoreError for a missing, damaged, foreign or newer one."""
    path = directory / NAME
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise StoreError(
            f"not a store: there is no {NAME}",
            where=str(directory),
            remedy="pack a checkpoint with `stoker pack SRC DST`; an interrupted pack resumes when run again",
        ) from problem
    except OSError as problem:
        raise StoreError("cannot read the manifest", where=str(path), got=problem.strerror) from problem
    except ValueError as problem:
        raise StoreError("the manifest is not valid JSON", where=str(path), got=str(problem)) from problem
    _check_kind(body, path)
    try:
        manifest = Manifest(
            source=dict(body["source"]),
            quantisation=dict(body["quantisation"]),
            pools=tuple(_pool(item) for item in body["pools"]),
            dense=tuple(_dense(item) for item in body["dense"]),
            files={name: FileEntry(int(f["bytes"]), f["header"]) for name, f in body["files"].items()},
            side_files=dict(body["side_files"]),
            notes=dict(body["notes"]),
        )
        claimed = body["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise StoreError(
            "the manifest is damaged", where=str(path), got=f"{type(problem).__name__}: {problem}"
        ) from problem
    if manifest.fingerprint() != claimed:
        raise StoreError(
            "the manifest does not match its own fingerprint: it was edited or damaged",
            where=str(path),
            expected=claimed,
            got=manifest.fingerprint(),
            remedy="pack the model again",
        )
    return manifest


def _check_kind(body: Any, path: Path) -> None:
    if not isinstance(body, dict) or body.get("kind") != KIND:
        got = body.get("kind") if isinstance(body, dict) else type(body).__name__
        raise StoreError("the manifest is not stoker's", where=str(path), expected=f'"kind": "{KIND}"', got=got)
    version = body.get("version")
    if not isinstance(version, int) or version < 1:
        raise StoreError("the manifest has no usable version", where=str(path), expected=VERSION, got=version)
    if version > VERSION:
        raise StoreError(
            "the store was written by a newer stoker",
            where=str(path),
            expected=f"version {VERSION} or older",
            got=f"version {version}",
            remedy="upgrade stoker, or pack the model again with this one",
        )


def _pool_json(pool: PoolEntry) -> dict[str, Any]:
    return {
        "id": pool.id,
        "layers": list(pool.layers),
        "experts": pool.experts,
        "record_bytes": pool.layout.record_bytes,
        "parts": {name: _placed_json(getattr(pool.layout, name)) for name in ("gate", "up", "down")},
        "checksums": list(pool.checksums),
    }


def _pool(item: dict[str, Any]) -> PoolEntry:
    parts = {name: _placed(item["parts"][name]) for name in ("gate", "up", "down")}
    layout = ExpertLayout(**parts, record_bytes=int(item["record_bytes"]))
    checksums = tuple(item["checksums"])
    if len(checksums) != item["experts"]:
        raise ValueError(f"pool {item['id']}: {item['experts']} experts but {len(checksums)} checksums")
    _check_layout(layout, item["id"])
    return PoolEntry(int(item["id"]), tuple(item["layers"]), int(item["experts"]), layout, checksums)


def _check_layout(layout: ExpertLayout, pool: int) -> None:
    """Every part inside the record and aligned: kernels trust these numbers."""
    planned = ExpertLayout.plan(
        layout.gate.spec, layout.up.spec, layout.down.spec, row_bias=layout.gate.row_bias is not None
    )
    if planned != layout:
        raise ValueError(f"pool {pool}: the parts of a record do not lie where this version puts them")


def _placed_json(placed: PlacedMatrix) -> dict[str, Any]:
    spec = placed.spec
    dtype = spec.format.scale_dtype.upper()
    parts = {"codes": _part_json("F32" if spec.format.kind == "f32" else "U32", spec.codes_shape, placed.codes)}
    if spec.format.kind == "affine":
        parts["scales"] = _part_json(dtype, spec.scales_shape, placed.scales)
        parts["biases"] = _part_json(dtype, spec.scales_shape, placed.biases)
    if placed.row_bias is not None:
        parts["row_bias"] = _part_json("F32", (spec.rows,), placed.row_bias)
    return {**_spec_json(spec), **parts}


def _part_json(dtype: str, shape: tuple[int, ...], offset: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "offset": offset}


def _placed(item: dict[str, Any]) -> PlacedMatrix:
    def offset(part: str) -> int:
        return int(item[part]["offset"]) if part in item else 0

    row_bias = offset("row_bias") if "row_bias" in item else None
    return PlacedMatrix(_spec(item), offset("codes"), offset("scales"), offset("biases"), row_bias)


def _spec_json(spec: MatrixSpec) -> dict[str, Any]:
    return {"rows": spec.rows, "cols": spec.cols, "format": asdict(spec.format)}


def _spec(item: dict[str, Any]) -> MatrixSpec:
    return MatrixSpec(int(item["rows"]), int(item["cols"]), WeightFormat(**item["format"]))


def _dense_json(tensor: DenseEntry) -> dict[str, Any]:
    spec = None if tensor.spec is None else _spec_json(tensor.spec)
    base = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "matrix": spec}
    return {**base, "checksums": tensor.checksums}


def _dense(item: dict[str, Any]) -> DenseEntry:
    spec = None if item["matrix"] is None else _spec(item["matrix"])
    return DenseEntry(item["name"], item["dtype"], tuple(item["shape"]), spec, dict(item["checksums"]))
