"""Opens a store: config, pools, and where each record and dense tensor lies on disk.

Owns finding and checking; reads headers and the manifest, never weights (except to verify). Everything that can be
known without reading weights is checked at `open_store`, so that a damaged store fails before anything heavy.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.safetensors_file import TORCH_DTYPES, TensorEntry, pread, read_header
from stoker.errors import StoreError
from stoker.ids import ExpertKey, Extent
from stoker.quant.formats import RECORD_ALIGNMENT, ExpertLayout, MatrixSpec
from stoker.store.files import Part, dense_parts, record_name
from stoker.store.manifest import DenseEntry, FileEntry, Manifest, PoolEntry, read_manifest

PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Pool:
    """The experts that `layers` route into. Every record of a pool has the same layout."""

    id: int
    layers: tuple[int, ...]
    experts: int
    layout: ExpertLayout


@dataclass(frozen=True)
class DenseTensor:
    """An always-resident tensor under its source name.

    spec None: plain, `dtype` (bf16, f16, f32, i64 ...) and `shape`, part "data".
    Otherwise a matrix in tile16: parts "codes" and, where affine, "scales" and "biases".
    """

    name: str
    spec: MatrixSpec | None
    dtype: str
    shape: tuple[int, ...]
    parts: dict[str, Extent]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of a plain tensor's data."""
        return TORCH_DTYPES[self.dtype.upper()]

    def read(self) -> dict[str, Tensor]:
        """Every part as a tensor that owns its memory, in the shape that `formats` gives it."""
        described = _described(self)
        return {name: _read_part(part, self.parts[name]) for name, part in described.items()}


class Store:
    """An open store. Holds no weights and no file handles."""

    def __init__(self, path: Path, manifest: Manifest, config: dict[str, Any], entries: dict[str, TensorEntry]) -> None:
        self.path, self.manifest, self.config = path, manifest, config
        self.fingerprint = manifest.fingerprint()
        self.pools = [Pool(p.id, p.layers, p.experts, p.layout) for p in manifest.pools]
        self._records = {p.id: [_record_extent(p, e, entries, path) for e in range(p.experts)] for p in manifest.pools}
        self.dense = {tensor.name: tensor for tensor in _dense_tensors(manifest, entries, path)}

    def record(self, pool: int, expert: int) -> Extent:
        """Where one expert lies: offset and length are multiples of 4096."""
        return self._records[pool][expert]

    @property
    def expert_bytes(self) -> int:
        return sum(pool.experts * pool.layout.record_bytes for pool in self.pools)

    @property
    def dense_bytes(self) -> int:
        return sum(extent.length for tensor in self.dense.values() for extent in tensor.parts.values())

    def checks(self) -> Iterator[tuple[str, Extent, str]]:
        """(name, extent, expected checksum) of everything, in the order in which it lies on disk."""
        for name, checksum in self.manifest.side_files.items():
            file = self.path / name
            yield name, Extent(str(file), 0, file.stat().st_size if file.exists() else 0), checksum
        for entry in self.manifest.dense:
            for part, extent in self.dense[entry.name].parts.items():
                yield f"{entry.name} ({part})", extent, entry.checksums[part]
        for pool in self.manifest.pools:
            for expert, checksum in enumerate(pool.checksums):
                key = ExpertKey(pool.id, expert)
                yield f"pool {key.pool} expert {key.expert}", self.record(*key), checksum

    def verify(self, progress: Callable[[int], None] | None = None) -> int:
        """Read everything and compare checksums; `progress` gets the bytes of each piece. Returns the bytes read.

        Raises StoreError naming the first tensor, record or file whose bytes are not those that were packed.
        """
        total = 0
        for name, extent, expected in self.checks():
            found = _checksum(extent, name, progress)
            if found != expected:
                raise StoreError(
                    f"{name} is damaged: its checksum is wrong",
                    where=f"{extent.file} at {extent.offset}, {extent.length} bytes",
                    expected=expected,
                    got=found,
                    remedy="copy the file again from an intact store, or pack the model again",
                )
            total += extent.length
        return total


def open_store(path: str | Path) -> Store:
    """Open a store directory. Raises StoreError for anything missing, damaged, foreign, cut short or newer."""
    directory = Path(path)
    if not directory.is_dir():
        raise StoreError("no such directory", where=str(directory))
    manifest = read_manifest(directory)
    entries: dict[str, TensorEntry] = {}
    for name, listed in manifest.files.items():
        entries.update(_open_file(directory / name, listed))
    return Store(directory, manifest, _config(directory, manifest), entries)


def _open_file(file: Path, listed: FileEntry) -> dict[str, TensorEntry]:
    if not file.exists():
        raise StoreError("a file of the store is missing", where=str(file), remedy="copy it again, or pack again")
    found = file.stat().st_size
    if found != listed.nbytes:
        raise StoreError(
            "a file of the store has the wrong size: it was cut, or belongs to another store",
            where=str(file),
            expected=f"{listed.nbytes} bytes",
            got=f"{found} bytes",
            remedy="copy it again, or pack again",
        )
    entries = read_header(file, StoreError)
    start = min((entry.offset for entry in entries.values()), default=found)
    header = _checksum(Extent(str(file), 0, start), "the header", None)
    if header != listed.header:
        raise StoreError("the header is damaged", where=str(file), expected=f"checksum {listed.header}", got=header)
    return entries


def _config(directory: Path, manifest: Manifest) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        raw = file.read_bytes()
        config = json.loads(raw)
    except OSError as problem:
        raise StoreError("cannot read the config", where=str(file), got=problem.strerror) from problem
    except ValueError as problem:
        raise StoreError("the config is not valid JSON", where=str(file), got=str(problem)) from problem
    found, expected = f"{zlib.crc32(raw):08x}", manifest.side_files.get("config.json")
    if found != expected:
        raise StoreError(
            "the config is not the one that was packed",
            where=str(file),
            expected=f"checksum {expected}",
            got=found,
            remedy="restore the file, or pack again",
        )
    return config


def _record_extent(pool: PoolEntry, expert: int, entries: dict[str, TensorEntry], path: Path) -> Extent:
    name = record_name(ExpertKey(pool.id, expert))
    entry = entries.get(name)
    if entry is None:
        raise StoreError(f"record {name} is in no file of the store", where=str(path), remedy="pack the model again")
    size = pool.layout.record_bytes
    if entry.nbytes != size or entry.offset % RECORD_ALIGNMENT:
        raise StoreError(
            f"record {name} is not where or not as long as the manifest says",
            where=str(entry.file),
            expected=f"{size} bytes at a multiple of {RECORD_ALIGNMENT}",
            got=f"{entry.nbytes} bytes at {entry.offset}",
        )
    return Extent(str(entry.file), entry.offset, entry.nbytes)


def _dense_tensors(manifest: Manifest, entries: dict[str, TensorEntry], path: Path) -> Iterator[DenseTensor]:
    for wanted in manifest.dense:
        extents: dict[str, Extent] = {}
        for part, description in dense_parts(wanted).items():
            entry = entries.get(description.name)
            if entry is None:
                raise StoreError(f"tensor {description.name} is in no file of the store", where=str(path))
            if (entry.dtype, entry.shape) != (description.dtype, description.shape):
                raise StoreError(
                    f"tensor {description.name} is not what the manifest says",
                    where=str(entry.file),
                    expected=f"{description.dtype} {list(description.shape)}",
                    got=f"{entry.dtype} {list(entry.shape)}",
                )
            extents[part] = Extent(str(entry.file), entry.offset, entry.nbytes)
        yield DenseTensor(wanted.name, wanted.spec, wanted.dtype, wanted.shape, extents)


def _described(tensor: DenseTensor) -> dict[str, Part]:
    return dense_parts(DenseEntry(tensor.name, tensor.dtype, tensor.shape, tensor.spec))


def _read_part(part: Part, extent: Extent) -> Tensor:
    raw = torch.from_numpy(pread(Path(extent.file), extent.offset, extent.length, what=part.name, error=StoreError))
    return raw.view(TORCH_DTYPES[part.dtype]).view(part.shape)


def _checksum(extent: Extent, name: str, progress: Callable[[int], None] | None) -> str:
    value, offset, end = 0, extent.offset, extent.offset + extent.length
    while offset < end:
        length = min(PIECE_BYTES, end - offset)
        piece = pread(Path(extent.file), offset, length, what=name, error=StoreError)
        value = zlib.crc32(piece.data, value)
        if progress is not None:
            progress(length)
        offset += length
    return f"{value:08x}"
