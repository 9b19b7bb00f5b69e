"""Writes a store of a known shape from seeded random weights, at the speed of the disk.

Owns the random numbers: every tensor is a function of (seed, its name) alone, so that the same weights can be written
again in another container. Codes are uniform; scales vary by group and carry random signs, so that no column of any
matrix has a mean of its own and routing depends on the token.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.ids import ExpertKey
from stoker.quant.formats import ExpertLayout, MatrixSpec, PlacedMatrix, WeightFormat
from stoker.quant.reference import SCALE_DTYPES, Parts
from stoker.store.files import dense_parts, plain_dtype, record_name
from stoker.store.manifest import DenseEntry, Manifest, PoolEntry
from stoker.store.synth_shapes import SynthShape, SynthTensor
from stoker.store.synth_tokenizer import tokenizer_files
from stoker.store.threads import one_torch_thread
from stoker.store.writer import StoreWriter, finished_store

_TABLE_WORDS = 1 << 20  # 8 MiB a table: stays in the last-level cache
_CODE_RMS = 4.6368  # of 4-bit codes minus 8, all equally likely
_ZERO_CODE = 8.0


class RandomWeights:
    """Every weight of a shape as a function of the seed: tile16 parts, records, plain tensors."""

    def __init__(self, shape: SynthShape, fmt: WeightFormat, seed: int) -> None:
        self.shape, self.format, self.seed = shape, fmt, seed
        self._tables = [self._bits("table", i).random_raw(_TABLE_WORDS) for i in range(2)]
        wide = MatrixSpec(shape.width, shape.hidden, fmt)
        self.layout = ExpertLayout.plan(wide, wide, MatrixSpec(shape.hidden, shape.width, fmt))

    def record(self, pool: int, expert: int) -> np.ndarray:
        """uint8 [record_bytes]."""
        record = np.zeros(self.layout.record_bytes, dtype=np.uint8)
        placed = (self.layout.gate, self.layout.up, self.layout.down)
        for i, (matrix, std) in enumerate(zip(placed, self.shape.expert_stds, strict=True)):
            self._fill(record, matrix, std, self._generator("expert", pool, expert, i))
        return record

    def matrix(self, tensor: SynthTensor) -> Parts:
        """tile16 parts of an affine tensor."""
        spec = tensor.matrix(self.format)
        placed = PlacedMatrix(spec, 0, spec.codes_bytes, spec.codes_bytes + spec.scales_bytes)
        buffer = np.zeros(spec.total_bytes, dtype=np.uint8)
        self._fill(buffer, placed, tensor.std, self._generator(tensor.name))
        return parts_of(buffer, placed)

    def plain(self, tensor: SynthTensor) -> torch.Tensor:
        """A tensor that is kept as it is, in its own dtype."""
        random = self._generator(tensor.name)
        if tensor.fill == "log_uniform":
            values = np.log(random.uniform(1.0, 16.0, tensor.shape))
        else:
            values = random.normal(tensor.mean, tensor.std, tensor.shape)
        return torch.from_numpy(values).to(torch.float32 if tensor.dtype == "f32" else torch.bfloat16)

    def _fill(self, buffer: np.ndarray, placed: PlacedMatrix, std: float, random: np.random.Generator) -> None:
        spec = placed.spec
        codes = buffer[placed.codes : placed.codes + spec.codes_bytes].view(np.uint64)
        self._random_words(codes, random)
        _clear_padding(codes.view(np.uint32).reshape(spec.codes_shape), spec.rows)
        scales = torch.from_numpy(random.uniform(0.5, 1.5, spec.scales_shape).astype(np.float32) * (std / _CODE_RMS))
        signs = torch.from_numpy(random.integers(0, 2, spec.scales_shape, dtype=np.int8)).float() * 2 - 1
        _clear_padding(scales, spec.rows)
        rounded = (scales * signs).to(SCALE_DTYPES[spec.format.scale_dtype])
        for at, values in ((placed.scales, rounded), (placed.biases, rounded * -_ZERO_CODE)):
            buffer[at : at + spec.scales_bytes] = values.view(torch.uint8).numpy().reshape(-1)

    def _random_words(self, out: np.ndarray, random: np.random.Generator) -> None:
        """Uniform bits: two random tables, combined at random offsets. A generator alone is slower than the disk."""
        for start in range(0, len(out), _TABLE_WORDS // 2):
            piece = out[start : start + _TABLE_WORDS // 2]
            a, b = random.integers(0, _TABLE_WORDS - len(piece), 2)
            np.bitwise_xor(self._tables[0][a : a + len(piece)], self._tables[1][b : b + len(piece)], out=piece)

    def _generator(self, *name: str | int) -> np.random.Generator:
        return np.random.Generator(self._bits(*name))

    def _bits(self, *name: str | int) -> np.random.SFC64:
        key = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in name]
        return np.random.SFC64(np.random.SeedSequence([self.seed, *key]))


def parts_of(buffer: np.ndarray, placed: PlacedMatrix) -> Parts:
    """The tensors of one affine matrix inside a record; they share the buffer's memory."""
    spec = placed.spec
    codes = buffer[placed.codes : placed.codes + spec.codes_bytes]
    halves = [buffer[at : at + spec.scales_bytes] for at in (placed.scales, placed.biases)]
    dtype = SCALE_DTYPES[spec.format.scale_dtype]
    scales, biases = (torch.from_numpy(half).view(dtype).view(spec.scales_shape) for half in halves)
    return Parts(torch.from_numpy(codes).view(torch.uint32).view(spec.codes_shape), scales, biases)


def synth_plan(shape: SynthShape, weights: RandomWeights, seed: int) -> Manifest:
    """What the store will hold, without checksums."""
    fmt = weights.format
    pools = tuple(PoolEntry(layer, (layer,), shape.experts, weights.layout) for layer in range(shape.layers))
    return Manifest(
        source={"kind": "synth", "name": shape.name, "fingerprint": f"seed {seed}, {shape.layers} layers"},
        quantisation={"bits": fmt.bits, "group_size": fmt.group_size, "scale_dtype": fmt.scale_dtype},
        pools=pools,
        dense=tuple(_entry(tensor, fmt) for tensor in shape.dense),
        files={},
        side_files={},
    )


def store_bytes(shape: SynthShape, weights: RandomWeights) -> int:
    """The size of the store's weights."""
    dense = sum(part.nbytes for tensor in shape.dense for part in dense_parts(_entry(tensor, weights.format)).values())
    return dense + shape.layers * shape.experts * weights.layout.record_bytes


def write_store(
    path: Path,
    shape: SynthShape,
    fmt: WeightFormat,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Write the store; `progress` gets bytes. Resumes after an interruption like any pack."""
    weights = RandomWeights(shape, fmt, seed)
    plan = synth_plan(shape, weights, seed)
    finished = finished_store(path, plan)
    if finished is not None:
        return finished
    identity = {"synth": shape.name, "layers": shape.layers, "seed": seed, "format": fmt.label()}
    with one_torch_thread(), StoreWriter(path, plan, identity) as writer:
        writer.check_room()
        for tensor in shape.dense:
            if not writer.has(tensor.name):
                writer.write_dense(tensor.name, _chunks(weights, tensor))
            _tell(progress, writer.item_bytes(tensor.name))
        for pool in plan.pools:
            for expert in range(pool.experts):
                key = ExpertKey(pool.id, expert)
                if not writer.has(record_name(key)):
                    writer.write_record(key, weights.record(*key))
                _tell(progress, pool.layout.record_bytes)
        return writer.finish(side_files(shape))


def side_files(shape: SynthShape) -> dict[str, bytes]:
    config = (json.dumps(shape.config, indent=2) + "\n").encode()
    generation = {"do_sample": False, "eos_token_id": shape.vocabulary - 1}
    return {
        "config.json": config,
        "generation_config.json": (json.dumps(generation, indent=2) + "\n").encode(),
        **tokenizer_files(shape.vocabulary),
    }


def _entry(tensor: SynthTensor, fmt: WeightFormat) -> DenseEntry:
    if tensor.fill != "affine":
        return DenseEntry(tensor.name, tensor.dtype, tensor.shape, None)
    spec = tensor.matrix(fmt)
    return DenseEntry(tensor.name, plain_dtype(spec), tensor.shape, spec)


def _chunks(weights: RandomWeights, tensor: SynthTensor) -> Iterator[dict[str, Any]]:
    if tensor.fill != "affine":
        yield {"data": weights.plain(tensor).reshape(-1).view(torch.uint8).numpy()}
        return
    parts = weights.matrix(tensor)
    yield {name: part.view(torch.uint8).numpy() for name, part in parts._asdict().items()}


def _clear_padding(tiles: Any, rows: int) -> None:
    """Rows beyond the last, in tile16 [tiles, words, 16], hold zeros."""
    if rows % 16:
        tiles[-1, :, rows % 16 :] = 0


def _tell(progress: Callable[[int], None] | None, nbytes: int) -> None:
    if progress is not None:
        progress(nbytes)
