"""One measurement in one process: `stoker` or `llama.cpp`, decode or prefill, on given token ids. Prints JSON.

Started by benchmarks/engine.py inside a memory cgroup. Decode feeds the given ids one at a time, so that neither
engine profits from repeated tokens; the first `--warmup` steps are not counted.
"""

import argparse
import json
import resource
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["stoker", "llama"])
    parser.add_argument("model")
    parser.add_argument("--ids", required=True, help="JSON file: {prompt: [...], decode: [...]}")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--path", default="auto")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--prefill-chunk", type=int, default=None)
    parser.add_argument(
        "--no-mmap", action="store_true", help="llama.cpp: read the weights into memory (and repack them)"
    )
    parser.add_argument("--warm", action="store_true", help="stoker: load every expert that fits before measuring")
    arguments = parser.parse_args()
    ids = json.loads(Path(arguments.ids).read_text())
    result = (run_stoker if arguments.engine == "stoker" else run_llama)(arguments, ids)
    result["rss_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["major_faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    print(json.dumps(result))


def process_read_bytes() -> int:
    """Bytes that this process caused to be read from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def summarise(
    load_s: float, prompt_tokens: int, prefill_s: float, prefill_bytes: int, steps: list[float], decode_bytes: int
) -> dict:
    counted = sorted(steps)
    return {
        "load_s": load_s,
        "prefill_tokens": prompt_tokens,
        "prefill_s": prefill_s,
        "prefill_tok_s": prompt_tokens / prefill_s,
        "prefill_bytes": prefill_bytes,
        "decode_tokens": len(steps),
        "decode_tok_s": len(steps) / sum(steps) if steps else None,
        "decode_ms_median": counted[len(counted) // 2] * 1e3 if steps else None,
        "decode_bytes_per_token": decode_bytes / len(steps) if steps else None,
    }


def run_stoker(arguments: argparse.Namespace, ids: dict) -> dict:
    started = time.perf_counter()
    from stoker.runtime.model import Options, load

    options = Options(
        memory=arguments.memory,
        path=arguments.path,
        policy=arguments.policy,
        threads=arguments.threads,
        ctx_size=arguments.ctx_size,
        depth=arguments.depth,
        prefill_chunk=arguments.prefill_chunk,
    )
    with load(arguments.model, options) as runtime:
        if arguments.warm:
            runtime.residency.warm()
        load_s = time.perf_counter() - started
        sequence = runtime.new_sequence()
        before, at = runtime.stats(), time.perf_counter()
        runtime.prefill(sequence, ids["prompt"])
        prefill_s, middle = time.perf_counter() - at, runtime.stats()
        steps: list[float] = []
        counted = middle
        for index, token in enumerate(ids["decode"]):
            if index == arguments.warmup:
                counted = runtime.stats()
            at = time.perf_counter()
            runtime.decode([sequence], [token])
            if index >= arguments.warmup:
                steps.append(time.perf_counter() - at)
        after = runtime.stats()

        def moved(a: dict, b: dict) -> int:
            return b["demand_bytes"] + b["prefetch_bytes"] - a["demand_bytes"] - a["prefetch_bytes"]

        result = summarise(load_s, len(ids["prompt"]), prefill_s, moved(before, middle), steps, moved(counted, after))
        hits, misses = after["hits"] - counted["hits"], after["misses"] - counted["misses"]
        result |= {
            "hit_rate": hits / max(1, hits + misses),
            "stall_ms_per_token": (after["stall_ns"] - counted["stall_ns"]) / 1e6 / max(1, len(steps)),
            "prefill_stall_s": (middle["stall_ns"] - before["stall_ns"]) / 1e9,
            "dropped_experts": after["dropped_experts"],
            "ledger": runtime.ledger(),
            "stats": after,
        }
        return result


def run_llama(arguments: argparse.Namespace, ids: dict) -> dict:
    import llama_cpp

    started = time.perf_counter()
    model = llama_cpp.Llama(
        arguments.model,
        n_ctx=arguments.ctx_size,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        n_batch=512,
        n_ubatch=512,
        use_mmap=not arguments.no_mmap,
        verbose=False,
        logits_all=False,
    )
    load_s = time.perf_counter() - started
    before, at = process_read_bytes(), time.perf_counter()
    model.eval(ids["prompt"])
    prefill_s, middle = time.perf_counter() - at, process_read_bytes()
    steps: list[float] = []
    counted = middle
    for index, token in enumerate(ids["decode"]):
        if index == arguments.warmup:
            counted = process_read_bytes()
        at = time.perf_counter()
        model.eval([token])
        if index >= arguments.warmup:
            steps.append(time.perf_counter() - at)
    return summarise(load_s, len(ids["prompt"]), prefill_s, middle - before, steps, process_read_bytes() - counted)


if __name__ == "__main__":
    main()
