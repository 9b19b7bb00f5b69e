"""Forecast against measurement: each configuration in its own process, all of them reported, the misses too.

    python benchmarks/forecast.py --store STORE [--demo STORE] [--routes NAME.npz ...] [--repeats 3] [--only WORD ...]

The profile is measured first, as `stoker probe` does, on the disk of the store. Configurations are forecast twice,
with routing as in the run (replayed: this judges the model of the machine) and with the routing that `stoker
predict` assumes (this is what a user gets). What other programs took of the processor during a run is recorded; a
run in which they took more than --busy is repeated, and marked where it never was quiet.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stoker.bench.budgets import Divider
from stoker.bench.outlook import Assumptions, setting_of
from stoker.bench.probe import measure as probe
from stoker.bench.provenance import spread, write_result
from stoker.bench.shapes import shape_of
from stoker.plan.forecast import Machine, PromptForecast, TokenForecast, decode, prefill
from stoker.plan.forecast_routing import Replayed, Routing, assumed, routing_named
from stoker.plan.profile import Profile
from stoker.plan.routes import from_array
from stoker.store.reader import Store, open_store

RESULT = Path(__file__).parent / "results" / "forecast.json"
GIB = 1 << 30
PROMPT, WARM_UP, DECODE = 512, 8, 40
CONTEXT = 4096
DECODE_BAR, TTFT_BAR = 0.15, 0.25


@dataclass(frozen=True)
class Configuration:
    """One run. routes: a file, or None for random ids through the model's own gates."""

    name: str
    store: str
    memory_gib: float
    routes: str | None = None
    assumed: str | None = None  # routing that `predict` would assume: a name
    policy: str = "lru"
    path: str = "auto"


def configurations(arguments: argparse.Namespace) -> list[Configuration]:
    first, *others = arguments.routes or [None]
    short = "general" if first else "uniform"
    found = []
    for gib in (3, 4, 6, 8, 12, 16):
        found.append(Configuration(f"30B {gib} GiB {short}", arguments.store, gib, first, short))
    found.append(Configuration(f"30B 6 GiB {short} lfru", arguments.store, 6, first, short, policy="lfru"))
    found.append(Configuration(f"30B 4 GiB {short} exact path", arguments.store, 4, first, short, path="exact"))
    found.append(Configuration(f"30B 6 GiB {short} staged path", arguments.store, 6, first, short, path="staged"))
    for routes in others:
        name = Path(routes).stem.split("_")[-1]
        found.append(Configuration(f"30B 6 GiB {name}", arguments.store, 6, routes, name))
    found.append(Configuration("30B 4 GiB random ids", arguments.store, 4, None, "uniform"))
    found.append(Configuration("30B 8 GiB random ids", arguments.store, 8, None, "uniform"))
    if arguments.demo:
        found += [
            Configuration(f"demo {gib} GiB random ids", arguments.demo, gib, None, "uniform") for gib in (0.8, 1, 2)
        ]
    if arguments.only:
        found = [one for one in found if any(word in one.name for word in arguments.only)]
    return found


# ---- measuring: the child


def child(text: str) -> None:
    """Run one configuration; print the session's figures as JSON. `trace`: record the routes instead of timing."""
    from stoker.bench.worker import StokerEngine, session

    task = json.loads(text)
    recorder = None
    if task["trace"]:
        from stoker.trace.writer import TraceWriter

        recorder = TraceWriter(task["trace"], about={"model": task["store"]})
    options = {
        "memory": task["memory"], "policy": task["policy"], "path": task["path"], "threads": task["threads"],
        "ctx_size": CONTEXT,
    }  # fmt: skip
    engine = StokerEngine(task["store"], options, routes=task["routes"], recorder=recorder)
    vocabulary, generator = engine.runtime.vocab_size, random.Random(20261130)
    ids = [generator.randrange(vocabulary) for _ in range(PROMPT + WARM_UP + DECODE)]
    found = session(engine, ids[:PROMPT], ids[PROMPT:], WARM_UP)
    ledger = engine.about()["ledger"]
    engine.close()
    if recorder is not None:
        recorder.close()
    print(json.dumps(found | {"ledger": ledger}))


def run_child(one: Configuration, threads: int, trace: str | None = None) -> dict[str, Any]:
    """The child's figures, and the share of the processor that other programs took meanwhile."""
    task = {
        "store": one.store, "memory": int(one.memory_gib * GIB), "policy": one.policy, "path": one.path,
        "threads": threads, "routes": one.routes, "trace": trace,
    }  # fmt: skip
    before, own = machine_ticks(), children_s()
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{one.name}: {done.stderr[-3000:]}")
    busy, total = (now - then for now, then in zip(machine_ticks(), before, strict=True))
    others = busy / total - (children_s() - own) * TICKS_S / total
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"others_share": max(0.0, others)}


TICKS_S = 100


def machine_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all processors so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(one: Configuration, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Repeats; each is tried again a few times while other programs are busy, and the quietest try counts."""
    found = []
    for _ in range(arguments.repeats):
        tries: list[dict[str, Any]] = []
        while len(tries) < arguments.tries and not any(t["others_share"] <= arguments.busy for t in tries):
            tries.append(run_child(one, arguments.threads))
        found.append(min(tries, key=lambda t: t["others_share"]))
    return found


# ---- forecasting


def own_routing(one: Configuration, threads: int, directory: Path) -> Routing:
    """Routing as it is in the run: of the file, or recorded once from the model's own gates."""
    from stoker.routing.replay import load_experts

    path = directory / f"{Path(one.store).name}.trace"
    if one.routes is None and not path.exists():
        run_child(replace(one, memory_gib=max(2.0, one.memory_gib), policy="lru", path="auto"), threads, str(path))
    experts_LTK = load_experts(Path(one.routes) if one.routes else path)
    experts = open_store(one.store).pools[0].experts
    routes = from_array(experts_LTK[:, : PROMPT + WARM_UP + DECODE], one.name, experts)
    return Replayed(routes, "as in the run", (PROMPT + WARM_UP, PROMPT + WARM_UP + DECODE))


def forecast(
    one: Configuration, store: Store, profile: Profile, routing: Routing
) -> tuple[TokenForecast, PromptForecast, float]:
    """(token, prompt, slots a layer) at the configuration's budget."""
    shape = shape_of(store.config, store.manifest, one.name)
    divider = Divider(store.config, store.manifest, shape, profile.costs.process_bytes, CONTEXT)
    budget = int(one.memory_gib * GIB)
    ledger = divider.divide(budget)
    about = Assumptions(routing, routing, routing, policy=one.policy, path=one.path)
    setting = setting_of(ledger, divider.chunk(budget), about)
    machine = Machine(profile)
    context = PROMPT + WARM_UP + DECODE // 2
    return (
        decode(shape, machine, setting, routing, context),
        prefill(shape, machine, setting, routing, PROMPT),
        setting.slots,
    )


def compared(
    one: Configuration, runs: list[dict[str, Any]], profile: Profile, known: Routing, arguments: argparse.Namespace
) -> dict[str, Any]:
    store = open_store(one.store)
    guess = routing_named(one.assumed) if one.assumed else assumed(store.pools[0].experts)[0]
    token, prompt, slots = forecast(one, store, profile, known)
    guessed, guessed_prompt, _ = forecast(one, store, profile, guess)
    speed = statistics.median(1e3 / run["decode_ms_median"] for run in runs)
    first_s = statistics.median(run["prefill_s"] for run in runs)
    busiest = max(run["others_share"] for run in runs)
    row = {
        "configuration": asdict(one),
        "quiet": busiest <= arguments.busy,
        "others_share": busiest,
        "measured": {
            "tokens_s": spread([1e3 / run["decode_ms_median"] for run in runs]),
            "ttft_s": spread([run["prefill_s"] for run in runs]),
            "hit_rate": statistics.median(run["hit_rate"] for run in runs),
            "read_bytes": statistics.median(run["decode_bytes_per_token"] for run in runs),
            "stall_ms": statistics.median(run["stall_ms_per_token"] for run in runs),
            "slots": statistics.mean(runs[0]["ledger"]["slots"]),
            "process_bytes": runs[0]["ledger"]["process_bytes"],
        },
        "forecast": token.figures() | {"ttft_s": prompt.total_s, "slots": slots, "bound": prompt.bound},
        "assumed": {
            "routing": guess.words, "tokens_s": guessed.tokens_s, "ttft_s": guessed_prompt.total_s,
            "hit_rate": guessed.hit_rate,
        },
        "decode_error": token.tokens_s / speed - 1,
        "ttft_error": prompt.total_s / first_s - 1,
        "decode_error_assumed": guessed.tokens_s / speed - 1,
        "ttft_error_assumed": guessed_prompt.total_s / first_s - 1,
    }  # fmt: skip
    row["within_bars"] = abs(row["decode_error"]) <= DECODE_BAR and abs(row["ttft_error"]) <= TTFT_BAR
    say(
        f"{one.name:<28} decode {token.tokens_s:6.2f} forecast, {speed:6.2f} measured ({row['decode_error']:+.0%}; "
        f"assumed routing {row['decode_error_assumed']:+.0%}); first token {prompt.total_s:5.2f} s, {first_s:5.2f} "
        f"({row['ttft_error']:+.0%}); hits {token.hit_rate:.3f}, {row['measured']['hit_rate']:.3f}; "
        f"others {busiest:.0%}{'' if row['quiet'] else ' NOT QUIET'}"
    )
    return row


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store")
    parser.add_argument("--demo")
    parser.add_argument("--routes", nargs="*", help=".npz of routes of the store's shape; the first at every budget")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--busy", type=float, default=0.05, help="share of the processor that others may take")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="instead of measuring one first")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    before = loaded(arguments.profile) if arguments.profile else probe(Path(arguments.store), arguments.threads, say)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stoker-forecast-") as directory:
        rows = []
        for one in configurations(arguments):
            known = own_routing(one, arguments.threads, Path(directory))
            rows.append(compared(one, measured(one, arguments), before, known, arguments))
            write_result(arguments.out, result(rows, before, arguments, time.monotonic() - started))
    say(f"{sum(row['within_bars'] for row in rows)} of {len(rows)} within the bars; written to {arguments.out}")


def loaded(path: Path) -> Profile:
    from stoker.plan.profile import load

    return load(path)


def result(
    rows: list[dict[str, Any]], profile: Profile, arguments: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    return {
        "what": f"decode after {PROMPT} prompt tokens and {WARM_UP} more, median of {DECODE} tokens; first token of a "
        f"process that has just loaded the model; {arguments.repeats} repeats, each in its own process",
        "bars": {"decode": DECODE_BAR, "ttft": TTFT_BAR},
        "within_bars": sum(row["within_bars"] for row in rows),
        "configurations": len(rows),
        "quiet": sum(row["quiet"] for row in rows),
        "seconds": round(seconds),
        "profile": profile.as_dict(),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
