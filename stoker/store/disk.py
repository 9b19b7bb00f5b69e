"""The disk as the writers see it: room, files that are whole or absent, and one clear error when it fills up.

Owns system calls and their errors. Knows nothing of what is written.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.errors import DiskSpaceError, StoreError

PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_room(path: Path, nbytes: int) -> None:
    """Raise DiskSpaceError where the disk that will hold `path` has fewer than `nbytes` free."""
    where = path.absolute()
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    if free < nbytes:
        raise DiskSpaceError(
            "the disk has no room for this",
            where=str(path),
            expected=f"{nbytes / 1e9:.2f} GB free",
            got=f"{free / 1e9:.2f} GB free",
            remedy="free some space, choose another disk, or use fewer bits",
        )


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn the operating system's complaints about a file into one clear error."""
    try:
        yield
    except OSError as problem:
        if problem.errno in _FULL:
            raise DiskSpaceError(
                "the disk is full; nothing here counts as whole",
                where=str(where),
                got=problem.strerror,
                remedy="free some space and run the same command again, or remove what was written",
            ) from problem
        raise StoreError("writing failed", where=str(where), got=problem.strerror) from problem


def pwrite(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + (1 << 30)], offset + done)


def sync_data(fd: int) -> None:
    """Wait until the file's bytes are on the device, then let its pages go."""
    getattr(os, "fdatasync", os.fsync)(fd)
    forget(fd, 0, 0)


def forget(fd: int, offset: int, nbytes: int) -> None:
    """Tell the kernel that these bytes will not be read again, where it listens (Linux)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    """Wait until renames in a directory are on the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with disk_errors(path):
        with partial.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.rename(path)
