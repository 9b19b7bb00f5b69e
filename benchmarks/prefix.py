"""Time to the first token of a conversation's second turn: with the prefix in memory, and from disk after a restart.

    python benchmarks/prefix.py --store STORE [--routes NAME.npz] [--memory 4GiB] [--repeats 3] [--append]

Each repeat: one process answers a prompt of --prompt tokens and then a second turn (prompt, answer, --new tokens);
another process, started afterwards with a cold page cache, answers another second turn, and then the first one's, whose
answers must be the same. What other programs took of the processors is recorded; as they slow the long first turn most,
the slowest of the others is also set against the fastest first turn. Both processes run in a memory cgroup of the
budget's size that counts the page cache (needs root).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stoker.bench.confine import run_confined
from stoker.bench.provenance import spread, write_result

RESULT = Path(__file__).parent / "results" / "prefix.json"
BARS = {"second_turn": 0.15, "after_restart": 0.25}
CONTEXT = 4096
GIB = 1 << 30
TICKS_S = 100  # of /proc/stat


# ---- the child: one process of a server


def child(task: dict[str, Any]) -> None:
    """Answer the prompts one after the other; print times, tokens and counters as JSON."""
    from stoker.bench.worker import _follow
    from stoker.generate.batcher import Batcher
    from stoker.generate.model import Model
    from stoker.generate.prefix import open_prefix_cache
    from stoker.runtime.model import Options, load

    started = time.perf_counter()
    runtime = load(
        task["store"],
        Options(memory=task["memory"], threads=task["threads"], ctx_size=CONTEXT, parallel=4, prefix_ram=None),
    )
    replay = _follow(runtime, task["routes"], "own") if task["routes"] else None
    cache = open_prefix_cache(runtime, directory=Path(task["directory"]), size_bytes=8 * GIB)
    assert cache is not None
    model = Model(runtime)
    batcher = Batcher(model, parallel=4, prefix=cache)
    loaded_s, turns, said = time.perf_counter() - started, [], list[int]()
    for prompt in task["prompts"]:
        ids = said + prompt["ids"]
        if replay is not None:
            replay.seek(prompt["from"])  # where the cache will leave off
        busy, total, own = *_machine_ticks(), time.process_time()
        result, lookup_s = _answer(batcher, ids, task["answer"])
        busy, total = (now - then for now, then in zip(_machine_ticks(), (busy, total), strict=True))
        turns.append(
            {
                "ttft_s": result.timings.ttft_ms / 1e3,
                "lookup_s": lookup_s,
                "others_share": max(0.0, (busy - (time.process_time() - own) * TICKS_S) / total),
                "prompt_tokens": len(ids),
                "cached_tokens": result.usage.cached_tokens,
                "answer": result.token_ids,
                "prefill": result.stats["prefill"],
                "decode_tok_s": result.timings.decode_tok_s,
                "prefix": cache.stats(),
            }
        )
        assert result.usage.cached_tokens == prompt["from"], (result.usage, prompt["from"])
        said = ids + result.token_ids if prompt["goes_on"] else []
    settled = time.perf_counter()
    cache.settle()
    settled = time.perf_counter() - settled
    batcher.close()
    found = {"turns": turns, "loaded_s": loaded_s, "settle_s": settled, "prefix": cache.stats()}
    cache.close()
    print(json.dumps(found | {"ledger": model.ledger(), "peak_rss_bytes": runtime.stats()["peak_rss_bytes"]}))
    model.close()


def _machine_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all processors so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def _answer(batcher: Any, ids: list[int], tokens: int) -> tuple[Any, float]:
    """The result, and the seconds until the job was admitted: what the prefix cache takes."""
    import queue

    from stoker.generate.job import Done, Failed, Job, Progress
    from stoker.generate.request import Request, SamplingOptions

    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    submitted, admitted_s = time.perf_counter(), 0.0
    batcher.submit(Job(Request(tuple(ids), SamplingOptions(), max_tokens=tokens, ignore_eos=True)), events.put)
    while True:
        event = events.get()
        if isinstance(event, Progress):
            admitted_s = admitted_s or time.perf_counter() - submitted
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            return event.result, admitted_s


# ---- the parent


def measured(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One repeat: a conversation of two turns, and its second turn in another process."""
    generator = random.Random(seed)

    def some(tokens: int) -> list[int]:
        return [generator.randrange(arguments.vocabulary) for _ in range(tokens)]

    first, new, other = some(arguments.prompt), some(arguments.new), some(arguments.new)
    directory = tempfile.mkdtemp(prefix="prefix-", dir=arguments.scratch)
    task = {
        "store": arguments.store, "memory": arguments.memory, "threads": arguments.threads, "routes": arguments.routes,
        "directory": directory, "answer": arguments.answer,
    }  # fmt: skip
    limit = int(float(arguments.memory.removesuffix("GiB")) * GIB)
    known = arguments.prompt + arguments.answer - 1  # the last token of an answer has no keys and values yet
    try:
        # After the restart comes another question, so that nothing of it is on disk; then the same one, to compare.
        prompts = [{"ids": first, "from": 0, "goes_on": True}, {"ids": new, "from": known, "goes_on": False}]
        running = _run(task | {"prompts": prompts}, limit)
        said = running["turns"][0]["answer"]
        prompts = [
            {"ids": first + said + other, "from": known + 1, "goes_on": False},
            {"ids": first + said + new, "from": known + arguments.new, "goes_on": False},
        ]
        restarted = _run(task | {"prompts": prompts}, limit)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    (one, two), (three, four) = running["turns"], restarted["turns"]
    assert two["answer"] == four["answer"], "the answer changed with the restart"
    return {
        "ttft_s": {"first": one["ttft_s"], "second": two["ttft_s"], "after_restart": three["ttft_s"]},
        "share": {"second": two["ttft_s"] / one["ttft_s"], "after_restart": three["ttft_s"] / one["ttft_s"]},
        "lookup_s": {"second": two["lookup_s"], "after_restart": three["lookup_s"]},
        "cached_tokens": [turn["cached_tokens"] for turn in (one, two, three)],
        "others_share": [turn["others_share"] for turn in (one, two, three)],  # of the processors, taken by others
        "running": running,
        "restarted": restarted,
    }


def _run(task: dict[str, Any], limit: int) -> dict[str, Any]:
    return run_confined([sys.executable, __file__, "--child", json.dumps(task)], limit, cold=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--store")
    parser.add_argument("--routes")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--new", type=int, default=50)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--scratch", default=None, help="where the cache's directory is made")
    parser.add_argument("--append", action="store_true", help="add to the repeats that the result holds")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return
    known = json.loads(arguments.out.read_text())["runs"] if arguments.append and arguments.out.exists() else []
    for repeat in range(arguments.repeats):
        run = measured(arguments, seed=1000 + len(known) + repeat)
        print({name: round(value, 2) for name, value in run["ttft_s"].items()}, run["share"], flush=True)
        known.append(run)
    routes = Path(arguments.routes).name if arguments.routes else "the model's own"
    medians = {name: statistics.median(run["share"][name] for run in known) for name in ("second", "after_restart")}
    write_result(
        arguments.out,
        {
            "what": f"{arguments.prompt} prompt tokens, {arguments.answer} answered, {arguments.new} new; "
            f"{arguments.memory} with the page cache counted; routes: {routes}",
            "bars": BARS,
            "shares": medians,
            "shares_against_the_fastest_first_turn": {
                name: max(run["ttft_s"][name] for run in known) / min(run["ttft_s"]["first"] for run in known)
                for name in medians
            },
            "ttft_s": {name: spread([run["ttft_s"][name] for run in known]) for name in known[0]["ttft_s"]},
            "runs": known,
        },
    )


if __name__ == "__main__":
    main()
