"""Forecast against measurement: each configuration in its own process, all of them reported, the misses too.

    python benchmarks/forecast.py --store STORE [--demo STORE] [--routes NAME.npz ...] [--repeats 2] [--only WORD ...]

The profile is measured once, as `stoker probe` does, on the disk of the store. A shared disk and a virtual machine
drift twofold within minutes, so disk, memory and kernels are measured again right before and right after each run. Each
configuration is forecast three times: from the machine of the moment and from the profile, both with routing as in the
run (the first judges the model of the machine, the second what drift adds), and from the profile with the routing that
`stoker predict` assumes (what a user gets). Before a run the memory of the one before is given back (--settle).

With --add the runs join those in the results file, so that a measurement can be split; --again only forecasts the runs
in the file anew. What other programs took of the processor is recorded; a run in which they took more than --busy is
repeated, and marked where it never was quiet.
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

from stoker.bench import probe, probe_costs, probe_memory
from stoker.bench.budgets import Divider
from stoker.bench.outlook import Assumptions, setting_of
from stoker.bench.provenance import provenance, spread, write_result
from stoker.bench.shapes import shape_of
from stoker.plan.forecast import Machine, PromptForecast, TokenForecast, decode, prefill
from stoker.plan.forecast_routing import Replayed, Routing, assumed, routing_named
from stoker.plan.profile import Profile, from_dict, load
from stoker.plan.routes import from_array
from stoker.store.reader import Store, open_store

RESULT = Path(__file__).parent / "results" / "forecast.json"
GIB = 1 << 30
PROMPT, WARM_UP, DECODE = 512, 8, 40
CONTEXT = 4096
DECODE_BAR, TTFT_BAR = 0.15, 0.25
IDLE_S = 15.0  # until a host has back what was freed


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
    return found


def chosen(arguments: argparse.Namespace) -> list[Configuration]:
    words = arguments.only
    return [one for one in configurations(arguments) if not words or any(word in one.name for word in words)]


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
    about = engine.about()
    engine.close()
    if recorder is not None:
        recorder.close()
    print(json.dumps(found | {"ledger": about["ledger"], "depth": about["stats"]["depth"], "load_s": engine.load_s}))


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


def moment_of(one: Configuration, profile: Profile) -> dict[str, Any]:
    """The parts of the profile that drift, measured now."""
    store = open_store(one.store)
    found = probe.again(profile, Path(one.store), max(pool.layout.record_bytes for pool in store.pools)).as_dict()
    return {name: found[name] for name in ("bursts", "sustained", "depth", "kernels", "waits")}


def at_moment(profile: Profile, moment: dict[str, Any]) -> Profile:
    return from_dict(json.loads(json.dumps(profile.as_dict() | moment)))


KEPT = (
    "prefill_s", "prefill_stall_s", "prefill_bytes", "decode_ms_median", "decode_tok_s", "decode_bytes_per_token",
    "hit_rate", "stall_ms_per_token", "dropped_experts", "depth", "load_s", "others_share",
)  # fmt: skip


def measured(one: Configuration, profile: Profile, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Repeats; each is tried again a few times while other programs are busy, and the quietest try counts."""
    found = []
    for _ in range(arguments.repeats):
        tries: list[dict[str, Any]] = []
        while len(tries) < arguments.tries and not any(t["others_share"] <= arguments.busy for t in tries):
            moments = [moment_of(one, profile)]
            time.sleep(arguments.settle)
            run = run_child(one, arguments.threads)
            moments.append(moment_of(one, profile))
            about = {"date": provenance()["date"], "commit": provenance()["commit"], "moments": moments}
            slots, process_bytes = statistics.mean(run["ledger"]["slots"]), run["ledger"]["process_bytes"]
            tries.append({name: run[name] for name in KEPT} | {"slots": slots, "process_bytes": process_bytes} | about)
        found.append(min(tries, key=lambda t: t["others_share"]))
    return found


# ---- forecasting


def own_routing(one: Configuration, threads: int, directory: Path) -> Routing:
    """Routing as it is in the run: of the file, or recorded once from the model's own gates and kept in `directory`."""
    from stoker.routing.replay import load_experts

    path = directory / f"{Path(one.store).resolve().parent.name}-{Path(one.store).name}.trace"
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
    """The row of a configuration: what was measured, the three forecasts, their errors, and the runs themselves.

    Of runs in which other programs were busy the quietest counts, and only where there is no quiet one.
    """
    quietest = min(runs, key=lambda run: run["others_share"])
    every, runs = runs, [run for run in runs if run["others_share"] <= arguments.busy] or [quietest]
    store = open_store(one.store)
    guess = routing_named(one.assumed) if one.assumed else assumed(store.pools[0].experts)[0]
    paired = [forecast(one, store, at_moment(profile, moment), known) for run in runs for moment in run["moments"]]
    token, prompt, slots = forecast(one, store, profile, known)
    guessed, guessed_prompt, _ = forecast(one, store, profile, guess)
    speed = statistics.median(1e3 / run["decode_ms_median"] for run in runs)
    first_s = statistics.median(run["prefill_s"] for run in runs)
    busiest = max(run["others_share"] for run in runs)
    decode_error = statistics.median(found.tokens_s for found, _, _ in paired) / speed - 1
    ttft_error = statistics.median(found.total_s for _, found, _ in paired) / first_s - 1
    row = {
        "configuration": asdict(one) | {"store": named(one.store), "routes": one.routes and named(one.routes)},
        "quiet": busiest <= arguments.busy,
        "others_share": busiest,
        "measured": {
            "tokens_s": spread([1e3 / run["decode_ms_median"] for run in runs]),
            "ttft_s": spread([run["prefill_s"] for run in runs]),
            "hit_rate": statistics.median(run["hit_rate"] for run in runs),
            "read_bytes": statistics.median(run["decode_bytes_per_token"] for run in runs),
            "stall_ms": statistics.median(run["stall_ms_per_token"] for run in runs),
            "slots": runs[0]["slots"],
        },
        "forecast": [
            found.figures() | {"ttft_s": first.total_s, "ttft_read_s": first.read_s, "ttft_compute_s": first.compute_s}
            for found, first, _ in paired
        ],
        "from_profile": token.figures() | {"ttft_s": prompt.total_s, "slots": slots, "bound": prompt.bound},
        "assumed": {
            "routing": guess.words, "tokens_s": guessed.tokens_s, "ttft_s": guessed_prompt.total_s,
            "hit_rate": guessed.hit_rate,
        },
        "decode_error": decode_error,
        "ttft_error": ttft_error,
        "decode_error_profile": token.tokens_s / speed - 1,
        "ttft_error_profile": prompt.total_s / first_s - 1,
        "decode_error_assumed": guessed.tokens_s / speed - 1,
        "ttft_error_assumed": guessed_prompt.total_s / first_s - 1,
        "within_bars": within(decode_error, ttft_error),
        "within_bars_profile": within(token.tokens_s / speed - 1, prompt.total_s / first_s - 1),
        "runs": every,
    }  # fmt: skip
    say(
        f"{one.name:<28} decode {speed:6.2f} measured, forecast {decode_error:+.0%} (profile "
        f"{row['decode_error_profile']:+.0%}, assumed routing {row['decode_error_assumed']:+.0%}); first token "
        f"{first_s:5.2f} s, {ttft_error:+.0%} ({row['ttft_error_profile']:+.0%}); hits {token.hit_rate:.3f}, "
        f"{row['measured']['hit_rate']:.3f}; others {busiest:.0%}{'' if row['quiet'] else ' NOT QUIET'}"
    )
    return row


def named(path: str) -> str:
    """A store or a file without the folders of this machine."""
    return "/".join(Path(path).resolve().parts[-2:])


def within(decode_error: float, ttft_error: float) -> bool:
    return abs(decode_error) <= DECODE_BAR and abs(ttft_error) <= TTFT_BAR


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store")
    parser.add_argument("--demo")
    parser.add_argument("--routes", nargs="*", help=".npz of routes of the store's shape; the first at every budget")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--busy", type=float, default=0.05, help="share of the processor that others may take")
    parser.add_argument(
        "--settle", type=float, default=IDLE_S, help="seconds before a run, for memory to be given back"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="instead of measuring one first")
    parser.add_argument("--traces", type=Path, help="where routes of random ids are kept, instead of nowhere")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--add", action="store_true", help="to the runs in the results file, with its profile")
    parser.add_argument("--again", action="store_true", help="measure nothing, forecast the file's runs anew")
    parser.add_argument("--constants", nargs="*", choices=("memory", "costs"), default=[], help="measure them anew")
    parser.add_argument("--record", action="store_true", help="only record routes of random ids into --traces")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    with tempfile.TemporaryDirectory(prefix="stoker-forecast-") as scratch:
        report(arguments, arguments.traces or Path(scratch))


def report(arguments: argparse.Namespace, traces: Path) -> None:
    traces.mkdir(parents=True, exist_ok=True)
    before = json.loads(arguments.out.read_text()) if arguments.add or arguments.again else {"rows": []}
    runs = {row["configuration"]["name"]: row["runs"] for row in before["rows"]}
    known = {one.name: own_routing(one, arguments.threads, traces) for one in chosen(arguments)}
    if arguments.record:
        return
    profile = profile_of(before, arguments)
    rows = {row["configuration"]["name"]: row for row in before["rows"]}
    for one in chosen(arguments):
        if arguments.again and one.name not in runs:
            continue
        new = [] if arguments.again else measured(one, profile, arguments)
        runs[one.name] = runs.get(one.name, []) + new
        rows[one.name] = compared(one, runs[one.name], profile, known[one.name], arguments)
        order = [each.name for each in configurations(arguments)]
        sorted_rows = sorted(rows.values(), key=lambda row: order.index(row["configuration"]["name"]))
        write_result(arguments.out, result(sorted_rows, profile))
    print(table(sorted_rows))
    within_both = sum(row["within_bars"] for row in rows.values())
    say(f"{within_both} of {len(rows)} within the bars; written to {arguments.out}")


def table(rows: list[dict[str, Any]]) -> str:
    """All rows in Markdown: measured, and by how much the forecasts are off."""
    head = "| configuration | tok/s | paired | profile | first token, s | paired | profile | runs | others |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        speed, first = row["measured"]["tokens_s"]["median"], row["measured"]["ttft_s"]["median"]
        errors = [row[name] for name in ("decode_error", "decode_error_profile", "ttft_error", "ttft_error_profile")]
        bars = (DECODE_BAR, DECODE_BAR, TTFT_BAR, TTFT_BAR)
        cells = [f"**{e:+.0%}**" if abs(e) > bar else f"{e:+.0%}" for e, bar in zip(errors, bars, strict=True)]
        lines.append(
            f"| {row['configuration']['name']} | {speed:.2f} | {cells[0]} | {cells[1]} | {first:.1f} | {cells[2]} "
            f"| {cells[3]} | {row['measured']['tokens_s']['n']} | {row['others_share']:.0%} |"
        )
    return "\n".join(lines)


def profile_of(before: dict[str, Any], arguments: argparse.Namespace) -> Profile:
    if "profile" in before:
        found = from_dict(before["profile"])
        if "memory" in arguments.constants:
            time.sleep(IDLE_S)
            found = replace(found, first_use=probe_memory.measure(arguments.threads))
        if "costs" in arguments.constants:
            found = replace(found, costs=probe_costs.measure(arguments.threads))
        return found
    if arguments.profile:
        return load(arguments.profile)
    time.sleep(arguments.settle)
    return probe.measure(Path(arguments.store), arguments.threads, say)


def result(rows: list[dict[str, Any]], profile: Profile) -> dict[str, Any]:
    return {
        "what": f"decode after {PROMPT} prompt tokens and {WARM_UP} more, median of {DECODE} tokens; first token of a "
        "process that has just loaded the model, on memory that had been given back; each run in its own process. "
        "`forecast`: from the machine measured right before and after each run; `from_profile`: from one profile",
        "bars": {"decode": DECODE_BAR, "ttft": TTFT_BAR},
        "configurations": len(rows),
        "within_bars": sum(row["within_bars"] for row in rows),
        "within_decode_bar": sum(abs(row["decode_error"]) <= DECODE_BAR for row in rows),
        "within_ttft_bar": sum(abs(row["ttft_error"]) <= TTFT_BAR for row in rows),
        "within_bars_profile": sum(row["within_bars_profile"] for row in rows),
        "quiet": sum(row["quiet"] for row in rows),
        "profile": profile.as_dict() | {"directory": named(profile.directory)},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
