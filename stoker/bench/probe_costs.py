"""What a step costs beside arithmetic and reads: run as a process, prints the Costs as JSON.

A model of the right form and hardly any size is decoded: with all experts resident, with transformers' own attention,
and with too few slots. The difference of two depths is the cost of a layer, the rest that of a step.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

SHAPE = "qwen3-30b-a3b-mini"
SHALLOW, DEEP = 4, 20
TOKENS, WARM_UP = 60, 6
GIB = 1 << 30


def main() -> None:
    threads = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="stoker-probe-") as directory:
        stores = {layers: _store(Path(directory) / str(layers), layers) for layers in (SHALLOW, DEEP)}
        runs = {key: _run(stores[layers], threads, fuse) for key, layers, fuse in _RUNS}
        starved = _run(stores[DEEP], threads, True, slots=4)
    between = DEEP - SHALLOW
    layer = max(1e-4, (runs["deep"].busy_ms - runs["shallow"].busy_ms) / between)
    plain = max(layer, (runs["deep plain"].busy_ms - runs["shallow plain"].busy_ms) / between)
    step = max(0.0, runs["shallow"].busy_ms - SHALLOW * layer)
    miss = max(0.0, (starved.busy_ms - runs["deep"].busy_ms) / max(1.0, starved.misses))
    print(
        json.dumps(
            {
                "step_ms": step, "layer_ms": layer, "plain_layer_ms": plain, "miss_ms": miss,
                "process_bytes": runs["shallow"].process_bytes,
            }
        )
    )  # fmt: skip


_RUNS = (
    ("shallow", SHALLOW, True),
    ("deep", DEEP, True),
    ("shallow plain", SHALLOW, False),
    ("deep plain", DEEP, False),
)


def _store(path: Path, layers: int) -> Path:
    from stoker.quant.formats import WeightFormat
    from stoker.store.synth import write_store
    from stoker.store.synth_shapes import shape

    write_store(path, shape(SHAPE, layers), WeightFormat("affine", 4, 64), 0)
    return path


class _Found:
    """Medians a token: `busy_ms` without waits for reads, `misses`; `process_bytes`: held when loading began."""

    def __init__(self, busy_ms: list[float], misses: list[int], process_bytes: int) -> None:
        self.busy_ms, self.misses = statistics.median(busy_ms), statistics.mean(misses)
        self.process_bytes = process_bytes


def _run(store: Path, threads: int, fuse: bool, slots: int | None = None) -> _Found:
    from stoker.runtime.model import Options, load

    options = Options(memory=2 * GIB, path="hot", threads=threads, ctx_size=256, fuse=fuse)
    with load(store, options) as runtime:
        if slots is not None:
            _starve(runtime, slots)
        else:
            runtime.residency.warm()
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, [1, 2, 3, 4])
        busy, misses, tally = [], [], runtime.residency.tally
        for index in range(TOKENS):
            stall_ns, missed, started = tally.stall_ns, tally.misses, time.perf_counter_ns()
            runtime.decode([sequence], [(7 * index + 5) % 500])
            if index >= WARM_UP:
                busy.append((time.perf_counter_ns() - started - (tally.stall_ns - stall_ns)) / 1e6)
                misses.append(tally.misses - missed)
        return _Found(busy, misses, int(runtime.ledger()["process_bytes"]))


def _starve(runtime: object, slots: int) -> None:
    """Put a residency with few slots where the full one was."""
    from stoker.residency import Residency
    from stoker.runtime.skeleton import moe_blocks

    full = runtime.residency  # type: ignore[attr-defined]
    few = Residency(runtime.store, runtime.queue, path="hot", slots=slots, ring_records=4)  # type: ignore[attr-defined]
    for block in moe_blocks(runtime.model):  # type: ignore[attr-defined]
        block.experts.streamed.residency = few
    runtime.residency = few  # type: ignore[attr-defined]
    full.close()


if __name__ == "__main__":
    main()
