"""Safetensors files as headers and extents: parse, check against the file's size, read slices with pread.

Owns the container format alone. Knows nothing of what tensors mean, of models, or of stores. Never maps a file and
never reads a whole one. Format: https://github.com/huggingface/safetensors (u64 header length, JSON header, data).
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.errors import CheckpointError, StokerError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: safetensors dtype name, shape, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    def read(self) -> Tensor:
        """The whole tensor."""
        return self._tensor(self.offset, self.nbytes).view(self.torch_dtype).view(self.shape)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Indices start..stop-1 of the first axis."""
        raw = self._tensor(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        return raw.view(self.torch_dtype).view(stop - start, *self.shape[1:])

    def _tensor(self, offset: int, nbytes: int) -> Tensor:
        return torch.from_numpy(pread(self.file, offset, nbytes, what=self.name))


def pread(file: Path, offset: int, nbytes: int, *, what: str, error: type[StokerError] = CheckpointError) -> np.ndarray:
    """uint8 [nbytes] from `file`. Raises `error` naming `what` where the file is shorter or unreadable."""
    buffer = np.empty(nbytes, dtype=np.uint8)
    view = memoryview(buffer)  # type: ignore[arg-type]
    done = 0
    try:
        fd = os.open(file, os.O_RDONLY)
        try:
            while done < nbytes:
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise error(f"the file ends inside {what}", where=str(file), expected=nbytes, got=done)
                done += count
            if hasattr(os, "posix_fadvise"):  # read once: leave no page cache behind
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as problem:
        raise error(f"reading {what} failed", where=str(file), got=problem.strerror) from problem
    return buffer


def read_header(file: Path, error: type[StokerError] = CheckpointError) -> dict[str, TensorEntry]:
    """Every tensor of a file by name, checked: known dtypes, sizes that match shapes, extents inside the file.

    Raises `error` for a file that is missing, unreadable, no safetensors file, or cut short.
    """
    where = str(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise error("not a whole safetensors file", where=where, got=f"{size} bytes, header length {length}")
            raw = handle.read(length)
    except OSError as problem:
        raise error("cannot read a file", where=where, got=problem.strerror) from problem
    return parse_header(raw, file, 8 + length, size, error)


def parse_header(
    raw: bytes, file: Path, start: int, size: int, error: type[StokerError] = CheckpointError
) -> dict[str, TensorEntry]:
    """The entries of a header's JSON; data begins at byte `start` of a file of `size` bytes. Raises `error`."""
    where = str(file)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return {name: _entry(name, item, file, start, size, error) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise error("the safetensors header is damaged", where=where, got=str(problem)) from problem


def _entry(name: str, item: dict, file: Path, start: int, size: int, error: type[StokerError]) -> TensorEntry:
    dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    if dtype not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise error(f"tensor {name} has an unknown dtype", where=str(file), expected=known, got=dtype)
    expected = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if end - begin != expected:
        raise error(f"tensor {name}: bytes and shape disagree", where=str(file), expected=expected, got=end - begin)
    if begin < 0 or start + end > size:
        raise error(
            f"the file ends before tensor {name} does",
            where=str(file),
            expected=f"at least {start + end} bytes",
            got=f"{size} bytes",
            remedy="the file was cut short: download or copy it again",
        )
    return TensorEntry(name, dtype, shape, file, start + begin, expected)
