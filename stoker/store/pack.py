"""Packs a checkpoint into a store, one expert at a time: read a slice, convert, write. Memory stays bounded.

Owns the streaming and the check that weights are finite. What becomes what is decided in `packplan`; how bytes reach
the disk safely is `writer`'s.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.checkpoint import mlx
from stoker.checkpoint.experts import MATRICES, ExpertSource, MatrixData
from stoker.errors import CheckpointError
from stoker.ids import ExpertKey
from stoker.quant.formats import TILE_ROWS, ExpertLayout, MatrixSpec, PlacedMatrix
from stoker.quant.reference import Parts, pack_tiles, quantize_rows
from stoker.store.files import lay_out, record_name
from stoker.store.manifest import Manifest
from stoker.store.packplan import DenseSource, PackPlan
from stoker.store.threads import in_order, one_torch_thread
from stoker.store.writer import StoreWriter, bytes_needed, finished_store

CHUNK_ELEMENTS = 128 << 10  # of a matrix converted at once: 512 KiB as float32 stays in the cache
Progress = Callable[[int], None]


def pack(plan: PackPlan, path: Path, progress: Progress | None = None, *, shard_bytes: int | None = None) -> Manifest:
    """Write the store that `plan` describes; `progress` gets bytes. Run again after an interruption, it continues.

    Raises DiskSpaceError before writing when the disk has no room, CheckpointError naming the tensor that is not
    finite or cannot be read. Without the returned manifest on disk the directory is no store.
    """
    finished = finished_store(path, plan.manifest)
    if finished is not None:
        return finished
    side_files = plan.checkpoint.side_files()
    with one_torch_thread(), StoreWriter(path, plan.manifest, plan.identity, shard_bytes=shard_bytes) as writer:
        writer.check_room()
        for dense in plan.dense:
            if not writer.has(dense.entry.name):
                writer.write_dense(dense.entry.name, _dense_chunks(plan, dense))
            _tell(progress, writer.item_bytes(dense.entry.name))
        for pool, experts in zip(plan.manifest.pools, plan.experts, strict=True):
            missing = [e for e in range(pool.experts) if not writer.has(record_name(ExpertKey(pool.id, e)))]
            _tell(progress, (pool.experts - len(missing)) * pool.layout.record_bytes)
            records = in_order(partial(build_record, experts[e], pool.layout) for e in missing)
            for expert, record in zip(missing, records, strict=True):
                writer.write_record(ExpertKey(pool.id, expert), record)
                _tell(progress, pool.layout.record_bytes)
        return writer.finish(side_files, plan.manifest.notes)


def packed_bytes(plan: PackPlan) -> int:
    """The size of the weight files."""
    return sum(file.nbytes for file in lay_out(plan.manifest.pools, plan.manifest.dense))


def needed_bytes(plan: PackPlan, path: Path) -> int:
    """Disk space that packing into `path` still needs; 0 when the store is there already."""
    if finished_store(path, plan.manifest) is not None:
        return 0
    return bytes_needed(path, lay_out(plan.manifest.pools, plan.manifest.dense))


def build_record(source: ExpertSource, layout: ExpertLayout) -> np.ndarray:
    """uint8 [record_bytes]: one expert, read and converted."""
    record = np.zeros(layout.record_bytes, dtype=np.uint8)
    data = source.read()
    for name in MATRICES:
        placed: PlacedMatrix = getattr(layout, name)
        where = f"{source.matrices[name].weight.entry.name} (layer {source.layer}, expert {source.expert}, {name})"
        at = {"codes": placed.codes, "scales": placed.scales, "biases": placed.biases}
        for chunk in _matrix_chunks(data[name], placed.spec, where):
            for part, content in chunk.items():
                record[at[part] : at[part] + content.nbytes] = content
                at[part] += content.nbytes
        row_bias = data[name].row_bias
        if placed.row_bias is not None and row_bias is not None:
            content = _bytes(_finite(row_bias, f"bias of {where}").to(torch.float32))
            record[placed.row_bias : placed.row_bias + content.nbytes] = content
    return record


def _matrix_chunks(data: MatrixData, spec: MatrixSpec, where: str) -> Iterator[dict[str, np.ndarray]]:
    """tile16 parts of one matrix, a whole number of tiles at a time."""
    for start, stop in _row_chunks(spec):
        if data.floats is not None:
            yield _converted(data.floats[start:stop], spec, where)
        else:
            assert data.parts is not None
            yield _moved(Parts(*(part[start:stop] for part in data.parts if part is not None)), spec, where)


def _dense_chunks(plan: PackPlan, source: DenseSource) -> Iterator[dict[str, np.ndarray]]:
    weight, spec = source.weight, source.entry.spec
    if spec is None and not plan.moved_convolutions:
        yield from _plain_chunks(source)
    elif spec is None:
        value = mlx.restore(weight, weight.read(), plan.checkpoint.model_type, plan.moved_convolutions)
        yield {"data": _bytes(_finite(value, weight.name))}
    elif source.scales is not None and source.biases is not None:
        for start, stop in _row_chunks(spec):
            parts = Parts(*(part.read_rows(start, stop) for part in (weight, source.scales, source.biases)))
            yield _moved(parts, spec, weight.name)
    else:
        for start, stop in _row_chunks(spec):
            yield _converted(weight.read_rows(start, stop), spec, weight.name)


def _plain_chunks(source: DenseSource) -> Iterator[dict[str, np.ndarray]]:
    weight = source.weight
    if len(weight.shape) < 2:
        yield {"data": _bytes(_finite(weight.read(), weight.name))}
        return
    rows = max(1, CHUNK_ELEMENTS * weight.torch_dtype.itemsize // max(weight.row_bytes, 1))
    for start in range(0, weight.shape[0], rows):
        value = weight.read_rows(start, min(start + rows, weight.shape[0]))
        yield {"data": _bytes(_finite(value, weight.name))}


def _row_chunks(spec: MatrixSpec) -> Iterator[tuple[int, int]]:
    rows = max(TILE_ROWS, CHUNK_ELEMENTS // spec.cols // TILE_ROWS * TILE_ROWS)
    for start in range(0, spec.rows, rows):
        yield start, min(start + rows, spec.rows)


def _converted(floats: Tensor, spec: MatrixSpec, where: str) -> dict[str, np.ndarray]:
    if spec.format.kind != "affine":
        return _tiles(quantize_rows(_finite(floats, where), spec.format), floats.shape[0], spec)
    rows = quantize_rows(floats, spec.format)
    assert rows.scales is not None and rows.biases is not None
    if not (torch.isfinite(rows.scales).all() and torch.isfinite(rows.biases).all()):  # NaN and infinity reach them
        _finite(floats, where)
        raise CheckpointError("the weights are too large for the format's scales", where=where)
    return _tiles(rows, floats.shape[0], spec)


def _moved(parts: Parts, spec: MatrixSpec, where: str) -> dict[str, np.ndarray]:
    """Parts that are quantised already: only moved, never changed."""
    for part in (parts.scales, parts.biases):
        assert part is not None
        _finite(part, f"scales or biases of {where}")
    return _tiles(parts, parts.codes.shape[0], spec)


def _tiles(rows: Parts, count: int, spec: MatrixSpec) -> dict[str, np.ndarray]:
    tiles = pack_tiles(rows, MatrixSpec(count, spec.cols, spec.format))
    return {name: _bytes(part) for name, part in tiles._asdict().items() if part is not None}


def _finite(value: Tensor, where: str) -> Tensor:
    """Refuse NaN and infinity: they would poison every token that meets them."""
    if value.is_floating_point() and value.numel():
        low, high = (edge.item() for edge in value.aminmax())
        if not (np.isfinite(low) and np.isfinite(high)):
            bad = (~torch.isfinite(value)).nonzero()
            raise CheckpointError(
                "a weight is not finite",
                where=where,
                got=f"{value[tuple(bad[0])].item()} and {len(bad) - 1} more",
                remedy="the checkpoint is damaged: download it again",
            )
    return value


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _tell(progress: Progress | None, nbytes: int) -> None:
    if progress is not None:
        progress(nbytes)
