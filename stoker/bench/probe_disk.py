"""The disk as the engine meets it: bursts of record-sized direct reads from idle, and reads without a pause.

Reads random places of weight files that are there; without any it writes a scratch file and removes it again. Rounds
are interleaved, so that drift of a shared disk falls on every size and depth alike.
"""

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import DiskSpaceError, StokerError
from stoker.native.io import Arena, ReadQueue, drop_cache
from stoker.plan.profile import Burst, Sustained
from stoker.runtime.depth import DEPTHS as CHOICES
from stoker.runtime.depth import GOOD_ENOUGH

RECORD_BYTES = (256 << 10, 1 << 20, 2_654_208, 8 << 20)  # 2.65 MB: an expert of 3 x 2048 x 768 at 4 bits
BUFFERED_BYTES = RECORD_BYTES[2]
BURSTS = (1, 2, 4, 8)
DEPTHS = (1, 3, 4, 8)
QUEUE_DEPTH = 8  # at most
SCRATCH_BYTES = 512 << 20
WEIGHTS_BYTES = 256 << 20  # a file this large is worth reading
SUFFIXES = (".safetensors", ".gguf")
IDLE_S = 0.001  # between bursts: the engine computes meanwhile
ALIGNMENT = 4096


@dataclass(frozen=True)
class Disk:
    """What was found; `backend` and `direct` as the read queue chose, `depth` as the engine would."""

    bursts: tuple[Burst, ...]
    sustained: tuple[Sustained, ...]
    buffered_bytes_s: float
    depth: int
    backend: str
    direct: bool


def measure(files: Sequence[Path], seconds: float, sizes: Sequence[int] = RECORD_BYTES) -> Disk:
    """Two thirds of the time for bursts, the rest for sustained and buffered reads, of records of `sizes` bytes.

    Bursts go through a queue of the depth that the engine would choose: what it keeps waiting is part of their time.
    """
    with Arena(QUEUE_DEPTH * max(*sizes, BUFFERED_BYTES)) as arena:
        arena.populate()
        with ReadQueue(depth=QUEUE_DEPTH) as queue:
            reader = Reader(queue, arena, files)
            sustained = _sustained(reader, seconds * 0.3, sizes)
            backend, direct = queue.backend, queue.direct
        depth = engines_depth(sustained)
        with ReadQueue(depth=depth) as queue:
            bursts = _bursts(Reader(queue, arena, files), seconds * 0.6, sizes)
        for path in files:
            drop_cache(path)
        with ReadQueue(depth=QUEUE_DEPTH, direct=False) as queue:
            buffered = Reader(queue, arena, files).stream(BUFFERED_BYTES, QUEUE_DEPTH, seconds * 0.1)[0]
        return Disk(bursts, sustained, buffered, depth, backend, direct)


@contextmanager
def weight_files(directory: Path) -> Iterator[list[Path]]:
    """Weight files under a directory (two levels), or a scratch file."""
    found = [
        path
        for pattern in ("*", "*/*")
        for path in sorted(directory.glob(pattern))
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size >= WEIGHTS_BYTES
    ]
    if found:
        yield found[:16]
        return
    free = shutil.disk_usage(directory).free
    if free < 2 * SCRATCH_BYTES:
        raise DiskSpaceError(
            "no room for the file that the disk is measured with",
            where=str(directory),
            expected=f"{2 * SCRATCH_BYTES} bytes free",
            got=f"{free} bytes",
            remedy="make room, or name a directory with a store",
        )
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".stoker-probe-") as file:
            block = random.Random(1).randbytes(8 << 20)
            for _ in range(SCRATCH_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            drop_cache(file.name)
            yield [Path(file.name)]
    except OSError as error:
        raise StokerError(
            "cannot write a file to measure the disk with", where=str(directory), got=error.strerror,
            remedy="name a directory that can be written, or one with a store",
        ) from error  # fmt: skip


class Reader:
    """Random aligned places of the files, weighted by size, through one queue into one arena."""

    def __init__(self, queue: ReadQueue, arena: Arena, files: Sequence[Path]) -> None:
        self.queue, self.arena = queue, arena
        self.files = [(queue.open(path), path.stat().st_size) for path in files]
        self.weights = [size for _, size in self.files]
        self.random = random.Random(time.monotonic_ns())

    def submit(self, record_bytes: int, place: int) -> int:
        ((file, size),) = self.random.choices(self.files, self.weights)
        offset = self.random.randrange((size - record_bytes) // ALIGNMENT) * ALIGNMENT
        return self.queue.submit(file, offset, record_bytes, self.arena.address + place * record_bytes)

    def burst(self, record_bytes: int, reads: int) -> tuple[float, float]:
        """ms from asking until the first record and until the last is there, as the caller's thread sees it."""
        started = time.perf_counter()
        tickets = [self.submit(record_bytes, place) for place in range(reads)]
        self.queue.wait_any(tickets)
        first = time.perf_counter()
        for ticket in tickets:
            self.queue.wait(ticket)
        return (first - started) * 1e3, (time.perf_counter() - started) * 1e3

    def stream(self, record_bytes: int, depth: int, seconds: float) -> tuple[float, list[float]]:
        """bytes a second at a depth, and the ms that each read took."""
        started = time.perf_counter()
        places = list(range(depth))
        waiting: list[tuple[int, int]] = []
        times, done = [], 0
        while (going := time.perf_counter() - started < seconds) or waiting:
            while going and places:
                place = places.pop()
                waiting.append((self.submit(record_bytes, place), place))
            ticket, place = waiting.pop(0)
            self.queue.wait(ticket)
            report = self.queue.completion(ticket)
            times.append((report.end_ns - report.start_ns) / 1e6)
            places.append(place)
            done += record_bytes
        return done / (time.perf_counter() - started), times


def _bursts(reader: Reader, seconds: float, sizes: Sequence[int]) -> tuple[Burst, ...]:
    setups = [(size, reads) for size in sizes for reads in BURSTS]
    timed: dict[tuple[int, int], list[tuple[float, float]]] = {setup: [] for setup in setups}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(timed[setups[0]]) < 3:
        for setup in setups:
            time.sleep(IDLE_S)
            timed[setup].append(reader.burst(*setup))
    return tuple(_burst(setup, found) for setup, found in timed.items())


def _burst(setup: tuple[int, int], found: list[tuple[float, float]]) -> Burst:
    firsts, lasts = [first for first, _ in found], sorted(last for _, last in found)
    low, _, high = statistics.quantiles(lasts, n=4)
    last = trimmed_mean(lasts)
    return Burst(*setup, min(last, trimmed_mean(firsts)), last, min(low, last), max(high, last), len(found))


def trimmed_mean(times: Sequence[float]) -> float:
    """Mean without the slowest fiftieth: a token waits for dozens of reads, and so for their mean, not their median."""
    ordered = sorted(times)
    return statistics.mean(ordered[: max(1, len(ordered) - len(ordered) // 50)])


def _sustained(reader: Reader, seconds: float, sizes: Sequence[int]) -> tuple[Sustained, ...]:
    setups = [(size, depth) for size in sizes for depth in DEPTHS]
    rounds = 3
    share = seconds / len(setups) / rounds
    rates: dict[tuple[int, int], list[float]] = {setup: [] for setup in setups}
    times: dict[tuple[int, int], list[float]] = {setup: [] for setup in setups}
    for _ in range(rounds):
        for setup in setups:
            rate, each = reader.stream(*setup, share)
            rates[setup].append(rate)
            times[setup] += each
    return tuple(Sustained(*setup, statistics.median(rates[setup]), *_percentiles(times[setup])) for setup in setups)


def engines_depth(sustained: Sequence[Sustained]) -> int:
    """The least depth that nearly reaches the best rate of the records nearest to an expert's size, as at a load."""
    nearest = min((one.record_bytes for one in sustained), key=lambda size: abs(size - BUFFERED_BYTES))
    rates = {one.depth: one.bytes_s for one in sustained if one.record_bytes == nearest and one.depth >= min(CHOICES)}
    return next(depth for depth in sorted(rates) if rates[depth] >= GOOD_ENOUGH * max(rates.values()))


def _percentiles(times_ms: list[float]) -> tuple[float, float]:
    ordered = sorted(times_ms)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
