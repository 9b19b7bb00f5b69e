"""What a decode step costs before any real arithmetic: 48 layers of next to no weights, everything resident.

python benchmarks/step_overhead.py [--steps 100] [--layers 48] [--threads N] [--output FILE]

Writes a store of that form to a temporary directory, warms every expert, and times single decode steps of one
sequence, fused and as transformers' own modules. The smallest step says what the code costs, the median what the
machine made of it.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from stoker.bench.provenance import spread, write_result
from stoker.quant.formats import WeightFormat
from stoker.runtime.model import Options, Runtime, load
from stoker.store.synth import write_store
from stoker.store.synth_shapes import shape

SHAPE = "qwen3-30b-a3b-mini"  # hidden 128, 16 experts of 64, 4 of them a token
FORMAT = WeightFormat("affine", 4, 64, "bf16")
BAR_MS = 8.0
PROMPT = [1, 2, 3, 4, 5]


def step_times(runtime: Runtime, steps: int) -> list[float]:
    """Milliseconds of each decode step of one sequence, after at most 20 steps that are not counted."""
    sequence = runtime.new_sequence()
    runtime.prefill(sequence, PROMPT)
    for token in range(min(steps, 20)):
        runtime.decode([sequence], [token])
    times = []
    for token in range(steps):
        started = time.perf_counter()
        runtime.decode([sequence], [token])
        times.append((time.perf_counter() - started) * 1e3)
    sequence.close()
    return times


def measure(store: Path, steps: int, threads: int | None, fuse: bool) -> dict[str, Any]:
    options = Options(memory="2GiB", ctx_size=len(PROMPT) + steps + 64, threads=threads, fuse=fuse)
    with load(store, options) as runtime:
        runtime.residency.warm()
        before = runtime.stats()["misses"]
        times = step_times(runtime, steps)
        if runtime.stats()["misses"] != before:
            raise SystemExit("an expert was not resident: these would be times of the disk")
    return {"step_ms": spread(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "step_overhead.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-step-") as scratch:
        store = Path(scratch) / "store"
        write_store(store, shape(SHAPE, options.layers), FORMAT, seed=0)
        report: dict[str, Any] = {
            "load_average": os.getloadavg(),
            "layers": options.layers,
            "steps": options.steps,
            "bar_ms": BAR_MS,
            "fused": measure(store, options.steps, options.threads, fuse=True),
            "transformers": measure(store, options.steps, options.threads, fuse=False),
        }
    write_result(options.output, report)
    print(json.dumps({name: report[name] for name in ("fused", "transformers")}, indent=2))


if __name__ == "__main__":
    main()
