"""The device's own rate for reads of a store's records: the yardstick beside every figure that reads."""

from __future__ import annotations

import random
import time
from pathlib import Path

from stoker.native.io import Arena, ReadQueue
from stoker.store.reader import open_store


def device_rate(store: str | Path, seconds: float = 3.0, depth: int = 8) -> float:
    """Bytes per second of direct record-sized reads of the store's own records, in random order, `depth` at a time."""
    opened = open_store(store)
    generator = random.Random(time.monotonic_ns())
    queue, size = ReadQueue(depth=depth), max(pool.layout.record_bytes for pool in opened.pools)
    arena, files = Arena(depth * size), {}
    total, started = 0, time.perf_counter()
    waiting: list[tuple[int, int, int]] = []  # ticket, slot, bytes
    free = list(range(depth))
    while time.perf_counter() - started < seconds or waiting:
        while free and time.perf_counter() - started < seconds:
            pool = generator.choice(opened.pools)
            extent = opened.record(pool.id, generator.randrange(pool.experts))
            if extent.file not in files:
                files[extent.file] = queue.open(extent.file)
            slot = free.pop()
            address = arena.address + slot * size
            ticket = queue.submit(files[extent.file], extent.offset, extent.length, address)
            waiting.append((ticket, slot, extent.length))
        ticket, slot, length = waiting.pop(0)
        queue.wait(ticket)
        free.append(slot)
        total += length
    elapsed = time.perf_counter() - started
    queue.close()
    arena.close()
    return total / elapsed


def block_device(path: str | Path) -> str | None:
    """The disk (such as `vda`) that holds a file, None where the system does not say."""
    number = Path(path).stat().st_dev
    entry = Path("/sys/dev/block") / f"{number >> 8 & 0xFFF}:{number & 0xFF}"
    if not entry.exists():
        return None
    place = entry.resolve()
    return place.parent.name if (place / "partition").exists() else place.name


def read_ahead_kib(path: str | Path) -> int | None:
    """The read-ahead of the disk that holds a file: what page faults bring along."""
    device = block_device(path)
    knob = Path("/sys/block") / (device or "-") / "queue/read_ahead_kb"
    return int(knob.read_text()) if knob.exists() else None
