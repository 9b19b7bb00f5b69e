"""Measures a machine for the forecast in at most half a minute: disk, memory, kernels, fixed costs (`stoker probe`).

Owns the order and the time limits; the parts are beside it (probe_disk, probe_kernels, probe_...).
What comes out is a plan.profile.Profile. Knows no model.
"""

import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from stoker.bench import probe_costs, probe_disk, probe_kernels, probe_memory, probe_waits
from stoker.plan.profile import Profile, machine_key

DISK_SECONDS = 4.5
WAITS_SECONDS = 2.0


def measure(directory: Path, threads: int, progress: Callable[[str], None] = lambda what: None) -> Profile:
    """Measure this machine and the disk under `directory` with `threads` threads.

    Weight files under `directory` are read, or a scratch file is written there and removed. Raises StokerError where
    nothing can be measured.
    """
    started = time.perf_counter()
    progress("memory")
    first_use = probe_memory.measure(threads)
    progress("fixed costs of a step")
    costs = probe_costs.measure(threads)
    progress("kernels")
    kernels = probe_kernels.measure(threads)
    progress(f"disk under {directory}")
    with probe_disk.weight_files(directory) as files:
        disk = probe_disk.measure(files, DISK_SECONDS)
        waits = probe_waits.measure(files, threads, WAITS_SECONDS, disk.depth)
    return Profile(
        machine=machine_key(directory, threads),
        threads=threads,
        memory_bytes=int(psutil.virtual_memory().total),
        directory=str(directory.resolve()),
        backend=disk.backend,
        direct=disk.direct,
        bursts=disk.bursts,
        sustained=disk.sustained,
        buffered_bytes_s=disk.buffered_bytes_s,
        depth=disk.depth,
        kernels=kernels,
        waits=waits,
        first_use=first_use,
        costs=costs,
        measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 2),
    )


def again(before: Profile, directory: Path, record_bytes: int, seconds: float = 2.0) -> Profile:
    """The profile with what drifts measured again, at one record size: the disk, memory and kernels.

    Fixed costs and the first use of memory stay as they were. For judging a forecast by the machine of the moment.
    """
    with probe_disk.weight_files(directory) as files:
        disk = probe_disk.measure(files, seconds / 2, (record_bytes,))
        waits = probe_waits.measure(files, before.threads, seconds / 2, disk.depth, record_bytes)
    kernels = probe_kernels.measure(before.threads)
    return replace(before, bursts=disk.bursts, sustained=disk.sustained, depth=disk.depth, kernels=kernels, waits=waits)
