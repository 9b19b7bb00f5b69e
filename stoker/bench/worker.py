"""One engine in one process, fed given token ids: what `stoker bench` and the scripts in benchmarks/ time.

A session is a prompt and then ids fed one at a time, so that neither engine profits from repeated tokens. As a program
it prints one JSON object and needs nothing but numpy and the engine that it is told to run: another interpreter can run
it for llama.cpp. It knows no cgroup and no repeats.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

if __name__ == "__main__":  # by an interpreter that stoker is not installed for
    sys.path.append(str(Path(__file__).parents[2]))

from stoker.trace.measures import percentile

Figures = dict[str, Any]


class Engine(Protocol):
    """What a session needs. `load_s`: how long loading took; `about`: what belongs beside its figures."""

    load_s: float

    def begin(self) -> None:
        """Start an empty sequence."""

    def prefill(self, ids: list[int]) -> None: ...

    def decode(self, token: int) -> None: ...

    def counters(self) -> dict[str, int]:
        """Counts since loading: `read_bytes`, and where the engine knows them hits, misses, stall_ns."""

    def about(self) -> Figures: ...

    def close(self) -> None: ...


def session(engine: Engine, prompt: list[int], decode: list[int], warmup: int = 0) -> Figures:
    """Prefill `prompt`, then feed `decode` one by one; the first `warmup` of them count to the total alone.

    Times in s or ms, rates in tokens/s, None where a phase is empty. `total_s` is prefill and every step.
    """
    engine.begin()
    before, at = engine.counters(), time.perf_counter()
    engine.prefill(prompt)
    prefill_s, middle = time.perf_counter() - at, engine.counters()
    steps_s: list[float] = []
    counted, warming_s = middle, 0.0
    for index, token in enumerate(decode):
        if index == warmup:
            counted = engine.counters()
        at = time.perf_counter()
        engine.decode(token)
        if index >= warmup:
            steps_s.append(time.perf_counter() - at)
        else:
            warming_s += time.perf_counter() - at
    after = engine.counters()
    figures = summarise(
        prefill_s, len(prompt), steps_s, prefilled=_grown(before, middle), decoded=_grown(counted, after)
    )
    return figures | {
        "total_s": prefill_s + warming_s + sum(steps_s),
        "total_tokens": len(prompt) + len(decode),
        "decode_ms": [round(seconds * 1e3, 4) for seconds in steps_s],
    }


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in after.items()}


def summarise(
    prefill_s: float, prompt_tokens: int, steps_s: list[float], prefilled: dict[str, int], decoded: dict[str, int]
) -> Figures:
    """The figures of one session from its times and the counters that each phase added."""
    tokens, middle_s = len(steps_s), percentile(steps_s, 0.5)
    figures: Figures = {
        "prefill_tokens": prompt_tokens,
        "prefill_s": prefill_s,
        "prefill_tok_s": prompt_tokens / prefill_s,
        "prefill_bytes": prefilled["read_bytes"],
        "decode_tokens": tokens,
        "decode_tok_s": tokens / sum(steps_s) if tokens else None,
        "decode_ms_median": None if middle_s is None else middle_s * 1e3,
        "decode_bytes_per_token": decoded["read_bytes"] / tokens if tokens else None,
    }
    if "hits" in decoded:
        figures |= {
            "hit_rate": decoded["hits"] / max(1, decoded["hits"] + decoded["misses"]),
            "stall_ms_per_token": decoded["stall_ns"] / 1e6 / max(1, tokens),
            "prefill_stall_s": prefilled["stall_ns"] / 1e9,
            "dropped_experts": prefilled["dropped_experts"] + decoded["dropped_experts"],
        }
        figures |= {f"decode_{name}": decoded[name] for name in ("hits", "misses", "reads", "prefetch_bytes")}
    return figures


class StokerEngine:
    """A store in this process. `options`: fields of the runtime's Options. `routes`: a file of recorded routes."""

    COUNTED = ("hits", "misses", "reads", "stall_ns", "prefetch_bytes", "dropped_experts")

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        *,
        preload: bool = False,
        routes: str | None = None,
        route_weights: Any = "own",
        recorder: Any = None,
    ) -> None:
        started = time.perf_counter()
        from stoker.runtime.model import Options, load

        self.runtime = load(model, Options(**options), recorder)
        self.replay = None
        try:
            if routes is not None:
                self.replay = _follow(self.runtime, routes, route_weights)
            if preload:
                self.runtime.residency.warm()
        except BaseException:
            self.runtime.close()
            raise
        self.load_s = time.perf_counter() - started
        self._sequence: Any = None

    def begin(self) -> None:
        if self._sequence is not None:
            self._sequence.close()
        self._sequence = self.runtime.new_sequence()

    def prefill(self, ids: list[int]) -> None:
        self.runtime.prefill(self._sequence, ids)

    def decode(self, token: int) -> None:
        self.runtime.decode([self._sequence], [token])

    def counters(self) -> dict[str, int]:
        stats = self.runtime.stats()
        return {"read_bytes": stats["demand_bytes"] + stats["prefetch_bytes"]} | {
            name: stats[name] for name in self.COUNTED
        }

    def about(self) -> Figures:
        """`direct_reads`: every file of experts was read past the page cache, none fell back."""
        stats = self.runtime.stats()
        return {"ledger": self.runtime.ledger(), "stats": stats, "direct_reads": self.runtime.queue.direct}

    def close(self) -> None:
        self.runtime.close()


def _follow(runtime: Any, routes: str, weights: Any) -> Any:
    """Make every MoE layer follow the recorded routes of a file."""
    from stoker.routing.replay import RouteReplay

    replay = RouteReplay.open(routes, weights=weights)
    runtime.follow(replay)
    return replay


class LlamaEngine:
    """llama.cpp through llama-cpp-python. Weights that are mapped stay as they are; weights that are read are repacked.

    Repacking makes a second copy of the weights in memory, so with mmap under a limit it would only be killed.
    """

    def __init__(self, model: str, *, threads: int, ctx_size: int, mmap: bool = True) -> None:
        started = time.perf_counter()
        import llama_cpp

        self.version = llama_cpp.__version__
        defaults = llama_cpp.llama_cpp.llama_model_default_params

        def parameters() -> Any:
            found = defaults()
            found.use_extra_bufts = not mmap
            return found

        llama_cpp.llama_cpp.llama_model_default_params = parameters
        self._model = llama_cpp.Llama(
            model,
            n_ctx=ctx_size,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            n_ubatch=512,
            use_mmap=mmap,
            verbose=False,
            logits_all=False,
        )
        self.load_s = time.perf_counter() - started

    def begin(self) -> None:
        self._model.reset()

    def prefill(self, ids: list[int]) -> None:
        self._model.eval(ids)

    def decode(self, token: int) -> None:
        self._model.eval([token])

    def counters(self) -> dict[str, int]:
        return {"read_bytes": process_read_bytes()}

    def about(self) -> Figures:
        return {"peer_version": f"llama-cpp-python {self.version}"}

    def close(self) -> None:
        self._model.close()


def process_read_bytes() -> int:
    """Bytes that this process caused to be read from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what `--ids` says: one session {prompt, decode}, or {sessions: [{name, prompt, decode, warmup}]}."""
    options = _parser().parse_args(arguments)
    plan = json.loads(Path(options.ids).read_text())
    engine = _engine(options)
    if "sessions" in plan:
        sessions = {
            one["name"]: session(engine, one["prompt"], one["decode"], one["warmup"]) for one in plan["sessions"]
        }
        result: Figures = {"sessions": sessions}
    else:
        result = session(engine, plan["prompt"], plan["decode"], options.warmup)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result |= {"load_s": engine.load_s, **engine.about()}
    result |= {"rss_peak_bytes": peak_rss_bytes(), "major_faults": usage.ru_majflt}
    print(json.dumps(result))
    engine.close()


def peak_rss_bytes() -> int:
    """The process's own VmHWM: getrusage's figure starts from the peak of the process that started this one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _engine(options: argparse.Namespace) -> Engine:
    if options.engine == "llama":
        return LlamaEngine(options.model, threads=options.threads, ctx_size=options.ctx_size, mmap=not options.no_mmap)
    chosen = {
        "memory": options.memory,
        "path": options.path,
        "policy": options.policy,
        "threads": options.threads,
        "ctx_size": options.ctx_size,
        "depth": options.depth,
        "prefill_chunk": options.prefill_chunk,
        "populate": not options.untouched,
        "activation_bits": options.activation_bits,
        "direct": not options.buffered,
    }
    if options.prefetch is not None:
        chosen["prefetch"] = options.prefetch
    chosen |= {"routing": options.routing, "adapter": options.adapter}
    return StokerEngine(
        options.model, chosen, preload=options.warm, routes=options.routes, route_weights=options.route_weights
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One measurement of one engine; prints JSON.")
    parser.add_argument("engine", choices=["stoker", "llama"])
    parser.add_argument("model")
    parser.add_argument("--ids", required=True, help="JSON file: {prompt, decode} or {sessions: [...]}")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--path", default="auto")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--prefetch", type=int, default=None, help="stoker: reads ahead for the next layer")
    parser.add_argument("--prefill-chunk", type=int, default=None)
    parser.add_argument("--buffered", action="store_true", help="stoker: read through the page cache")
    parser.add_argument("--routes", help="stoker: follow the routes of this file")
    parser.add_argument("--route-weights", default="own")
    parser.add_argument("--routing", help="stoker: who chooses experts")
    parser.add_argument("--adapter", help="stoker: heads, LoRA or both")
    parser.add_argument("--no-mmap", action="store_true", help="llama.cpp: read the weights into memory (and repack)")
    parser.add_argument("--activation-bits", type=int, default=16, help="stoker: rounding of the kernels' inputs")
    parser.add_argument("--untouched", action="store_true", help="stoker: leave the slots' pages to the first reads")
    parser.add_argument("--warm", action="store_true", help="stoker: load every expert that fits before measuring")
    return parser


if __name__ == "__main__":
    main()
