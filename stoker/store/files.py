"""Where every byte of a store goes: which file, which offset. Pure arithmetic, no I/O.

Owns the names of files and tensors and the safetensors headers. The data of expert files starts at a multiple of 4096
(headers are padded with spaces), and so does each record: one aligned extent serves O_DIRECT.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.checkpoint.safetensors_file import TORCH_DTYPES
from stoker.ids import ExpertKey
from stoker.quant.formats import PART_ALIGNMENT, RECORD_ALIGNMENT, MatrixSpec, align
from stoker.store.manifest import DenseEntry, PoolEntry

SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Part:
    """One tensor of a weight file: safetensors name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class FilePlan:
    """One weight file: its header (length prefix included), and (absolute offset, bytes) of every tensor in it."""

    name: str
    header: bytes
    spans: dict[str, tuple[int, int]]
    nbytes: int


def record_name(key: ExpertKey) -> str:
    return f"pool.{key.pool}.expert.{key.expert}"


def part_name(tensor: str, part: str) -> str:
    """The safetensors name of a dense tensor's part: plain tensors keep their own name."""
    return tensor if part == "data" else f"{tensor}.{part}"


def dense_parts(entry: DenseEntry) -> dict[str, Part]:
    """The parts of a dense tensor, by part name, in the order in which they are written."""
    if entry.spec is None:
        return {"data": _part(entry.name, "data", entry.dtype.upper(), entry.shape)}
    codes = "F32" if entry.spec.format.kind == "f32" else "U32"
    parts = {"codes": _part(entry.name, "codes", codes, entry.spec.codes_shape)}
    if entry.spec.format.kind == "affine":
        dtype = entry.spec.format.scale_dtype.upper()
        for part in ("scales", "biases"):
            parts[part] = _part(entry.name, part, dtype, entry.spec.scales_shape)
    return parts


def plain_dtype(spec: MatrixSpec) -> str:
    """What `DenseEntry.dtype` says for a matrix: the type of its words."""
    return "f32" if spec.format.kind == "f32" else "u32"


def lay_out(
    pools: tuple[PoolEntry, ...], dense: tuple[DenseEntry, ...], shard_bytes: int = SHARD_BYTES
) -> tuple[FilePlan, ...]:
    """The files of a store, dense first. No file is larger than `shard_bytes` unless one tensor is."""
    tensors = [list(dense_parts(entry).values()) for entry in dense]
    records = [[_record(pool, e)] for pool in pools for e in range(pool.experts)]
    return (
        *_files("dense", _shards(tensors, shard_bytes), PART_ALIGNMENT),
        *_files("experts", _shards(records, shard_bytes), RECORD_ALIGNMENT),
    )


def _record(pool: PoolEntry, expert: int) -> Part:
    size = pool.layout.record_bytes
    return Part(record_name(ExpertKey(pool.id, expert)), "U8", (size,), size)


def _part(tensor: str, part: str, dtype: str, shape: tuple[int, ...]) -> Part:
    nbytes = TORCH_DTYPES[dtype].itemsize
    for extent in shape:
        nbytes *= extent
    return Part(part_name(tensor, part), dtype, shape, nbytes)


def _shards(groups: list[list[Part]], shard_bytes: int) -> Iterator[list[Part]]:
    """Cut into files, keeping each group (the parts of one tensor) in one file."""
    shard: list[Part] = []
    size = 0
    for group in groups:
        group_bytes = sum(part.nbytes for part in group)
        if shard and size + group_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.extend(group)
        size += group_bytes
    if shard:
        yield shard


def _files(prefix: str, shards: Iterator[list[Part]], alignment: int) -> Iterator[FilePlan]:
    listed = list(shards)
    for i, shard in enumerate(listed, start=1):
        # Whole multiples of 64 first: safetensors allows no holes, and this keeps every large part aligned.
        shard.sort(key=lambda part: part.nbytes % PART_ALIGNMENT != 0)
        yield _file(f"{prefix}-{i:05d}-of-{len(listed):05d}.safetensors", shard, alignment)


def _file(name: str, parts: list[Part], alignment: int) -> FilePlan:
    relative: dict[str, int] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    cursor = 0
    for part in parts:
        relative[part.name] = cursor
        span = [cursor, cursor + part.nbytes]
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": span}
        cursor += part.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    start = align(8 + len(text), alignment)
    text = text.ljust(start - 8, b" ")
    spans = {part.name: (start + relative[part.name], part.nbytes) for part in parts}
    return FilePlan(name, struct.pack("<Q", len(text)) + text, spans, start + cursor)
