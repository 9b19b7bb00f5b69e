"""The door to native reading: an aligned arena, a read queue with two classes, synchronous reads past the page cache.

Turns native failures into stoker's typed errors and documents the contract. Knows bytes and addresses, no store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from stoker.errors import BudgetError, ReadError, StokerError
from stoker.native import _io

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES: int = _io.BLOCK_BYTES
"""Direct reads need offset, length and address at multiples of this."""


@dataclass(frozen=True)
class Pages:
    """What the kernel holds for an arena now; both 0 where the system does not tell (only Linux does)."""

    resident_bytes: int
    huge_bytes: int


class Completion(NamedTuple):
    """Times of one read in ns of `time.monotonic_ns`; 0 for what has not happened. `bytes` that arrived whole."""

    submit_ns: int
    start_ns: int
    end_ns: int
    bytes: int


class Arena:
    """Anonymous memory, 2 MiB aligned, in huge pages where the system grants them, an unreadable page on either side.

    The memory lives until the arena is closed (or collected) and the last tensor from it is gone. Before it is
    unmapped, every read queue of the process lets go of it: pending reads are cancelled, started ones waited for.
    """

    def __init__(self, nbytes: int, huge_pages: bool = True) -> None:
        """nbytes: rounded up to whole blocks of 4096. Raises BudgetError when the system has no room for it."""
        if nbytes <= 0:
            raise StokerError("an arena needs at least one byte", got=nbytes)
        try:
            self._native = _io.Arena(nbytes, huge_pages)
        except (OSError, OverflowError) as error:
            raise _no_memory("memory for the arena could not be mapped", nbytes, error) from error

    @property
    def address(self) -> int:
        return self._native.address

    @property
    def nbytes(self) -> int:
        return self._native.nbytes

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] that shares bytes [offset, offset + nbytes) and keeps the memory alive, also after `close`."""
        return self._native.tensor(offset, nbytes)

    def populate(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Fault the pages of [offset, offset + nbytes) in now, or of all; beside reads as well as before them.

        Raises StokerError outside the arena.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise StokerError("outside the arena", expected=f"0 to {self.nbytes}", got=(offset, offset + nbytes))
        self._native.populate(offset, nbytes)

    def pages(self) -> Pages:
        return Pages(*self._native.pages())

    def close(self) -> None:
        """Give the memory back, or leave it to the last tensor that shares it. Closing again does nothing."""
        self._native.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadQueue:
    """Reads extents of files into memory: demand before prefetch, at most `depth` in flight, nothing partial is done.

    A pending prefetch never starts while a demand read is pending, so it delays one by no more than what was in flight.
    Within a class: earliest deadline first (0, no deadline, is last), then first come. The caller keeps the memory
    alive until the read has ended; an `Arena` sees to that itself. Every method may be called from any thread.
    """

    def __init__(self, depth: int = 8, backend: str = "auto", direct: bool = True) -> None:
        """backend: "io_uring", "threads", or "auto" (io_uring where the kernel allows it; see `.backend`)."""
        try:
            self._native = _io.ReadQueue(depth, backend, direct)
        except OSError as error:
            raise StokerError(
                f"the read queue could not start with backend {backend!r}: {error.strerror or error}",
                remedy='use backend="threads", or "auto"' if backend == "io_uring" else None,
            ) from error
        self.depth: int = self._native.depth
        self.backend: str = self._native.backend
        self.backend_note: str = self._native.backend_note
        """Why "auto" did not take io_uring; empty when it did."""

    def allow(self, depth: int) -> None:
        """From now on at most `depth` reads in flight, 1 to the queue's own; those that have started go on."""
        if not 1 <= depth <= self.depth:
            raise StokerError("reads in flight", expected=f"1 to {self.depth}", got=depth)
        self._native.allow(depth)

    @property
    def direct(self) -> bool:
        """Direct reads were asked for, and no file that was to be read so had to fall back to buffered reads."""
        return self._native.direct

    def open(self, path: str | os.PathLike[str], direct: bool | None = None) -> int:
        """Open a file for `submit`. Raises ReadError.

        direct: overrides the queue's; where the file system refuses it, reads are buffered and `is_direct` says so.
        """
        try:
            return self._native.open(os.fspath(path), direct)
        except OSError as error:
            raise _open_error(path, error) from error

    def is_direct(self, file: int) -> bool:
        return self._native.is_direct(file)

    def submit(
        self,
        file: int,
        offset: int,
        length: int,
        address: int,
        *,
        prefetch: bool = False,
        deadline_ns: int = 0,
        tag: int = 0,
    ) -> int:
        """Queue a read of `length` bytes at `offset` to `address`; returns its ticket.

        deadline_ns: on the clock of `time.monotonic_ns`; a prefetch that has not started by then is dropped (state
        "expired"), a demand read is only ordered by it. tag: the caller's, named in errors. A ticket is freed by `wait`
        or `cancel`; its outcome stays readable until 4096 more were freed. Raises ValueError for an unknown file, an
        empty extent or an unaligned direct read; StokerError when 65536 tickets were never freed.
        """
        try:
            return self._native.submit(file, offset, length, address, prefetch, deadline_ns, tag)
        except RuntimeError as error:
            raise StokerError(str(error)) from error

    def wait(self, ticket: int) -> int:
        """Sleep until the read has ended, free its ticket, return the ns waited (0 when it had ended before).

        Returns too when a prefetch expired: ask `state`. Raises ReadError when the read failed or the file ended early,
        and StokerError when it was cancelled. Ctrl-C interrupts it and leaves the ticket as it was.
        """
        state, waited_ns = self._native.wait(ticket)
        if state == "failed":
            raise self._read_error(ticket)
        if state == "cancelled":
            raise StokerError("a wait for a read that was cancelled", where=f"ticket {ticket}")
        return waited_ns

    def wait_any(self, tickets: Sequence[int]) -> int:
        """Sleep until one of the reads has ended, in whatever state; its index. Frees nothing: `wait` for that one."""
        return self._native.wait_any(tickets)

    def poll(self, ticket: int) -> bool:
        """Whether the read has ended, in whatever state."""
        return self._native.poll(ticket)

    def state(self, ticket: int) -> str:
        """pending, in_flight, done, expired, failed or cancelled."""
        return self._native.state(ticket)

    def promote(self, ticket: int) -> bool:
        """Make a pending prefetch a demand read. False when it had been dropped, and its bytes will not come."""
        return self._native.promote(ticket)

    def cancel(self, ticket: int) -> bool:
        """True when the read had not started: its bytes never land, the ticket is freed. False: wait for it still."""
        return self._native.cancel(ticket)

    def completion(self, ticket: int) -> Completion:
        report = self._native.report(ticket)
        return Completion(*(int(report[field]) for field in Completion._fields))

    def stats(self) -> dict[str, int]:
        """Counts and bytes of completed reads by class; expired, cancelled, failed, promoted, short_results, retries;
        in_flight, in_flight_max, pending, outstanding (tickets not freed); sums queued_ns (submit to start) and
        service_ns (start to end); busy_ns (time with a read in flight)."""
        return self._native.stats()

    def inject(self, nth: int, kind: str, delay_ns: int = 50_000_000) -> None:
        """For tests: fault the nth read to start from now (1 is the next), below the queue.

        kind: "eio", "short" (half the bytes), "eof", "eintr", "eagain" (each once), or "delay" (starts delay_ns late).
        """
        self._native.inject(nth, kind, delay_ns)

    def close(self) -> None:
        """Cancel what is pending, wait for what is in flight, close the files. Outcomes stay readable."""
        self._native.close()

    def __enter__(self) -> ReadQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_error(self, ticket: int) -> ReadError:
        report = self._native.report(ticket)
        return read_error(
            path=str(report["path"]),
            offset=int(report["offset"]),
            length=int(report["length"]),
            got=int(report["bytes"]),
            errno=int(report["errno"]),
            tag=int(report["tag"]),
        )


def read_file_into(path: str | os.PathLike[str], offset: int, length: int, address: int) -> bool:
    """Read [offset, offset + length) to `address` now, at any alignment, leaving nothing of it in the page cache.

    Returns whether direct reads were used; where the file system refuses them, buffered reads are dropped from the
    cache as they go. Raises ReadError.
    """
    try:
        return _io.read_file_into(os.fspath(path), offset, length, address)
    except EOFError as error:
        raise read_error(path=os.fspath(path), offset=offset, length=length, got=int(str(error)), errno=0) from error
    except OSError as error:
        if not Path(path).is_file():
            raise _open_error(path, error) from error
        raise read_error(path=os.fspath(path), offset=offset, length=length, got=0, errno=error.errno or 0) from error


def drop_cache(path: str | os.PathLike[str]) -> None:
    """Write the file back and drop it from the page cache. Raises ReadError; StokerError where the system cannot."""
    try:
        _io.drop_cache(os.fspath(path))
    except OSError as error:
        raise _open_error(path, error) from error


def cached_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the file that the page cache holds, in whole pages. Raises ReadError."""
    try:
        return _io.cached_bytes(os.fspath(path))
    except OSError as error:
        raise _open_error(path, error) from error


def read_error(*, path: str, offset: int, length: int, got: int, errno: int, tag: int | None = None) -> ReadError:
    """The error of one failed read. errno 0: the file ended early."""
    why = f"{os.strerror(errno)} (errno {errno})" if errno else "the file ends inside the read"
    error = ReadError(
        f"a read failed: {why}" + ("" if tag is None else f", tag {tag}"),
        where=path,
        expected=f"{length} bytes at offset {offset}",
        got=f"{got} bytes",
        remedy="check the disk and the system log" if errno else "the file is cut short: fetch or pack it again",
    )
    error.errno, error.path, error.offset, error.length, error.tag = errno, path, offset, length, tag
    return error


def _open_error(path: str | os.PathLike[str], error: OSError) -> ReadError:
    raised = ReadError(f"cannot be read: {error.strerror} (errno {error.errno})", where=os.fspath(path))
    raised.errno, raised.path = error.errno or 0, os.fspath(path)
    return raised


def _no_memory(what: str, nbytes: int, error: Exception) -> BudgetError:
    return BudgetError(
        what,
        expected=f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)",
        got=str(error),
        remedy="give a smaller memory budget, or raise the limit on address space (ulimit -v)",
    )
