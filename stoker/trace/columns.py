"""Columns in safetensors files, read and joined without loading them: what the trace writer and reader share.

A file is an 8-byte little-endian header length, a JSON header, then raw little-endian data. Knows nothing of traces.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from stoker.errors import TraceError

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
COPY_CHUNK_BYTES = 1 << 20


class Column(NamedTuple):
    """One 1-D tensor of a file: `offset` bytes from the start of the file."""

    dtype: str
    length: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.length * NUMPY_DTYPES[self.dtype].itemsize


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Column]]:
    """The metadata and the columns of one file. Raises TraceError where it is not a file of 1-D columns."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(header_bytes))
        metadata = header.pop("__metadata__", {})
        columns = {}
        for name, entry in header.items():
            (length,) = entry["shape"]
            columns[name] = Column(entry["dtype"], length, 8 + header_bytes + entry["data_offsets"][0])
            NUMPY_DTYPES[entry["dtype"]]
    except OSError as error:
        raise TraceError("cannot be opened", where=str(path), got=error.strerror) from error
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise TraceError(
            "is not a trace", where=str(path), expected="safetensors with 1-D columns", got=error
        ) from error
    return metadata, columns


def map_column(path: Path, column: Column) -> np.ndarray:
    """The column as a read-only array backed by the file."""
    dtype = NUMPY_DTYPES[column.dtype]
    if column.length == 0:
        return np.empty(0, dtype)
    if path.stat().st_size < column.offset + column.nbytes:
        raise TraceError(
            "is cut short", where=str(path), expected=column.offset + column.nbytes, got=path.stat().st_size
        )
    return np.memmap(path, dtype, mode="r", offset=column.offset, shape=(column.length,))


def write_columns(path: Path, columns: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    save_file({name: np.ascontiguousarray(column) for name, column in columns.items()}, path, dict(metadata))


def join_files(parts: Sequence[Path], target: Path, metadata: Mapping[str, str]) -> None:
    """Write `target` with each column of `parts` one after the other. Memory does not grow with the parts. Atomic."""
    headers = [read_header(part)[1] for part in parts]
    names = list(headers[0])
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        length = sum(header[name].length for header in headers)
        nbytes = sum(header[name].nbytes for header in headers)
        entries[name] = {"dtype": headers[0][name].dtype, "shape": [length], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    unfinished = target.with_name(target.name + ".unfinished")
    with unfinished.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for part, header in zip(parts, headers, strict=True):
                _copy(part, header[name], out)
    os.replace(unfinished, target)


def _copy(part: Path, column: Column, out: BinaryIO) -> None:
    with part.open("rb") as source:
        source.seek(column.offset)
        left = column.nbytes
        while left:
            chunk = source.read(min(left, COPY_CHUNK_BYTES))
            if not chunk:
                raise TraceError("is cut short", where=str(part), expected=f"{left} more bytes")
            out.write(chunk)
            left -= len(chunk)
