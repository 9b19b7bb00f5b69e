"""What a step costs beside arithmetic and reads: run as a process, prints the Costs as JSON.

A model of the right form and hardly any size is decoded: with all experts resident, with transformers' own attention,
with slots for nearly all and for few of them. The difference of two depths is the cost of a layer, the rest that of a
step; what the runs with few slots take longer is the cost of keeping and of misses. In each layer as much memory is
walked through as the weights of a large model's layer are: what it pushes out of the caches is part of the cost.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHAPE = "qwen3-30b-a3b-mini"
SHALLOW, DEEP = 4, 20
NEARLY, FEW = 15, 4  # slots, of 16 experts a layer
TOKENS, WARM_UP = 26, 6
WALK_BYTES, WALKED_BYTES = 24 << 20, 192 << 20  # a layer, and where it walks
PAUSE_S = 0.0015  # as long as a read of a record or two
GIB = 1 << 30


def main() -> None:
    threads = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="stoker-probe-") as directory:
        stores = {layers: _store(Path(directory) / str(layers), layers) for layers in (SHALLOW, DEEP)}
        runs = {key: _run(stores[layers], threads, fuse) for key, layers, fuse in _RUNS}
        paused = _run(stores[DEEP], threads, True, pause_s=PAUSE_S)
        nearly, starved = (_run(stores[DEEP], threads, True, slots=slots) for slots in (NEARLY, FEW))
    between = DEEP - SHALLOW
    layer = max(1e-4, (runs["deep"].busy_ms - runs["shallow"].busy_ms) / between)
    plain = max(layer, (runs["deep plain"].busy_ms - runs["shallow plain"].busy_ms) / between)
    step = max(0.0, runs["shallow"].busy_ms - SHALLOW * layer)
    wait = max(0.0, (paused.busy_ms - runs["deep"].busy_ms) / DEEP)
    miss = max(0.0, (starved.busy_ms - nearly.busy_ms) / max(1.0, starved.misses - nearly.misses))
    load_layer = max(0.0, (runs["deep"].load_s - runs["shallow"].load_s) / between)
    keep = max(0.0, (nearly.busy_ms - runs["deep"].busy_ms - nearly.misses * miss) / DEEP)
    print(
        json.dumps(
            {
                "step_ms": step, "layer_ms": layer, "plain_layer_ms": plain, "keep_ms": keep, "miss_ms": miss,
                "wait_ms": wait,
                "process_bytes": runs["shallow"].process_bytes,
                "load_s": max(0.0, runs["shallow"].load_s - SHALLOW * load_layer), "load_layer_s": load_layer,
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
    """Medians a token: `busy_ms` without waits for reads, `misses`; `process_bytes`: held when loading began, which
    took `load_s`."""

    def __init__(self, busy_ms: list[float], misses: list[int], process_bytes: int, load_s: float) -> None:
        self.busy_ms, self.misses = statistics.median(busy_ms), statistics.mean(misses)
        self.process_bytes, self.load_s = process_bytes, load_s


def _run(store: Path, threads: int, fuse: bool, slots: int | None = None, pause_s: float = 0.0) -> _Found:
    from stoker.runtime.model import Options, load

    options = Options(memory=2 * GIB, path="hot", threads=threads, ctx_size=256, fuse=fuse)
    started = time.perf_counter()
    with load(store, options) as runtime:
        load_s = time.perf_counter() - started
        if slots is not None:
            _starve(runtime, slots)
        else:
            runtime.residency.warm()
        between = _Between(runtime, pause_s)
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, [1, 2, 3, 4])
        busy, misses, tally = [], [], runtime.residency.tally
        for index in range(TOKENS):
            stall_ns, missed, started = tally.stall_ns, tally.misses, time.perf_counter_ns()
            spent_ns = between.spent_ns
            runtime.decode([sequence], [(7 * index + 5) % 500])
            if index >= WARM_UP:
                idle_ns = tally.stall_ns - stall_ns + between.spent_ns - spent_ns
                busy.append((time.perf_counter_ns() - started - idle_ns) / 1e6)
                misses.append(tally.misses - missed)
        return _Found(busy, misses, int(runtime.ledger()["process_bytes"]), load_s)


class _Between:
    """In every acquire: walks through memory as through a layer's weights, and sleeps as in a wait for a read."""

    def __init__(self, runtime: Any, pause_s: float) -> None:
        from stoker.native import kernels
        from stoker.native.io import Arena

        self.spent_ns, self._at = 0, 0
        self.arena = Arena(WALKED_BYTES)
        self.arena.populate()
        residency, acquire = runtime.residency, runtime.residency.acquire

        def slow(pool: int, experts: Sequence[int]) -> Any:
            started = time.perf_counter_ns()
            kernels.read_once(self.arena.address + self._at, WALK_BYTES)
            self._at = (self._at + WALK_BYTES) % WALKED_BYTES
            if pause_s:
                time.sleep(pause_s)
            self.spent_ns += time.perf_counter_ns() - started
            return acquire(pool, experts)

        residency.acquire = slow


def _starve(runtime: Any, slots: int) -> None:
    """Put a residency with few slots where the full one was."""
    from stoker.residency import Residency
    from stoker.runtime.skeleton import moe_blocks

    full = runtime.residency
    few = Residency(runtime.store, runtime.queue, path="hot", slots=slots, ring_records=4)
    for block in moe_blocks(runtime.model):
        block.experts.streamed.residency = few
    runtime.residency = few
    full.close()


if __name__ == "__main__":
    main()
