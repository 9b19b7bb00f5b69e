"""Runs a command in a memory cgroup whose limit counts the page cache, from cold, and says what it took. Needs root.

Version 1 and 2 of the memory controller. Caches are dropped first: pages that others have cached are not charged to the
group. Owns groups that it makes and removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import StokerError

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """A memory cgroup: `limit_bytes` None stands for no limit (the peak is still counted)."""

    path: Path
    v1: bool

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        return int((self.path / name).read_text())

    def join(self) -> None:
        """Move the calling process in; called in the child between fork and exec."""
        die_with_parent()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))


def die_with_parent() -> None:
    """Called in a child between fork and exec: it gets SIGTERM when the process that started it is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[Group]:
    """A fresh cgroup with a memory limit. Raises StokerError where the machine does not let us make one."""
    v1 = (V1 / "memory.limit_in_bytes").exists()
    _sweep(V1 if v1 else V2)
    path = (V1 if v1 else V2) / f"stoker-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
        if limit_bytes is not None:
            (path / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        raise StokerError(
            "cannot make a memory cgroup", where=str(path), got=error.strerror, remedy="run as root"
        ) from error
    try:
        yield Group(path, v1)
    finally:
        for _ in range(50):
            try:
                path.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _sweep(root: Path) -> None:
    """Remove groups whose maker was killed before it could."""
    for path in root.glob("stoker-*-*"):
        maker = path.name.split("-")[1]
        if maker.isdecimal() and not Path("/proc", maker).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def drop_caches() -> None:
    """Write back and forget the page cache of the whole machine."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def device_read_bytes(device: str | None = None) -> int:
    """Bytes read so far from block devices (whole disks), by /proc/diskstats."""
    total = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if Path("/sys/block", fields[2]).exists() and (device is None or fields[2] == device):
            total += int(fields[5]) * 512
    return total


@contextlib.contextmanager
def read_ahead(kib: int | None, device: str) -> Iterator[None]:
    """Set a disk's read-ahead for the time of the block; None leaves it."""
    knob = Path("/sys/block") / device / "queue/read_ahead_kb"
    before = knob.read_text()
    if kib is not None:
        knob.write_text(str(kib))
    try:
        yield
    finally:
        knob.write_text(before)


def run_confined(
    command: list[str], limit_bytes: int | None, *, cold: bool = True, timeout_s: float = 900
) -> dict[str, Any]:
    """Run a worker that prints one JSON object on its last line; adds `cgroup_peak_bytes`, `device_bytes`, `wall_s`."""
    if cold:
        drop_caches()
    with memory_group(limit_bytes) as group:
        before, started = device_read_bytes(), time.monotonic()
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=group.join,
            check=False,
        )
        wall = time.monotonic() - started
        if child.returncode:
            raise StokerError(
                "the worker failed", where=" ".join(command), got=f"exit {child.returncode}: {child.stderr[-2000:]}"
            )
        result: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
        return result | {
            "cgroup_peak_bytes": group.peak_bytes(),
            "device_bytes": device_read_bytes() - before,
            "wall_s": wall,
        }
