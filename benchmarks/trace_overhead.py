"""What a trace costs: decode steps with the recorder on and off, in turn, in one process.

    python benchmarks/trace_overhead.py NAME=STORE ... [--memory SIZE] [--pairs 40] [--block 24] [--output FILE]

Every expert is in memory (the worst case: nothing to wait for hides the recorder), unless NAME ends in "-streamed":
then the store runs at half of its experts, with reads and evictions to record. Steps with and without alternate, so
that a machine that drifts within a second is fair to both; --block of each make a pair (whole blocks count: rows are
packed every few steps and saved every few seconds), and the overhead is the median pair's. The tenth of the steps that
was disturbed least tells what a step pays that packs nothing (`fastest_tenth`). The bar is 2%.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.bench.provenance import spread, write_result
from stoker.runtime.budget import parse_bytes
from stoker.runtime.model import Options, Runtime, load
from stoker.runtime.skeleton import moe_blocks
from stoker.trace.writer import TraceWriter

BAR = 0.02
PROMPT = [1, 2, 3, 4, 5]
Block = tuple[list[float], float]
RESULT = Path(__file__).parent / "results" / "trace_overhead.json"


def record_to(runtime: Runtime, recorder: TraceWriter | None) -> None:
    """Everything that records in a loaded runtime records there from now on; None: nothing is recorded."""
    runtime.recorder = recorder
    runtime.residency._reads.recorder = recorder
    for block in moe_blocks(runtime.model):
        block.experts.streamed.recorder = recorder


def measure(store: Path, memory: str, pairs: int, block: int, streamed: bool, scratch: Path) -> dict[str, Any]:
    """Overheads of `pairs` pairs of `block` steps each; the times of all steps; what was recorded."""
    tokens = 2 * (pairs + 1) * block
    options = Options(memory=memory, ctx_size=len(PROMPT) + tokens + 64, path="hot" if streamed else "auto")
    generator = random.Random(0)
    with load(store, options) as runtime, TraceWriter(scratch / "trace") as writer:
        if not streamed:
            runtime.residency.warm()
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, PROMPT)

        def block_ms(recorders: Sequence[TraceWriter | None]) -> list[Block]:
            """For each recorder `block` steps, in turn and in an order that alternates: (ms of each, ms of the
            processor that all took)."""
            times: list[list[float]] = [[] for _ in recorders]
            spent = [0.0] * len(recorders)
            for index in range(block):
                for place in range(len(recorders))[:: 1 if index % 2 else -1]:
                    record_to(runtime, recorders[place])
                    token = generator.randrange(runtime.vocab_size)
                    started, busy = time.perf_counter(), time.process_time()
                    runtime.decode([sequence], [token])
                    spent[place] += (time.process_time() - busy) * 1e3
                    times[place].append((time.perf_counter() - started) * 1e3)
            return list(zip(times, spent, strict=True))

        block_ms([writer, writer])
        before = runtime.stats()["misses"]
        on, off = (list(blocks) for blocks in zip(*(block_ms([writer, None]) for _ in range(pairs)), strict=True))
        missed = runtime.stats()["misses"] - before
        record_to(runtime, writer)
        if missed and not streamed:
            raise SystemExit(
                f"{store}: {missed} experts were not in memory at {memory}: these would be times of the disk"
            )
    clock = [sum(a) / sum(b) - 1 for (a, _), (b, _) in zip(on, off, strict=True)]
    processor = [a / b - 1 for (_, a), (_, b) in zip(on, off, strict=True)]
    return {
        "store": store.name,
        "memory": memory,
        "streamed": streamed,
        "misses": missed,
        "overhead": statistics.median(clock),
        "overhead_95": interval(clock),
        "processor_overhead": statistics.median(processor),
        "processor_overhead_95": interval(processor),
        "fastest_tenth": fastest(on) / fastest(off) - 1,
        "within_bar": statistics.median(clock) < BAR,
        "load_average": os.getloadavg()[0],
        "off_ms": spread([time for times, _ in off for time in times]),
        "on_ms": spread([time for times, _ in on for time in times]),
        "pairs": pairs,
        "steps_a_block": block,
    }


def fastest(blocks: list[Block]) -> float:
    """ms that a tenth of all steps stayed below."""
    times = sorted(time for times, _ in blocks for time in times)
    return times[len(times) // 10]


def interval(samples: list[float], draws: int = 2000) -> tuple[float, float]:
    """95% of the medians of resampled pairs."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(samples, k=len(samples))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def told(found: dict[str, Any], name: str) -> str:
    low, high = found[f"{name}_95"]
    return f"{found[name]:+.2%} ({low:+.2%} to {high:+.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+", metavar="NAME=STORE")
    parser.add_argument(
        "--memory", default="8GiB", help="enough for every expert; streamed cases take --streamed-memory"
    )
    parser.add_argument("--streamed-memory", default="2GiB")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--block", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    parse_bytes(options.memory)
    cases: dict[str, Any] = {}
    for text in options.stores:
        name, _, store = text.partition("=")
        streamed = name.endswith("-streamed")
        memory = options.streamed_memory if streamed else options.memory
        with tempfile.TemporaryDirectory(prefix="stoker-trace-") as scratch:
            cases[name] = measure(Path(store), memory, options.pairs, options.block, streamed, Path(scratch))
        found = cases[name]
        print(
            f"{name}: {told(found, 'overhead')}, of the processor's time {told(found, 'processor_overhead')}, "
            f"fastest tenth {found['fastest_tenth']:+.2%}, "
            f"{found['off_ms']['median']:.2f} ms a step without"
        )
    write_result(options.output, {"bar": BAR, "cases": cases})


if __name__ == "__main__":
    main()
