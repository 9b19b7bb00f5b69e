"""A run of consecutive blocks as one file: header, then each block's bytes. Whole and unchanged, or refused.

Layout: magic, header length (u32), SHA-256/128 of the header, header (JSON), zeros up to a multiple of 4096, data.
Owns bytes and names; knows neither the tree nor who decides what is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.generate.prefix.tree import child_digest, tokens_of

MAGIC = b"STKPFX01"
SUFFIX, PARTIAL = ".prefix", ".partial"
_FIXED = struct.Struct("<8sI16s")
_ALIGNMENT = 4096
_LONGEST_HEADER = 16 << 20
_WRITE_BYTES = 4 << 20


class Damaged(Exception):
    """A file that is not what it should be; the text says why."""


@dataclass(frozen=True)
class Part:
    """One block of a segment: its tokens as a key, where its bytes are, and what they must hash to."""

    key: bytes
    offset: int
    nbytes: int
    checksum: bytes
    meta: str


@dataclass(eq=False)
class Segment:
    """A file of blocks; `parent` is the digest of the block before the first, `start` that block's end in tokens."""

    path: Path
    fingerprint: bytes
    parent: bytes
    start: int
    parts: tuple[Part, ...]
    nbytes: int
    used_ns: int = 0
    gone: bool = False
    above: Segment | None = None  # where the block before the first one is
    below: int = 0  # segments that go on from this one
    nodes: list[Any] = field(default_factory=list)  # the tree's, in the order of parts

    @property
    def tokens(self) -> int:
        return sum(tokens_of(part.key) for part in self.parts)

    def digests(self) -> list[bytes]:
        found, digest = [], self.parent
        for part in self.parts:
            digest = child_digest(digest, part.key)
            found.append(digest)
        return found


def checksum(data: Any) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def segment_path(directory: Path, last_digest: bytes) -> Path:
    return directory / f"{last_digest.hex()}{SUFFIX}"


@dataclass(frozen=True)
class Draft:
    """What is to be written: `blocks` are (key, meta, the bytes)."""

    fingerprint: bytes
    parent: bytes
    start: int
    blocks: Sequence[tuple[bytes, str, memoryview]]

    @property
    def file_bytes(self) -> int:
        """No less than the file will have."""
        metas = sum(len(meta) + 8 for meta in {meta for _, meta, _ in self.blocks})
        data = sum(len(data) + 2 * len(key) + 64 for key, _, data in self.blocks)
        return data + metas + 512 + _ALIGNMENT


def write_segment(directory: Path, draft: Draft, between: Callable[[], None] = lambda: None) -> Segment:
    """Write, sync, rename; `between` is called after each few MiB. Raises OSError, and leaves nothing then."""
    metas = sorted({meta for _, meta, _ in draft.blocks})
    sums = [checksum(data) for _, _, data in draft.blocks]
    header = json.dumps(
        {
            "fingerprint": draft.fingerprint.hex(),
            "parent": draft.parent.hex(),
            "start": draft.start,
            "meta": metas,
            "blocks": [
                [key.hex(), len(data), found.hex(), metas.index(meta)]
                for (key, meta, data), found in zip(draft.blocks, sums, strict=True)
            ],
        }
    ).encode()
    first = _FIXED.pack(MAGIC, len(header), checksum(header)) + header
    first += bytes(-len(first) % _ALIGNMENT)
    digest = draft.parent
    for key, _, _ in draft.blocks:
        digest = child_digest(digest, key)
    path = segment_path(directory, digest)
    partial = path.with_suffix(PARTIAL)
    try:
        _write_file(partial, [memoryview(first), *(data for _, _, data in draft.blocks)], between)
        used_ns = time.time_ns()
        os.utime(partial, ns=(used_ns, used_ns))  # the file system's own clock is coarser than the order of use
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    segment = _segment(path, json.loads(header), len(first))
    segment.used_ns = used_ns
    return segment


def _write_file(path: Path, pieces: list[memoryview], between: Callable[[], None]) -> None:
    """Nothing of it stays in the page cache, and never more than a few MiB are there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for piece in pieces:
            for at in range(0, len(piece), _WRITE_BYTES):
                part = piece[at : at + _WRITE_BYTES]
                while len(part):
                    part = part[os.write(fd, part) :]
                if len(piece) > _WRITE_BYTES // 4:
                    _sync(fd)
                    between()
        _sync(fd)
    finally:
        os.close(fd)


def _sync(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)
    _forget(fd)


def _forget(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_segment(path: Path) -> Segment:
    """The segment that a file holds, by its header alone. Raises Damaged, or OSError where it cannot be read."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        raw, status = os.pread(fd, _ALIGNMENT, 0), os.fstat(fd)
        if len(raw) < _FIXED.size:
            raise Damaged("it is cut short")
        magic, length, expected = _FIXED.unpack(raw[: _FIXED.size])
        if magic != MAGIC:
            raise Damaged("it is not a file of a prefix cache, or of another version")
        if length > min(_LONGEST_HEADER, status.st_size):
            raise Damaged("its header is cut short")
        if _FIXED.size + length > len(raw):
            raw += os.pread(fd, _FIXED.size + length - len(raw), len(raw))
        header = raw[_FIXED.size : _FIXED.size + length]
        _forget(fd)
    finally:
        os.close(fd)
    if checksum(header) != expected:
        raise Damaged("the checksum of its header is wrong")
    try:
        found = _segment(path, json.loads(header), _FIXED.size + length + -(_FIXED.size + length) % _ALIGNMENT)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Damaged(f"its header makes no sense ({error!r})") from error
    if found.nbytes != status.st_size:
        raise Damaged(f"it should have {found.nbytes} bytes and has {status.st_size}")
    if path != segment_path(path.parent, found.digests()[-1]):
        raise Damaged("its name is not that of its contents")
    found.used_ns = status.st_mtime_ns
    return found


def _segment(path: Path, header: dict[str, Any], offset: int) -> Segment:
    parts = []
    for key, nbytes, expected, meta in header["blocks"]:
        part = Part(bytes.fromhex(key), offset, nbytes, bytes.fromhex(expected), header["meta"][meta])
        parts.append(part)
        offset += nbytes
    start, fingerprint, parent = header["start"], bytes.fromhex(header["fingerprint"]), bytes.fromhex(header["parent"])
    return Segment(path, fingerprint, parent, start, tuple(parts), offset)
