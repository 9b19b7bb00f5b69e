"""Speed of the quantised kernels beside the memory's read rate, paired in one run.

python benchmarks/kernels.py [--repeats 15] [--threads 1 2] [--output benchmarks/results/kernels.json]

Every repeat times, one after the other: one read of the whole working set, one matvec with each of its matrices; then
the experts of the 30B shape. Ratios are taken inside a repeat, so that a drift of the machine hits both sides.
`cpu_share` is the process's CPU time over wall time and threads: well below 1 means that others held the cores, and
then the wall rates say little.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.bench.provenance import spread, write_result
from stoker.native import kernels
from stoker.native.io import Arena
from stoker.quant.formats import ExpertLayout, MatrixSpec, PlacedMatrix, WeightFormat

A4 = WeightFormat("affine", 4, 64)
MATVEC = MatrixSpec(4096, 2048, A4)
EXPERT = ExpertLayout.plan(MatrixSpec(768, 2048, A4), MatrixSpec(768, 2048, A4), MatrixSpec(2048, 768, A4))
EXPERT_MACS = 3 * 2048 * 768
WORKING_SET_BYTES = 640 << 20  # 20 times the last-level cache
EXPERT_WORK = [(1, 1), (8, 1), (1, 32), (1, 128), (16, 32)]  # experts, tokens of each


def fill(memory: torch.Tensor) -> None:
    """Random codes everywhere; parts that hold scales are overwritten afterwards."""
    chunk = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8))
    for start in range(0, memory.numel(), chunk.numel()):
        part = memory[start : start + chunk.numel()]
        part.copy_(chunk[: part.numel()])


def write_scales(memory: torch.Tensor, placed: PlacedMatrix, base: int) -> None:
    n = placed.spec.scales_bytes
    for offset, value in ((placed.scales, 0.01), (placed.biases, -0.08)):
        memory[base + offset : base + offset + n].view(torch.bfloat16).fill_(value)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


class Matvecs:
    """Distinct matrices that fill the working set, back to back, and the read probe over the same bytes."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.bytes_each = arena, MATVEC.total_bytes
        self.count = WORKING_SET_BYTES // self.bytes_each
        memory = arena.tensor(0, WORKING_SET_BYTES)
        codes, scales = MATVEC.codes_bytes, MATVEC.scales_bytes
        placed = PlacedMatrix(MATVEC, 0, codes, codes + scales)
        self.matrices = []
        for i in range(self.count):
            base = i * self.bytes_each
            write_scales(memory, placed, base)
            ends = (base, base + codes, base + codes + scales, base + codes + 2 * scales)
            parts = [memory[a:b] for a, b in itertools.pairwise(ends)]
            self.matrices.append(kernels.Matrix(MATVEC, *parts))
        self.x, self.out = torch.randn(1, MATVEC.cols), torch.empty(1, MATVEC.rows)

    @property
    def nbytes(self) -> int:
        return self.count * self.bytes_each

    def read(self) -> None:
        kernels.read_once(self.arena.address, self.nbytes)

    def multiply(self) -> None:
        for m in self.matrices:
            kernels.matmul(m, self.x, self.out)


class ExpertCalls:
    """Experts that follow each other through the working set, so that no call finds its weights in a cache."""

    def __init__(self, arena: Arena) -> None:
        self.base, self.count, self.next = arena.address, WORKING_SET_BYTES // EXPERT.record_bytes, 0
        memory = arena.tensor(0, WORKING_SET_BYTES)
        for i in range(self.count):
            for placed in (EXPERT.gate, EXPERT.up, EXPERT.down):
                write_scales(memory, placed, i * EXPERT.record_bytes)
        self.experts = kernels.Experts(EXPERT, "silu")
        self.x = torch.randn(256, 2048)

    def call(self, n_experts: int, tokens: int) -> None:
        ids = [(self.next + i) % self.count for i in range(n_experts)]
        self.next += n_experts
        n_rows = n_experts * tokens
        rows = torch.arange(n_rows, dtype=torch.int32)
        self.experts.forward(
            torch.tensor([self.base + i * EXPERT.record_bytes for i in ids]),
            torch.arange(0, n_rows + 1, tokens, dtype=torch.int32),
            torch.zeros_like(rows) if tokens == 1 else rows % 256,
            rows,
            self.x,
            torch.empty(n_rows, 2048),
        )

    def repeat(self, n_experts: int, tokens: int) -> int:
        """Calls that make one timing some milliseconds long."""
        return max(1, 128 // (n_experts * tokens))


def measure_matvec(arena: Arena, n_threads: int, repeats: int) -> dict[str, Any]:
    work, rates, products, ratios, shares = Matvecs(arena), [], [], [], []
    for _ in range(repeats):
        read_s, _ = timed(work.read)
        product_s, cpu_s = timed(work.multiply)
        rates.append(work.nbytes / read_s / 1e9)
        products.append(work.nbytes / product_s / 1e9)
        ratios.append(read_s / product_s)
        shares.append(cpu_s / product_s / n_threads)
    names = {"read_GBps": rates, "matvec_GBps": products, "matvec_over_read": ratios, "cpu_share": shares}
    return {name: spread(values) for name, values in names.items()}


def measure_experts(arena: Arena, n_threads: int, repeats: int) -> dict[str, Any]:
    work, result = ExpertCalls(arena), {}
    for n_experts, tokens in EXPERT_WORK:
        calls = work.repeat(n_experts, tokens)
        macs = calls * n_experts * tokens * EXPERT_MACS
        rates, per_cpu, shares, times = [], [], [], []
        for _ in range(repeats):
            wall, cpu = timed(lambda e=n_experts, t=tokens, n=calls: [work.call(e, t) for _ in range(n)])
            rates.append(macs / wall / 1e9)
            per_cpu.append(macs / cpu / 1e9)
            shares.append(cpu / wall / n_threads)
            times.append(wall / calls * 1e6)
        names = {"GMACps": rates, "GMACps_per_cpu_second": per_cpu, "cpu_share": shares, "microseconds": times}
        result[f"{n_experts} experts x {tokens} tokens"] = {name: spread(values) for name, values in names.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    options = parser.parse_args()
    arena = Arena(WORKING_SET_BYTES)
    fill(arena.tensor(0, WORKING_SET_BYTES))
    report: dict[str, Any] = {
        "load_average": os.getloadavg(),
        "isa": kernels.isa(),
        "working_set_bytes": WORKING_SET_BYTES,
        "repeats": options.repeats,
        "bars": {"matvec_over_read": {"1": 0.7, "2": 0.9}, "GMACps, 1 expert x 32 tokens, 2 threads": 200},
        "threads": {},
    }
    for n_threads in options.threads:
        kernels.set_threads(n_threads)
        matvec = measure_matvec(arena, n_threads, options.repeats)
        report["threads"][str(n_threads)] = {
            "matvec": matvec,
            "experts": measure_experts(arena, n_threads, options.repeats),
        }
    write_result(options.output, report)
    print(json.dumps(report["threads"], indent=2))


if __name__ == "__main__":
    main()
