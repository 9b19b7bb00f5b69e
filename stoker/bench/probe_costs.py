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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPE = "qwen3-30b-a3b-mini"
SHALLOW, DEEP = 4, 20
NEARLY, FEW = 15, 4  # slots, of 16 experts a layer
TOKENS, WARM_UP = 26, 6
WALK_BYTES, WALKED_BYTES = 24 << 20, 192 << 20  # a layer, and where it walks
PAUSE_S = 0.0015  # as long as a read of a record or two
GIB = 1 << 30
CONTEXT = 1024  # for the sequences of all variants


def main() -> None:
    threads = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="stoker-probe-") as directory:
        shallow_store, deep_store = (_store(Path(directory) / str(layers), layers) for layers in (SHALLOW, DEEP))
        between = _Between()
        with _Loaded(shallow_store, threads, True, between) as model:  # the first: a fresh process's load and memory
            shallow, load_s, process_bytes = model.decode(), model.load_s, model.process_bytes
        with _Loaded(deep_store, threads, True, between) as model:
            deep, deep_load_s = model.decode(), model.load_s
            paused = model.decode(pause_s=PAUSE_S)
            nearly, starved = model.decode(slots=NEARLY), model.decode(slots=FEW)
        with _Loaded(shallow_store, threads, False, between) as model:
            shallow_plain, plain_load_s = model.decode(), model.load_s
        with _Loaded(deep_store, threads, False, between) as model:
            deep_plain, load_layers_s = model.decode(), max(deep_load_s - load_s, model.load_s - plain_load_s)
    layers = DEEP - SHALLOW
    layer = max(1e-4, (deep.busy_ms - shallow.busy_ms) / layers)
    plain = max(layer, (deep_plain.busy_ms - shallow_plain.busy_ms) / layers)
    step = max(0.0, shallow.busy_ms - SHALLOW * layer)
    wait = max(0.0, (paused.busy_ms - deep.busy_ms) / DEEP)
    miss = max(0.0, (starved.busy_ms - nearly.busy_ms) / max(1.0, starved.misses - nearly.misses))
    load_layer = max(0.0, load_layers_s / layers)
    keep = max(0.0, (nearly.busy_ms - deep.busy_ms - nearly.misses * miss) / DEEP)
    print(
        json.dumps(
            {
                "step_ms": step, "layer_ms": layer, "plain_layer_ms": plain, "keep_ms": keep, "miss_ms": miss,
                "wait_ms": wait,
                "process_bytes": process_bytes,
                "load_s": max(0.0, load_s - SHALLOW * load_layer), "load_layer_s": load_layer,
            }
        )
    )  # fmt: skip


def _store(path: Path, layers: int) -> Path:
    from stoker.quant.formats import WeightFormat
    from stoker.store.synth import write_store
    from stoker.store.synth_shapes import shape

    write_store(path, shape(SHAPE, layers), WeightFormat("affine", 4, 64), 0)
    return path


class _Found:
    """Of a token: the median of `busy_ms` without waits for reads, the mean of `misses`."""

    def __init__(self, busy_ms: list[float], misses: list[int]) -> None:
        self.busy_ms, self.misses = statistics.median(busy_ms), statistics.mean(misses)


class _Loaded:
    """One model in memory, decoded once for each variant. `load_s`: what loading took; `process_bytes`: held when it
    began."""

    def __init__(self, store: Path, threads: int, fuse: bool, between: "_Between") -> None:
        from stoker.runtime.model import Options, load

        options = Options(memory=2 * GIB, path="hot", threads=threads, ctx_size=CONTEXT, fuse=fuse)
        started = time.perf_counter()
        self.runtime, self.between = load(store, options), between
        self.load_s = time.perf_counter() - started
        self.process_bytes = int(self.runtime.ledger()["process_bytes"])

    def __enter__(self) -> "_Loaded":
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()

    def decode(self, slots: int | None = None, pause_s: float = 0.0) -> _Found:
        """With `slots` slots a layer; None: with all experts in memory."""
        runtime, between = self.runtime, self.between
        if slots is None:
            runtime.residency.warm()
        else:
            _starve(runtime, slots)
        busy, misses, tally = [], [], runtime.residency.tally
        with between.every_acquire_of(runtime.residency, pause_s):
            sequence = runtime.new_sequence()
            runtime.prefill(sequence, [1, 2, 3, 4])
            for index in range(TOKENS):
                stall_ns, missed, started = tally.stall_ns, tally.misses, time.perf_counter_ns()
                spent_ns = between.spent_ns
                runtime.decode([sequence], [(7 * index + 5) % 500])
                if index >= WARM_UP:
                    idle_ns = tally.stall_ns - stall_ns + between.spent_ns - spent_ns
                    busy.append((time.perf_counter_ns() - started - idle_ns) / 1e6)
                    misses.append(tally.misses - missed)
        return _Found(busy, misses)


class _Between:
    """In every acquire: walks through memory as through a layer's weights, and sleeps as in a wait for a read."""

    def __init__(self) -> None:
        self.spent_ns, self._at = 0, 0
        self._arena: Any = None  # not before the first load: it is no part of a fresh process

    @contextmanager
    def every_acquire_of(self, residency: Any, pause_s: float) -> Iterator[None]:
        from stoker.native import kernels
        from stoker.native.io import Arena

        if self._arena is None:
            self._arena = Arena(WALKED_BYTES)
            self._arena.populate()
        acquire = residency.acquire

        def slow(pool: int, experts: Sequence[int]) -> Any:
            started = time.perf_counter_ns()
            kernels.read_once(self._arena.address + self._at, WALK_BYTES)
            self._at = (self._at + WALK_BYTES) % WALKED_BYTES
            if pause_s:
                time.sleep(pause_s)
            self.spent_ns += time.perf_counter_ns() - started
            return acquire(pool, experts)

        residency.acquire = slow
        try:
            yield
        finally:
            residency.acquire = acquire


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
