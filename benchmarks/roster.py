"""What pinned rosters are worth in the engine: transfers, stall and decode rate against LRU and all in memory.

    python benchmarks/roster.py STORE [--routes qwen3_general.npz] [--tokens 1024] [--out FILE]

Each case is a process of its own that reads with O_DIRECT, so the device is cold. All decode the same tokens after the
same prompt: `resident` with every expert in memory, `lru` with a quarter of the slots and the model's own routes (or,
with --routes, recorded ones: a model of random weights has no locality), `roster` with the same slots, pinned after the
first decoded token, so that loading the rosters counts. Rosters of a model of random weights are forced on it: they say
nothing about quality. Forced rosters stay forced: the ids are random, so the detector has nothing to go by.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = ("resident", "lru", "roster")
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--routes", type=Path, help="recorded routes for `lru` (.npz)")
    parser.add_argument("--memory", default="20GiB", help="a budget that holds the case with every expert")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that have a slot")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="decoded")
    parser.add_argument("--lru-tokens", type=int, default=256, help="decoded by lru: its rate is steady, and low")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "roster.json")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options)))
        return
    rows = [one(case, options) for _ in range(options.rounds) for case in CASES]
    from stoker.bench.provenance import provenance

    result = {"what": __doc__.splitlines()[0], **summary(rows), "rows": rows, "provenance": provenance()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))


def one(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    passed = [part for part in sys.argv[1:] if part != "--"]
    done = subprocess.run(
        [sys.executable, __file__, *passed, "--case", case], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    print({name: value for name, value in row.items() if name != "step_ms"}, file=sys.stderr, flush=True)
    return row


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from stoker.routing.replay import RouteReplay
    from stoker.runtime.model import Options, load
    from stoker.store.reader import open_store

    pools = open_store(options.store).pools
    share = 1.0 if options.case == "resident" else options.share
    slots = tuple(max(1, round(pool.experts * share)) for pool in pools)
    more: dict[str, Any] = {}
    if options.case == "roster":
        sizes = ",".join(map(str, slots))
        more = {"routing": "roster", "roster_size": sizes, "pin_after": str(options.prompt + 1), "shift": False}
    tokens = options.lru_tokens if options.case == "lru" else options.tokens
    ctx_size = options.prompt + options.tokens + 1
    with load(options.store, Options(memory=options.memory, slots=slots, ctx_size=ctx_size, **more)) as model:
        if options.case == "lru" and options.routes:
            model.follow(RouteReplay.open(options.routes))
        if options.case == "resident":
            model.residency.warm()
        draw = torch.Generator().manual_seed(SEED)
        ids = torch.randint(0, model.vocab_size, (ctx_size,), generator=draw).tolist()
        sequence = model.new_sequence()
        sequence.prompt_tokens = options.prompt
        model.prefill(sequence, ids[: options.prompt])
        begun, step_ms, at_pin = model.counters(), [], None
        for token in ids[options.prompt : options.prompt + tokens]:
            started = time.perf_counter()
            model.decode([sequence], [token])
            step_ms.append((time.perf_counter() - started) * 1e3)
            at_pin = at_pin or model.counters()
        row = figures(begun, at_pin, model.counters(), step_ms, pools[0].layout.record_bytes)
        if model.rule is not None:
            row |= model.rule.about() | model.rule.counters()
        sequence.close()
    return {"case": options.case, "slots": slots[0], "experts": pools[0].experts, "decoded": tokens} | row


def figures(
    begun: dict[str, Any], first: Any, ended: dict[str, Any], step_ms: list[float], record_bytes: int
) -> dict[str, Any]:
    """transfers: records read, whatever for; `after_first`: without the first token, after which a roster is pinned."""

    def read(low: dict[str, Any], high: dict[str, Any]) -> float:
        return sum(high[name] - low[name] for name in ("demand_bytes", "prefetch_bytes")) / record_bytes

    tokens = len(step_ms)
    return {
        "transfers_per_token": read(begun, ended) / tokens,
        "transfers_after_first_per_token": read(first, ended) / max(1, tokens - 1),
        "misses_after_first": ended["misses"] - first["misses"],
        "stall_ms_per_token_after_first": (ended["stall_ns"] - first["stall_ns"]) / 1e6 / max(1, tokens - 1),
        "first_token_ms": step_ms[0],
        "tok_s": 1e3 * tokens / sum(step_ms),
        "tok_s_after_first": 1e3 * (tokens - 1) / sum(step_ms[1:]),
        "step_ms": [round(value, 2) for value in step_ms],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The bars: medians over rounds. Rates with all tokens, the one that loads the rosters included."""

    def median(case: str, name: str) -> float:
        return statistics.median(row[name] for row in rows if row["case"] == case)

    transfers = {case: median(case, "transfers_per_token") for case in CASES}
    return {
        "transfers_per_token": transfers,
        "lru_over_roster": transfers["lru"] / max(transfers["roster"], 1e-9),
        "reads_per_token_once_pinned": median("roster", "transfers_after_first_per_token"),
        "stall_ms_per_token": {case: median(case, "stall_ms_per_token_after_first") for case in CASES},
        "tok_s": {case: median(case, "tok_s") for case in CASES},
        "share_of_resident_rate": {
            case: median(case, "tok_s_after_first") / median("resident", "tok_s_after_first") for case in CASES
        },
        "share_of_resident_rate_with_loading": median("roster", "tok_s") / median("resident", "tok_s"),
    }


if __name__ == "__main__":
    main()
