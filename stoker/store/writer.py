"""Writes a store atomically and resumably: partial files and a journal first, the manifest last.

Owns the order that makes a crash harmless. A file is written as NAME.partial; what is certainly on disk is appended to
the journal after a sync; a whole file is renamed; the manifest comes when everything else is in place. Run again
after any interruption, it continues and the result is the same bytes. Knows nothing of checkpoints or arithmetic.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stoker.errors import StoreError
from stoker.ids import ExpertKey
from stoker.store import manifest as manifest_file
from stoker.store.disk import PARTIAL, disk_errors, pwrite, replace_file, require_room, sync_data, sync_directory
from stoker.store.files import FilePlan, dense_parts, lay_out, part_name, record_name
from stoker.store.manifest import FileEntry, Manifest

JOURNAL = "pack.journal"
SYNC_BYTES = 256 << 20
QUEUED_WRITES = 2  # buffers waiting for the disk; bounds memory

Buffer = Any  # anything with the buffer protocol: bytes, memoryview, numpy arrays
Chunk = Mapping[str, Buffer]  # part name -> the next bytes of that part


@dataclass
class _OpenFile:
    plan: FilePlan
    fd: int
    missing: int  # tensors not yet written


class StoreWriter:
    """Writes what `plan` names into `path`. `identity` says what is being packed; a resume needs the same.

    Raises StoreError where the directory holds something else, DiskSpaceError where there is no room.
    """

    def __init__(
        self, path: Path, plan: Manifest, identity: Mapping[str, Any], *, shard_bytes: int | None = None
    ) -> None:
        self.path, self.plan = path, plan
        self.files = lay_out(plan.pools, plan.dense, *([] if shard_bytes is None else [shard_bytes]))
        self._file_of = {tensor: i for i, file in enumerate(self.files) for tensor in file.spans}
        self._dense = {entry.name: entry for entry in plan.dense}
        self._open: dict[int, _OpenFile] = {}
        self._done: dict[str, list[str]] = {}  # item -> checksums, all of them on disk or written in this run
        self._unsynced: dict[str, list[str]] = {}
        self._unsynced_bytes = 0
        self._worker = ThreadPoolExecutor(1, "store-writer")
        self._queue: list[Future[None]] = []
        path.mkdir(parents=True, exist_ok=True)
        self._journal = _open_journal(path, self.files, identity)
        self._load_journal()
        self._count_missing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def has(self, item: str) -> bool:
        """Whether a record (`record_name`) or a dense tensor (its name) needs no writing any more."""
        return item in self._done

    def item_bytes(self, item: str) -> int:
        """Bytes of a record or of all parts of a dense tensor."""
        tensors = self._tensors(item)
        return sum(self.files[self._file_of[tensor]].spans[tensor][1] for tensor in tensors)

    def check_room(self) -> None:
        """Raise DiskSpaceError when the disk cannot hold what is still to be written."""
        require_room(self.path, bytes_needed(self.path, self.files))

    def write_record(self, key: ExpertKey, record: Buffer) -> None:
        """Queue one whole record. Errors of earlier writes surface here or in `finish`."""
        name = record_name(key)
        self._submit(name, lambda: self._write(name, {"": name}, [{"": record}]))

    def write_dense(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write one dense tensor from consecutive chunks; parts advance independently. Waits for queued writes."""
        self._drain(0)
        parts = {part: part_name(name, part) for part in dense_parts(self._dense[name])}
        self._write(name, parts, chunks)

    def finish(self, side_files: Mapping[str, bytes], notes: Mapping[str, list[str]] | None = None) -> Manifest:
        """Rename everything into place, the manifest last. Returns the manifest with its checksums."""
        self._drain(0)
        self._sync()
        for name, content in side_files.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            replace_file(self.path / name, content)
        manifest = self._manifest(side_files, notes)
        replace_file(self.path / manifest_file.NAME, manifest.dumps().encode())
        (self.path / JOURNAL).unlink()
        sync_directory(self.path)
        return manifest

    def close(self) -> None:
        """Stop writing. What was synced stays for a resume; without `finish` the directory is no store."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        for file in self._open.values():
            os.close(file.fd)
        self._open.clear()
        self._journal.close()

    def _submit(self, name: str, job: Any) -> None:
        self._drain(QUEUED_WRITES - 1)
        self._queue.append(self._worker.submit(job))

    def _drain(self, leave: int) -> None:
        while len(self._queue) > leave:
            self._queue.pop(0).result()

    def _write(self, item: str, tensors: Mapping[str, str], chunks: Iterable[Chunk]) -> None:
        file = self._file(self._file_of[next(iter(tensors.values()))])
        cursors = {part: file.plan.spans[tensor][0] for part, tensor in tensors.items()}
        sums = dict.fromkeys(tensors, 0)
        with disk_errors(self.path / file.plan.name):
            for chunk in chunks:
                for part, data in chunk.items():
                    view = memoryview(data).cast("B")
                    sums[part] = zlib.crc32(view, sums[part])
                    pwrite(file.fd, view, cursors[part])
                    cursors[part] += len(view)
                    self._unsynced_bytes += len(view)
        for part, tensor in tensors.items():
            assert cursors[part] == sum(file.plan.spans[tensor]), (tensor, cursors[part], file.plan.spans[tensor])
        self._unsynced[item] = [f"{value:08x}" for value in sums.values()]
        file.missing -= len(tensors)
        if self._unsynced_bytes >= SYNC_BYTES or file.missing == 0:
            self._sync()

    def _file(self, index: int) -> _OpenFile:
        if index not in self._open:
            plan = self.files[index]
            partial = self.path / (plan.name + PARTIAL)
            with disk_errors(partial):
                fd = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
                pwrite(fd, memoryview(plan.header), 0)
            missing = sum(1 for tensor in plan.spans if tensor in self._missing)
            self._open[index] = _OpenFile(plan, fd, missing)
        return self._open[index]

    def _sync(self) -> None:
        """Data first, then the journal that vouches for it; then whole files get their names."""
        with disk_errors(self.path):
            for file in self._open.values():
                sync_data(file.fd)
            for item, sums in self._unsynced.items():
                self._journal.write(json.dumps([item, sums]) + "\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self._done.update(self._unsynced)
        self._unsynced.clear()
        self._unsynced_bytes = 0
        for index in [i for i, file in self._open.items() if file.missing == 0]:
            file = self._open.pop(index)
            assert os.fstat(file.fd).st_size == file.plan.nbytes, file.plan.name
            os.close(file.fd)
            os.rename(self.path / (file.plan.name + PARTIAL), self.path / file.plan.name)
            sync_directory(self.path)

    def _load_journal(self) -> None:
        """Take over what an earlier run vouches for; what lies in partial files is read back and checked."""
        self._journal.seek(0)
        for line in self._journal.read().splitlines()[1:]:
            try:
                item, sums = json.loads(line)
            except ValueError:
                continue  # empty, or being written when a run was killed
            if self._still_there(item, sums):
                self._done[item] = sums
        self._journal.seek(0, os.SEEK_END)
        self._journal.write("\n")  # ends a torn line; empty lines are skipped

    def _still_there(self, item: str, sums: list[str]) -> bool:
        tensors = self._tensors(item)
        plan = self.files[self._file_of[tensors[0]]]
        if (self.path / plan.name).exists():
            return True
        partial = self.path / (plan.name + PARTIAL)
        if not partial.exists():
            return False
        with partial.open("rb") as handle:
            found = [_checksum(handle.fileno(), *plan.spans[tensor]) for tensor in tensors]
        return found == sums

    def _tensors(self, item: str) -> list[str]:
        if item in self._dense:
            return [part_name(item, part) for part in dense_parts(self._dense[item])]
        return [item]

    def _count_missing(self) -> None:
        done = {tensor for item in self._done for tensor in self._tensors(item)}
        self._missing = {tensor for file in self.files for tensor in file.spans if tensor not in done}
        for index, file in enumerate(self.files):  # killed between the last journal line and the rename
            if not (self.path / file.name).exists() and not any(tensor in self._missing for tensor in file.spans):
                self._file(index)
        self._sync()

    def _manifest(self, side_files: Mapping[str, bytes], notes: Mapping[str, list[str]] | None) -> Manifest:
        pools = []
        for pool in self.plan.pools:
            sums = tuple(self._done[record_name(ExpertKey(pool.id, e))][0] for e in range(pool.experts))
            pools.append(replace(pool, checksums=sums))
        dense = []
        for entry in self.plan.dense:
            by_part = dict(zip(dense_parts(entry), self._done[entry.name], strict=True))
            dense.append(replace(entry, checksums=by_part))
        return replace(
            self.plan,
            pools=tuple(pools),
            dense=tuple(dense),
            files={file.name: FileEntry(file.nbytes, f"{zlib.crc32(file.header):08x}") for file in self.files},
            side_files={name: f"{zlib.crc32(content):08x}" for name, content in side_files.items()},
            notes=dict(notes or {}),
        )


def finished_store(path: Path, plan: Manifest) -> Manifest | None:
    """The manifest of a store that an earlier run of the same plan has finished: nothing is left to do then."""
    if not (path / manifest_file.NAME).exists():
        return None
    found = manifest_file.read_manifest(path)
    if (found.source, found.quantisation) != (plan.source, plan.quantisation):
        return None
    (path / JOURNAL).unlink(missing_ok=True)  # killed between the manifest and this
    return found


def bytes_needed(path: Path, files: Iterable[FilePlan]) -> int:
    """What `files` still need on the disk, beside what an earlier run left at `path`."""
    needed = 64 << 20  # side files, the journal, the file system's own
    for file in files:
        present = [p for p in (path / file.name, path / (file.name + PARTIAL)) if p.exists()]
        needed += file.nbytes - min(file.nbytes, sum(p.stat().st_blocks * 512 for p in present))
    return needed


def _open_journal(path: Path, files: Iterable[FilePlan], identity: Mapping[str, Any]) -> Any:
    """Lock the journal, or start one. Refuses directories that hold anything that this run would not write."""
    line = json.dumps(identity, sort_keys=True)
    if (path / manifest_file.NAME).exists():
        raise StoreError(
            "there is a store here already", where=str(path), remedy="choose another directory, or remove it"
        )
    journal = path / JOURNAL
    if not journal.exists():
        strangers = sorted(p.name for p in path.iterdir())
        if strangers:
            raise StoreError("the directory is not empty", where=str(path), got=", ".join(strangers[:5]))
    handle = journal.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        handle.close()
        raise StoreError("another process is packing into this directory", where=str(path)) from problem
    handle.seek(0)
    first = handle.readline()
    if not first.endswith("\n"):  # new, or killed while the very first line was written
        handle.truncate(0)
        handle.write(line + "\n")
        handle.flush()
    elif first.rstrip("\n") != line:
        handle.close()
        raise StoreError(
            "the directory holds an unfinished pack of something else",
            where=str(path),
            expected=_difference(line, first),
            remedy="remove the directory, or repeat the source and the options that were used",
        )
    return handle


def _difference(wanted: str, found: str) -> str:
    ours, theirs = json.loads(wanted), json.loads(found)
    keys = [key for key in ours if ours[key] != theirs.get(key)]
    return ", ".join(f"{key} = {theirs.get(key)!r} (now {ours[key]!r})" for key in keys)


def _checksum(fd: int, offset: int, length: int) -> str:
    value, end = 0, offset + length
    while offset < end:
        piece = os.pread(fd, min(end - offset, 8 << 20), offset)
        if not piece:
            return "short"
        value = zlib.crc32(piece, value)
        offset += len(piece)
    return f"{value:08x}"
