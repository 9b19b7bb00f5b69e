"""How fast a directory's disk gives records: random direct reads of the size of an expert, at several depths.

In a store, its own records are read. Elsewhere a file is written first, and removed again.
"""

import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from stoker.cli.checks import Check
from stoker.errors import StokerError
from stoker.ids import Extent
from stoker.native.io import Arena, ReadQueue, drop_cache
from stoker.runtime.budget import format_bytes

# An expert of a 35B-class model (3 x 2048 x 512) in affine-4 group 64.
RECORD_BYTES = 1_769_472
PROBE_BYTES = 256 << 20
DEPTHS = (1, 2, 4, 8)
SECONDS_PER_DEPTH = 0.8
SLOW_BYTES_S = 500e6


def check_disk(directory: Path, seed: int = 0) -> list[Check]:
    """One Check with bytes per second at each depth; FAIL when the directory cannot be read as records must be."""
    if (directory / "stoker.json").is_file():
        try:
            return [_probe(_store_records(directory), f"records of the store {directory}", seed, directory)]
        except StokerError as error:
            return [Check("disk", "FAIL", f"{directory}: {error.render()}", error.remedy or "", {})]
    free = shutil.disk_usage(directory).free
    if free < 2 * PROBE_BYTES:
        finding = (
            f"{directory}: not measured, {format_bytes(free)} free and the test file takes {format_bytes(PROBE_BYTES)}"
        )
        return [Check("disk", "WARN", finding, "make room, or name a directory on another disk", {"free_bytes": free})]
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".stoker-doctor-") as file:
            extents = _written_records(file.fileno(), Path(file.name), seed)
            return [_probe(extents, f"{directory}, {format_bytes(free)} free", seed, directory)]
    except (StokerError, OSError) as error:
        return [Check("disk", "FAIL", f"{directory}: {error}", "name a directory that can be written, or a store", {})]


def _store_records(directory: Path) -> list[Extent]:
    from stoker.store.reader import open_store

    store = open_store(directory)
    return [store.record(pool.id, expert) for pool in store.pools for expert in range(pool.experts)]


def _written_records(descriptor: int, path: Path, seed: int) -> list[Extent]:
    """Fill the file with bytes that do not compress, written through to the disk and out of the page cache."""
    block = random.Random(seed).randbytes(16 << 20)
    for _ in range(PROBE_BYTES // len(block)):
        os.write(descriptor, block)
    os.fsync(descriptor)
    drop_cache(path)
    return [Extent(str(path), at * RECORD_BYTES, RECORD_BYTES) for at in range(PROBE_BYTES // RECORD_BYTES)]


def _probe(extents: list[Extent], place: str, seed: int, directory: Path) -> Check:
    rates, direct, backend = {}, True, ""
    for depth in DEPTHS:
        with ReadQueue(depth=depth) as queue:
            rates[depth] = _bytes_per_second(queue, extents, depth, random.Random(seed + depth))
            direct, backend = direct and queue.direct, queue.backend
    best = max(rates, key=lambda depth: rates[depth])
    size = max(extent.length for extent in extents)
    told = ", ".join(f"{rate / 1e9:.2f} at {depth}" for depth, rate in rates.items())
    finding = f"{place}: random reads of {format_bytes(size)}, GB/s by depth: {told} ({backend})"
    data = {
        "directory": str(directory), "record_bytes": size, "direct": direct, "backend": backend,
        "bytes_per_second": rates, "best_depth": best,
    }  # fmt: skip
    if not direct:
        remedy = "the file system refuses direct reads: they pass through the page cache; a local ext4 or xfs does not"
        return Check("disk", "WARN", finding + "; not direct", remedy, data)
    if rates[best] < SLOW_BYTES_S:
        remedy = "experts come slowly from here: an NVMe drive gives 1 to 7 GB/s; or raise --memory so that more stay"
        return Check("disk", "WARN", finding, remedy, data)
    return Check("disk", "PASS", finding, data=data)


def _bytes_per_second(queue: ReadQueue, extents: list[Extent], depth: int, rng: random.Random) -> float:
    """Keep `depth` reads in flight for a while; each buffer is one record long."""
    slot_bytes = -(-max(extent.length for extent in extents) // 4096) * 4096
    files: dict[str, int] = {}
    done_bytes = 0

    def start(slot: int) -> tuple[int, int, int]:
        extent = rng.choice(extents)
        if extent.file not in files:
            files[extent.file] = queue.open(extent.file)
        address = arena.address + slot * slot_bytes
        return queue.submit(files[extent.file], extent.offset, extent.length, address), slot, extent.length

    with Arena(depth * slot_bytes) as arena:
        arena.populate()
        began = time.perf_counter()
        flying = [start(slot) for slot in range(depth)]
        while flying:
            ticket, slot, length = flying.pop(queue.wait_any([ticket for ticket, _, _ in flying]))
            queue.wait(ticket)
            done_bytes += length
            if time.perf_counter() - began < SECONDS_PER_DEPTH:
                flying.append(start(slot))
        return done_bytes / (time.perf_counter() - began)
