"""Measures the disk at record size through the read queue: io_uring or threads, direct or buffered-cold, by depth.

    python benchmarks/disk.py --dir /path/on/the/disk [--out benchmarks/results/disk.json]

Writes a scratch file under --dir and deletes it. Every round runs each configuration once, in random order, each
reading its own random records; compare inside one run only, because shared disks fluctuate. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from stoker.bench.provenance import write_result
from stoker.native.io import Arena, ReadQueue, cached_bytes, drop_cache

RECORD_BYTES = (1_769_472, 2_654_208)  # one expert, affine-4 group 64: 3 x 2048 x 512 and 3 x 2048 x 768
DEPTHS = (1, 2, 4, 8, 16)
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Setting:
    backend: str
    direct: bool
    record_bytes: int
    depth: int


@dataclass(frozen=True)
class Sample:
    bytes_per_s: float
    cpu_s_per_gb: float  # of the whole process: submission, I/O threads, kernel time on its behalf
    service_p50_ms: float
    service_p95_ms: float


def write_scratch(path: Path, nbytes: int) -> float:
    """Random bytes, synced; returns bytes per second."""
    rng = np.random.default_rng(0)
    before = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(0, nbytes, CHUNK_BYTES):
            file.write(rng.bytes(CHUNK_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return nbytes / (time.perf_counter() - before)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(path: Path, arena: Arena, setting: Setting, sample_bytes: int, rng: random.Random) -> Sample:
    """Keeps 2 x depth reads submitted, so that the queue's own depth is what limits the device."""
    size = setting.record_bytes
    records = rng.sample(range(path.stat().st_size // size), max(2 * setting.depth, sample_bytes // size))
    slots = 2 * setting.depth
    drop_cache(path)
    assert cached_bytes(path) == 0, "the scratch file must be cold"
    with ReadQueue(setting.depth, setting.backend, setting.direct) as queue:
        file = queue.open(path)
        assert queue.direct == setting.direct, "the file system refuses direct reads"
        window: list[int] = []
        service_ms: list[float] = []
        cpu, before = cpu_seconds(), time.perf_counter()

        def collect() -> None:
            ticket = window.pop(0)
            queue.wait(ticket)
            times = queue.completion(ticket)
            service_ms.append((times.end_ns - times.start_ns) / 1e6)

        for i, record in enumerate(records):
            if len(window) == slots:
                collect()
            window.append(queue.submit(file, record * size, size, arena.address + i % slots * size))
        while window:
            collect()
        seconds, cpu = time.perf_counter() - before, cpu_seconds() - cpu
    nbytes = len(records) * size
    cuts = statistics.quantiles(service_ms, n=20)
    return Sample(nbytes / seconds, cpu / (nbytes / 1e9), statistics.median(service_ms), cuts[18])


def run(path: Path, sample_bytes: int, rounds: int) -> list[dict[str, object]]:
    settings = [
        Setting(backend, direct, record_bytes, depth)
        for record_bytes in RECORD_BYTES
        for direct in (True, False)
        for backend in ("io_uring", "threads")
        for depth in DEPTHS
    ]
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
    with Arena(2 * max(DEPTHS) * max(RECORD_BYTES)) as arena:
        arena.populate()
        for round_index in range(rounds):
            rng = random.Random(round_index)
            for setting in rng.sample(settings, len(settings)):
                samples[setting].append(measure(path, arena, setting, sample_bytes, rng))
    return [summary(setting, samples[setting]) for setting in settings]


def summary(setting: Setting, samples: list[Sample]) -> dict[str, object]:
    rates = sorted(sample.bytes_per_s for sample in samples)
    return {
        **asdict(setting),
        "gb_per_s": round(statistics.median(rates) / 1e9, 3),
        "gb_per_s_min": round(rates[0] / 1e9, 3),
        "gb_per_s_max": round(rates[-1] / 1e9, 3),
        "cpu_s_per_gb": round(statistics.median(s.cpu_s_per_gb for s in samples), 4),
        "service_p50_ms": round(statistics.median(s.service_p50_ms for s in samples), 3),
        "service_p95_ms": round(statistics.median(s.service_p95_ms for s in samples), 3),
    }


def file_system(folder: Path) -> str:
    asked = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def table(rows: list[dict[str, object]]) -> str:
    heads = ("record", "reads", "backend", "depth", "GB/s", "min", "max", "cpu s/GB", "p50 ms", "p95 ms")
    lines = ["{:>9} {:>8} {:>8} {:>5} {:>6} {:>6} {:>6} {:>8} {:>7} {:>7}".format(*heads)]
    for row in rows:
        lines.append(
            f"{row['record_bytes']:>9} {'direct' if row['direct'] else 'buffered':>8} {row['backend']:>8} "
            f"{row['depth']:>5} {row['gb_per_s']:>6} {row['gb_per_s_min']:>6} {row['gb_per_s_max']:>6} "
            f"{row['cpu_s_per_gb']:>8} {row['service_p50_ms']:>7} {row['service_p95_ms']:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--file-mib", type=int, default=2048, help="size of the scratch file")
    parser.add_argument("--sample-mib", type=int, default=128, help="read by each configuration in each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    began = time.perf_counter()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="stoker-disk-", dir=args.dir) as folder:
        path = Path(folder) / "records.bin"
        write_rate = write_scratch(path, args.file_mib << 20)
        rows = run(path, args.sample_mib << 20, args.rounds)
    result = {
        "what": "random record-sized reads of a cold file through the read queue",
        "file_system": file_system(args.dir),
        "load_average_before": load,
        "file_bytes": args.file_mib << 20,
        "sample_bytes": args.sample_mib << 20,
        "rounds": args.rounds,
        "write_gb_per_s": round(write_rate / 1e9, 3),
        "seconds": round(time.perf_counter() - began, 1),
        "results": rows,
    }
    print(table(rows))
    print(f"{result['seconds']} s in all")
    if args.out is not None:
        write_result(args.out, result)


if __name__ == "__main__":
    main()
