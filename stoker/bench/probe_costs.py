"""What a step costs beside arithmetic and reads, and what a process and the start of a model take.

A model of the right form and hardly any size is decoded: with all experts resident, with transformers' own attention,
with slots for nearly all and for few of them. The difference of two depths is the cost of a layer, the rest that of a
step; what the runs with few slots take longer is the cost of keeping and of misses. In each layer as much memory is
walked through as the weights of a large model's layer are: what it pushes out of the caches is part of the cost. All
variants take turns token by token, so that a machine that drifts is fair to each.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stoker.native import kernels
from stoker.native.io import Arena
from stoker.plan.profile import Costs
from stoker.quant.formats import WeightFormat
from stoker.residency import Residency
from stoker.runtime.model import Options, load
from stoker.runtime.skeleton import moe_blocks
from stoker.store.synth import write_store
from stoker.store.synth_shapes import shape

SHAPE = "qwen3-30b-a3b-mini"
SHALLOW, DEEP = 4, 20
NEARLY, FEW = 15, 4  # slots, of 16 experts a layer
TOKENS, WARM_UP = 17, 4
WALK_BYTES, WALKED_BYTES = 24 << 20, 192 << 20  # a layer, and where it walks
PAUSE_S = 0.0015  # as long as a read of a record or two
GIB = 1 << 30
CONTEXT = 1024  # for the sequences of all variants


def measure(threads: int) -> Costs:
    """In this process, which has loaded no model yet: what it holds when the first one is loaded is `process_bytes`."""
    with tempfile.TemporaryDirectory(prefix="stoker-probe-") as directory, ExitStack() as stack:
        stores = [_store(Path(directory) / str(layers), layers) for layers in (SHALLOW, DEEP)]
        # The first load is that of a fresh process: its memory and its imports count, not only its layers.
        shallow_model, deep_model, *plain_models = (
            stack.enter_context(_Loaded(store, threads, fuse)) for fuse in (True, False) for store in stores
        )
        deep = _Variant(deep_model)
        variants = [_Variant(shallow_model), deep, *map(_Variant, plain_models), _Variant(deep_model, pause_s=PAUSE_S)]
        variants += [_Variant(deep_model, slots=slots) for slots in (NEARLY, FEW)]
        walk = _Walk()
        for _ in range(TOKENS):
            for variant in variants:
                variant.token(walk)
        shallow, deep_ms, shallow_plain, deep_plain, paused, nearly, starved = (one.busy_ms() for one in variants)
        nearly_missed, starved_missed = (one.misses() for one in variants[-2:])
        loads_s = [model.load_s for model in (shallow_model, deep_model, *plain_models)]
        process_bytes = shallow_model.process_bytes
        for variant in variants:
            variant.close()
    layers = DEEP - SHALLOW
    layer = max(1e-4, (deep_ms - shallow) / layers)
    miss = max(0.0, (starved - nearly) / max(1.0, starved_missed - nearly_missed))
    load_layer = max(0.0, loads_s[1] - loads_s[0], loads_s[3] - loads_s[2]) / layers
    return Costs(
        step_ms=max(0.0, shallow - SHALLOW * layer),
        layer_ms=layer,
        plain_layer_ms=max(layer, (deep_plain - shallow_plain) / layers),
        keep_ms=max(0.0, (nearly - deep_ms - nearly_missed * miss) / DEEP),
        miss_ms=miss,
        wait_ms=max(0.0, (paused - deep_ms) / DEEP),
        process_bytes=process_bytes,
        load_s=max(0.0, loads_s[0] - SHALLOW * load_layer),
        load_layer_s=load_layer,
    )


def _store(path: Path, layers: int) -> Path:

    write_store(path, shape(SHAPE, layers), WeightFormat("affine", 4, 64), 0)
    return path


class _Loaded:
    """One model in memory. `load_s`: what loading took; `process_bytes`: held when it began."""

    def __init__(self, store: Path, threads: int, fuse: bool) -> None:

        options = Options(memory=2 * GIB, path="hot", threads=threads, ctx_size=CONTEXT, fuse=fuse)
        started = time.perf_counter()
        self.runtime = load(store, options)
        self.load_s = time.perf_counter() - started
        self.process_bytes = int(self.runtime.ledger()["process_bytes"])
        self.runtime.residency.warm()
        self.full = self.runtime.residency

    def __enter__(self) -> "_Loaded":
        return self

    def __exit__(self, *_: object) -> None:
        self.put(self.full)
        self.runtime.close()

    def put(self, residency: Any) -> None:
        """Let the model's layers ask `residency` for their experts."""

        for block in moe_blocks(self.runtime.model):
            block.experts.streamed.residency = residency
        self.runtime.residency = residency


class _Variant:
    """A sequence decoded by one model, with all experts in memory or with `slots` of each layer, token by token."""

    def __init__(self, model: _Loaded, slots: int | None = None, pause_s: float = 0.0) -> None:

        self.model, self.pause_s, runtime = model, pause_s, model.runtime
        self.residency: Any = model.full
        if slots is not None:
            self.residency = Residency(runtime.store, runtime.queue, path="hot", slots=slots, ring_records=4)
        model.put(self.residency)
        self.sequence = runtime.new_sequence()
        runtime.prefill(self.sequence, [1, 2, 3, 4])
        self._tokens: list[tuple[float, int]] = []  # busy ms, misses

    def token(self, walk: "_Walk") -> None:
        self.model.put(self.residency)
        tally, acquire = self.residency.tally, self.residency.acquire
        self.residency.acquire = walk.before(acquire, self.pause_s)
        try:
            stall_ns, missed, spent_ns = tally.stall_ns, tally.misses, walk.spent_ns
            started = time.perf_counter_ns()
            self.model.runtime.decode([self.sequence], [(7 * len(self._tokens) + 5) % 500])
            idle_ns = tally.stall_ns - stall_ns + walk.spent_ns - spent_ns
            self._tokens.append(((time.perf_counter_ns() - started - idle_ns) / 1e6, tally.misses - missed))
        finally:
            self.residency.acquire = acquire

    def busy_ms(self) -> float:
        """The median token without waits for reads."""
        return statistics.median(ms for ms, _ in self._tokens[WARM_UP:])

    def misses(self) -> float:
        """Of a token, the mean."""
        return statistics.mean(missed for _, missed in self._tokens[WARM_UP:])

    def close(self) -> None:
        if self.residency is not self.model.full:
            self.model.put(self.model.full)
            self.residency.close()


class _Walk:
    """Before every acquire: walks through memory as through a layer's weights, and sleeps as in a wait for a read."""

    def __init__(self) -> None:

        self.spent_ns, self._at = 0, 0
        self._arena = Arena(WALKED_BYTES)
        self._arena.populate()

    def before(self, acquire: Any, pause_s: float) -> Any:

        def slow(pool: int, experts: Sequence[int]) -> Any:
            started = time.perf_counter_ns()
            kernels.read_once(self._arena.address + self._at, WALK_BYTES)
            self._at = (self._at + WALK_BYTES) % WALKED_BYTES
            if pause_s:
                time.sleep(pause_s)
            self.spent_ns += time.perf_counter_ns() - started
            return acquire(pool, experts)

        return slow
