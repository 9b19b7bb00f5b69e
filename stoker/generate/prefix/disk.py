"""The directory of a prefix cache: which files it holds, how much they may take, and the thread that writes them.

One process has a directory; the models that it serves share it. Every method may be called from any thread. Knows files
by their headers; what they mean to a tree is the caller's. Nothing that goes wrong here ends a request.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import OptionError
from stoker.generate.prefix.segments import (
    PARTIAL,
    SUFFIX,
    Damaged,
    Draft,
    Segment,
    read_segment,
    write_segment,
)

log = logging.getLogger("stoker.prefix")
LOCK = "lock"
LOW_PRIORITY = 10  # nice value of the writing thread
MOST_BLOCKS = 1 << 15  # each is known in memory by about a KiB
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Counts:
    """Since the directory was opened, over all models."""

    written_bytes: int = 0
    writes: int = 0
    discarded: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Order:
    """One segment to write; `done(segment or None)` is called on the writing thread."""

    draft: Draft
    done: Callable[[Segment | None], None]


class Directory:
    """Segments on disk, at most `size_bytes` and MOST_BLOCKS blocks in all, least recently used first to go."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Raises OptionError where the directory cannot be used, or another process uses it."""
        self.path, self.size_bytes = path, size_bytes
        self.counts = Counts()
        self.users = 0
        self._lock_fd = _lock(path)
        self._guard = threading.Condition()
        self._segments: OrderedDict[Path, Segment] = OrderedDict()  # least recently used first
        self._holds: dict[bytes, Segment] = {}  # by the digest of a block
        self._total_bytes = self._blocks = 0
        self._orders: deque[Order] = deque()
        self._busy = self._hurried = self._closed = False
        self._model: bytes | None = None  # whose segment is being written
        self._writing = True  # until the disk is full
        self._scan()
        self._thread = threading.Thread(target=self._run, name="stoker-prefix-writer", daemon=True)
        self._thread.start()

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def segments(self, fingerprint: bytes) -> list[Segment]:
        """Those of one model, parents before children."""
        with self._guard:
            found = [segment for segment in self._segments.values() if segment.fingerprint == fingerprint]
        return sorted(found, key=lambda segment: segment.start)

    def everything(self) -> list[Segment]:
        with self._guard:
            return list(self._segments.values())

    def write(self, draft: Draft, done: Callable[[Segment | None], None]) -> bool:
        """Queue a segment. False where it will not be written: it is too large, or the disk is full."""
        with self._guard:
            if self._closed or not self._writing or draft.file_bytes > largest_file_bytes(self.size_bytes):
                return False
            self._orders.append(Order(draft, done))
            self._guard.notify_all()
        return True

    def touch(self, segments: list[Segment]) -> None:
        """Used just now, the last of them most recently; restarts remember it by the files' times."""
        now = time.time_ns()
        for place, segment in enumerate(segments):
            with self._guard:
                if segment.gone or segment.path not in self._segments:
                    continue
                self._segments.move_to_end(segment.path)
                segment.used_ns = now + place
            try:
                os.utime(segment.path, ns=(now + place, now + place))
            except OSError:
                self.discard(segment, "it is no longer there")

    def discard(self, segment: Segment, why: str | None) -> None:
        """Remove a file. `why`: what is wrong with it, told in the log; None where nothing is."""
        with self._guard:
            if segment.gone:
                return
            if self._segments.get(segment.path) is segment:
                self._remove(segment)
                _unlink(segment.path)
            if why is not None:
                self.counts.discarded += 1
                log.warning("prefix cache: %s is discarded: %s", segment.path, why)

    def settle(self, timeout_s: float | None = None, orders: int = 0) -> bool:
        """Wait until at most `orders` are left to write; the writer hurries meanwhile. Whether it got there."""
        with self._guard:
            self._hurried = True
            self._guard.notify_all()
            there = self._guard.wait_for(lambda: len(self._orders) + self._busy <= orders, timeout_s)
            self._hurried = False
            return there

    def abandon(self, fingerprint: bytes) -> None:
        """Write nothing more of one model: the memory that its orders point to is about to go."""
        with self._guard:
            dropped = [order for order in self._orders if order.draft.fingerprint == fingerprint]
            self._orders = deque(order for order in self._orders if order.draft.fingerprint != fingerprint)
            self._guard.notify_all()
            self._guard.wait_for(lambda: self._model != fingerprint)
        for order in dropped:
            order.done(None)

    @property
    def pending(self) -> int:
        with self._guard:
            return len(self._orders) + self._busy

    def close(self) -> None:
        """Write what is queued (ten seconds at most) and let the directory go. Idempotent."""
        if self._closed:
            return
        self.settle(10.0)
        with self._guard:
            self._closed, left = True, list(self._orders)
            self._orders.clear()
            self._guard.notify_all()
        self._thread.join()
        for order in left:
            order.done(None)
        os.close(self._lock_fd)

    # ---- at the start ----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Read every header; remove what a killed process left half-written, and what is damaged."""
        found = []
        for file in self.path.iterdir():
            if file.suffix == PARTIAL:
                _unlink(file)
            elif file.suffix == SUFFIX:
                try:
                    found.append(read_segment(file))
                except (Damaged, OSError) as problem:
                    self.counts.discarded += 1
                    log.warning("prefix cache: %s is discarded: %s", file, problem)
                    _unlink(file)
        for segment in sorted(found, key=lambda one: one.start):
            self._add(segment)
        for segment in sorted(found, key=lambda one: one.used_ns):
            self._segments.move_to_end(segment.path)
        self._shrink(0)

    def _add(self, segment: Segment) -> None:
        self._segments[segment.path] = segment
        self._holds.update(dict.fromkeys(segment.digests(), segment))
        segment.above = self._holds.get(segment.parent)
        if segment.above is not None:
            segment.above.below += 1
        self._total_bytes += segment.nbytes
        self._blocks += len(segment.parts)

    def _remove(self, segment: Segment) -> None:
        segment.gone = True
        del self._segments[segment.path]
        for digest in segment.digests():
            if self._holds.get(digest) is segment:
                del self._holds[digest]
        if segment.above is not None:
            segment.above.below -= 1
        self._total_bytes -= segment.nbytes
        self._blocks -= len(segment.parts)

    # ---- the writing thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere threads have no nice value of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        while True:
            with self._guard:
                self._guard.wait_for(lambda: self._orders or self._closed)
                if not self._orders:
                    return
                order = self._orders.popleft()
                self._busy, self._model = True, order.draft.fingerprint
            segment = None
            try:
                segment = self._write(order.draft) if self._writing else None
            except Exception:  # whoever waits for the writer must not wait for ever
                self._writing = False
                log.exception("prefix cache: %s: nothing more is written until the next start", self.path)
            order.done(segment)
            with self._guard:
                self._busy, self._model = False, None
                self._guard.notify_all()

    def _write(self, draft: Draft) -> Segment | None:
        above = self._above(draft)
        if above is None or not self._shrink(draft.file_bytes, above):
            return None  # without what comes before it, it would be of no use
        pace = _Pace(lambda: self._hurried)
        try:
            segment = write_segment(self.path, draft, pace.rest)
        except OSError as problem:
            self._writing = problem.errno not in _FULL and not isinstance(problem, FileNotFoundError)
            what = "a block was not written" if self._writing else "nothing more is written until the next start"
            log.warning("prefix cache: %s: %s; %s", self.path, problem.strerror, what)
            return None
        with self._guard:
            replaced = self._segments.get(segment.path)
            if replaced is not None:
                self._remove(replaced)
            self._add(segment)
            self.counts.writes += 1
            self.counts.written_bytes += segment.nbytes
        self._shrink(0)
        return segment

    def _above(self, draft: Draft) -> set[Segment] | None:
        """The segments that a new one would go on from; None where they are not all there."""
        found: set[Segment] = set()
        with self._guard:
            if draft.parent == draft.fingerprint:
                return found
            segment = self._holds.get(draft.parent)
            while segment is not None and not segment.gone:
                found.add(segment)
                if segment.parent == segment.fingerprint:
                    return found
                segment = segment.above
        return None

    def _shrink(self, room: int, spared: Set[Segment] = frozenset()) -> bool:
        """Remove the least recently used that no other goes on from, until `room` bytes more fit; whether they do."""
        while True:
            with self._guard:
                fits = self._total_bytes + room <= self.size_bytes and self._blocks <= MOST_BLOCKS
                oldest = next((one for one in self._segments.values() if not one.below and one not in spared), None)
                if fits or oldest is None:
                    return fits
                self.counts.evictions += 1
                self.discard(oldest, None)


def largest_file_bytes(size_bytes: int) -> int:
    """What one file may have in a directory of that size: a second one must have room beside it."""
    return size_bytes // 2


def _unlink(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as problem:
        log.warning("prefix cache: %s cannot be removed: %s", file, problem.strerror)


class _Pace:
    """Half the time for others: after each piece, a rest as long as the piece took."""

    def __init__(self, hurried: Callable[[], bool]) -> None:
        self._hurried, self._since = hurried, time.monotonic()

    def rest(self) -> None:
        if not self._hurried():
            time.sleep(min(0.25, time.monotonic() - self._since))
        self._since = time.monotonic()


def _lock(path: Path) -> int:
    """Take the directory for this process, for as long as it lives. Raises OptionError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:
        raise OptionError(
            "the directory of the prefix cache cannot be used",
            where=f"--prefix-cache {path}",
            expected="a directory that this user may write to, or a place where one can be made",
            got="something that is not a directory" if isinstance(problem, FileExistsError) else problem.strerror,
            remedy="name another directory, or leave --prefix-cache away: prefixes are then kept in memory alone",
        ) from problem
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise OptionError(
            "another process uses this prefix cache",
            where=f"--prefix-cache {path}",
            got=f"process {owner}" if owner else problem.strerror,
            remedy="give each server its own directory, or stop the other one",
        ) from problem
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def remove_all(path: Path) -> int:
    """Remove every file of a cache that no process uses; how many there were. Raises OptionError."""
    fd = _lock(path)
    try:
        files = [file for file in path.iterdir() if file.suffix in (SUFFIX, PARTIAL)]
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)
    finally:
        os.close(fd)


_open: dict[Path, Directory] = {}
_open_guard = threading.Lock()


def borrow(path: Path, size_bytes: int) -> Directory:
    """The directory, shared by all models of this process. Raises OptionError. Give it back with `give_back`."""
    with _open_guard:
        key = path.resolve()
        if key not in _open:
            _open[key] = Directory(key, size_bytes)
        found = _open[key]
        found.users += 1
        return found


def give_back(directory: Directory) -> None:
    """The last of its users closes it."""
    with _open_guard:
        directory.users -= 1
        if directory.users == 0:
            _open.pop(directory.path, None)
            directory.close()
