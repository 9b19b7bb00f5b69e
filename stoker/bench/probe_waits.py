"""What reading does to computing and computing to reading: layers with misses, rehearsed.

Both want the same memory, on a virtual machine the host may serve the disk on the cores that compute, and after a wait
threads and caches are cold. A rehearsed layer is what the engine's is: dense products, a burst of reads, the hits, and
each miss alone as it lands. Layers of all kinds take turns, so that drift falls on all alike. Knows no model.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stoker.bench.probe_disk import IDLE_S, Reader, trimmed_mean
from stoker.bench.probe_kernels import DENSE, EXPERT, HIDDEN, SomeDense, SomeExperts, fill, median_s
from stoker.native import kernels
from stoker.native.io import Arena, ReadQueue
from stoker.plan.profile import Waits

READS = (1, 2, 4)
TOKENS = 64  # of a prompt's product: about a millisecond
STREAM_S = 0.25
STREAM_ROUNDS = 2
TOP_K = 8
PRODUCTS = 3  # dense matrices of a layer
WEIGHTS_BYTES = 96 << 20  # each, dense and experts


def measure(
    files: Sequence[Path], threads: int, seconds: float, depth: int, record_bytes: int = EXPERT.record_bytes
) -> Waits:
    """Rehearse layers for so many seconds on weight files, `depth` reads in flight."""
    before = kernels.threads()
    with (
        torch.inference_mode(),
        Arena(WEIGHTS_BYTES) as dense,
        Arena(WEIGHTS_BYTES) as experts,
        Arena(max(READS) * record_bytes) as arena,
        ReadQueue(depth=depth) as queue,
    ):
        fill(dense)
        fill(experts)
        arena.populate()
        try:
            kernels.set_threads(threads)
            reader, some = Reader(queue, arena, files), SomeDense(dense)
            holds = reads_hold(reader, some, record_bytes, min(depth, max(READS)))
            return _Layer(reader, some, SomeExperts(experts), record_bytes).rehearsed(seconds, holds)
        finally:
            kernels.set_threads(before)


def reads_hold(reader: Reader, dense: SomeDense, record_bytes: int, depth: int) -> float:
    """The share of computing with many tokens that is lost while reads follow each other at `depth`: 0 to 1."""
    x, out = torch.randn(TOKENS, HIDDEN), torch.empty(TOKENS, DENSE.rows)
    alone, beside = [], []
    for _ in range(STREAM_ROUNDS):
        alone.append(median_s(lambda: dense.product(x, out), seconds=STREAM_S))
        stream = threading.Thread(target=reader.stream, args=(record_bytes, depth, STREAM_S))
        started, products = time.perf_counter(), 0
        stream.start()
        while stream.is_alive():
            dense.product(x, out)
            products += 1
        beside.append((time.perf_counter() - started) / products)
    return min(1.0, max(0.0, 1 - statistics.mean(alone) / statistics.mean(beside)))


def progress_of(alone_ms: float, beside_ms: float, computing_ms: float) -> float:
    """How fast a burst got on, of its own pace, beside `computing_ms` of arithmetic that began with it: 0 to 1."""
    if computing_ms <= 0:
        return 1.0
    if beside_ms <= computing_ms:
        return min(1.0, alone_ms / beside_ms)
    return min(1.0, max(0.0, 1 - (beside_ms - alone_ms) / computing_ms))


@dataclass
class _Times:
    """ms of one number of reads: bursts alone, bursts beside hits, and the parts of the layer."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    lone: list[float] = field(default_factory=list)
    dense_after: list[float] = field(default_factory=list)


class _Layer:
    def __init__(self, reader: Reader, dense: SomeDense, experts: SomeExperts, record_bytes: int) -> None:
        self.reader, self.dense, self.experts, self.record_bytes = reader, dense, experts, record_bytes
        self.x, self.out = torch.randn(1, HIDDEN), torch.empty(1, DENSE.rows)

    def rehearsed(self, seconds: float, holds: float) -> Waits:
        times = {reads: _Times() for reads in READS}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[READS[-1]].alone) < 5:
            for reads, found in times.items():
                time.sleep(IDLE_S)
                found.alone.append(self.reader.burst(self.record_bytes, reads)[1])
                self._products()
                self._one(reads, found)
        lone_ms, dense_ms = (
            trimmed_mean([ms for found in times.values() for ms in part(found)])
            for part in (lambda t: t.lone, lambda t: t.dense_after)
        )
        return Waits(
            progress=_progress(list(times.values())),
            alone_bytes_s=EXPERT.record_bytes / lone_ms * 1e3,
            dense_bytes_s=PRODUCTS * DENSE.total_bytes / dense_ms * 1e3,
            holds=holds,
        )

    def _one(self, reads: int, found: _Times) -> None:
        started = time.perf_counter()
        tickets = [self.reader.submit(self.record_bytes, place) for place in range(reads)]
        found.hits.append(self._timed(lambda: self.experts.one_token(TOP_K - reads)))
        for ticket in tickets:
            self.reader.queue.wait(ticket)
        found.beside.append((time.perf_counter() - started) * 1e3)
        found.lone.append(self._timed(lambda: self.experts.one_token(1)))
        found.dense_after.append(self._timed(self._products))

    def _products(self) -> None:
        for _ in range(PRODUCTS):
            self.dense.product(self.x, self.out)

    def _timed(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3


def _progress(found: Sequence[_Times]) -> float:
    """Each number of reads counts by how long was computed beside it."""
    computing = [statistics.mean(times.hits) for times in found]
    shares = [
        progress_of(trimmed_mean(times.alone), trimmed_mean(times.beside), ms)
        for times, ms in zip(found, computing, strict=True)
    ]
    return sum(share * ms for share, ms in zip(shares, computing, strict=True)) / sum(computing)
