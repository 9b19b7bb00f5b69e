"""The engine against its bounds and against llama.cpp, interleaved, each worker in a memory cgroup, from cold.

    python benchmarks/engine.py STORE --gguf FILE --llama-python PYTHON [--repeats 3] [--only NAME ...] [--quick]

PYTHON is an interpreter with llama-cpp-python (built natively) installed. Needs root: cgroups, caches, read-ahead.
Every round runs each cell once, so that drift of the machine falls on all alike; the device's own rate is measured
in every round. With --keep FILE what was measured is kept there as it comes, and a run that was killed goes on.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stoker.bench import worker
from stoker.bench.confine import read_ahead, run_confined
from stoker.bench.device import block_device, device_rate
from stoker.bench.provenance import provenance, spread, write_result

GIB = 1 << 30
BEST_READ_AHEAD_KIB = 128
RESULT = Path(__file__).parent / "results" / "engine.json"


@dataclass(frozen=True)
class Cell:
    """One thing to measure: an engine at a memory limit (GiB, None for resident) and a read-ahead. second: after
    another prompt in the same process, so that no memory is used for the first time; the reads stay direct."""

    name: str
    engine: str
    limit_gib: float | None
    read_ahead_kib: int | None = BEST_READ_AHEAD_KIB
    decode: int = 24
    prompt: int = 512
    repeats: int | None = None
    extra: tuple[str, ...] = ()
    second: bool = False


def cells(quick: bool) -> list[Cell]:
    tokens = 12 if quick else 24
    found = []
    for gib in (4, 8):
        found += [
            Cell(f"stoker {gib}GiB", "stoker", gib, decode=2 * tokens),
            Cell(f"llama.cpp mmap {gib}GiB", "llama", gib, decode=tokens),
            Cell(
                f"llama.cpp mmap {gib}GiB default read-ahead",
                "llama",
                gib,
                None,
                decode=3,
                prompt=8,
                repeats=1,
                extra=("--warmup", "1"),
            ),
        ]
    found.append(Cell("stoker again 4GiB", "stoker", 4, decode=2 * tokens, second=True))
    found.append(Cell("stoker 3GiB", "stoker", 3, decode=tokens))
    found.append(Cell("stoker resident", "stoker", None, decode=3 * tokens, extra=("--warm",)))
    rounded = ("--warm", "--activation-bits", "8")
    found.append(Cell("stoker resident, 8-bit activations", "stoker", None, decode=3 * tokens, extra=rounded))
    found.append(Cell("llama.cpp resident, repacked", "llama", None, decode=3 * tokens, extra=("--no-mmap",)))
    return found


@dataclass
class Measured:
    """What has been measured so far; `file` None: kept in memory alone."""

    file: Path | None
    settings: dict[str, Any]
    rates: list[float]
    runs: dict[str, list[dict[str, Any]]]

    @classmethod
    def start(cls, file: Path | None, settings: dict[str, Any]) -> Self:
        """Goes on with what the file holds, if it was measured with the same settings."""
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            if kept["settings"] == settings:
                count = sum(len(runs) for runs in kept["runs"].values())
                say(f"going on with {count} measurements of {file}")
                return cls(file, settings, kept["rates"], kept["runs"])
        return cls(file, settings, [], {})

    def keep(self) -> None:
        if self.file is not None:
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(
                json.dumps({"settings": self.settings, "rates": self.rates, "runs": self.runs}, indent=1)
            )
            temporary.replace(self.file)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # read-ahead and cgroups are put back
    arguments = parse()
    chosen = choose(arguments)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "keep", "repeats")}
    done = Measured.start(arguments.keep, settings | {"commit": provenance()["commit"]})
    for round_ in range(arguments.repeats):
        if len(done.rates) <= round_:
            done.rates.append(device_rate(arguments.store))
            done.keep()
        say(f"round {round_ + 1}: device {done.rates[round_] / 1e9:.2f} GB/s")
        for cell in chosen:
            runs = done.runs.setdefault(cell.name, [])
            if len(runs) > round_ or (cell.repeats is not None and round_ >= cell.repeats):
                continue
            runs.append(measure_beside_device(cell, arguments))
            done.keep()
            say_run(cell, runs[-1])
    rates = [*done.rates, device_rate(arguments.store)]
    write_result(
        arguments.out,
        {
            "device_bytes_per_s": spread(rates),
            "cells": {cell.name: summary(runs) for cell in chosen if (runs := done.runs.get(cell.name))},
            "shares_of_bound": shares_of_bound(done.runs),
            "runs": done.runs,
        },
    )
    if arguments.keep is not None:
        arguments.keep.unlink(missing_ok=True)
    say(f"written to {arguments.out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--gguf")
    parser.add_argument("--llama-python")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--resident-memory", default="20GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--device", help="the disk, as in /sys/block (default: the one that holds STORE)")
    parser.add_argument("--only", nargs="*", help="run only the cells whose name contains one of these")
    parser.add_argument("--skip", nargs="*", default=[], help="leave out the cells whose name contains one of these")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep what was measured here; go on from it")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    arguments.device = arguments.device or block_device(arguments.store)
    if arguments.device is None:
        parser.error(f"{arguments.store}: the system does not say which disk this is; name it with --device")
    return arguments


def choose(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for; without a peer stoker's alone."""
    chosen = [c for c in cells(arguments.quick) if not arguments.only or any(word in c.name for word in arguments.only)]
    chosen = [c for c in chosen if not any(word in c.name for word in arguments.skip)]
    if arguments.gguf is None or arguments.llama_python is None:
        chosen = [c for c in chosen if c.engine == "stoker"]
    return chosen


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_run(cell: Cell, run: dict[str, Any]) -> None:
    say(
        f"  {cell.name}: prefill {run['prefill_tok_s']:.2f} tok/s, decode {run['decode_tok_s']:.2f} tok/s, "
        f"{run['decode_bytes_per_token'] / 1e6:.0f} MB/token, cgroup {run['cgroup_peak_bytes'] / GIB:.2f} GiB, "
        f"RSS {run['rss_peak_bytes'] / GIB:.2f} GiB, {run['wall_s']:.0f} s"
    )


def measure_beside_device(cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    """Streaming runs also get the device's own rate around them: it drifts within a round."""
    if cell.engine != "stoker" or cell.limit_gib is None:
        return measure(cell, arguments)
    before = device_rate(arguments.store, seconds=2.0)
    run = measure(cell, arguments)
    return run | {"device_bytes_per_s": (before + device_rate(arguments.store, seconds=2.0)) / 2}


def shares_of_bound(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Bound / measured time of the streaming cells. The bound is the larger of reading the bytes that were demanded, at
    the device's rate around the run, and computing, which is what the best resident run took. What was read ahead and
    never asked for is no part of it: all that a run wasted, in its prompt too, is taken off its answer's bytes."""
    resident = runs.get("stoker resident", [])
    streaming = {
        name: [run for run in streamed if "device_bytes_per_s" in run]
        for name, streamed in runs.items()
        if any("device_bytes_per_s" in run for run in streamed)
    }
    if not resident:
        return {}
    token_s = 1 / max(run["decode_tok_s"] for run in resident)
    prompt_s = min(run["prefill_s"] for run in resident)

    def decode(run: dict[str, Any]) -> float:
        wasted_bytes = run["stats"]["prefetch_wasted_bytes"] / run["decode_tokens"]
        reading_s = (run["decode_bytes_per_token"] - wasted_bytes) / run["device_bytes_per_s"]
        return float(max(reading_s, token_s) * run["decode_tok_s"])

    def prefill(run: dict[str, Any]) -> float:
        return float(max(run["prefill_bytes"] / run["device_bytes_per_s"], prompt_s) / run["prefill_s"])

    return {
        name: {"decode": spread([decode(run) for run in whole]), "prefill": spread([prefill(run) for run in whole])}
        for name, whole in streaming.items()
    }


def measure(cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    model = arguments.store if cell.engine == "stoker" else arguments.gguf
    python = sys.executable if cell.engine == "stoker" else arguments.llama_python
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan_of(cell, arguments.vocabulary), file)
        file.flush()
        command = [
            python,
            worker.__file__,
            cell.engine,
            model,
            "--ids",
            file.name,
            "--threads",
            str(arguments.threads),
            *cell.extra,
        ]
        if cell.engine == "stoker":
            memory = f"{cell.limit_gib}GiB" if cell.limit_gib else arguments.resident_memory
            command += ["--memory", memory]
        limit = int(cell.limit_gib * GIB) if cell.limit_gib else None
        with read_ahead(cell.read_ahead_kib, arguments.device):
            result = run_confined(command, limit)
        return result.pop("sessions")["second"] | result if cell.second else result


WARM_UP = 4  # tokens before those that are measured


def plan_of(cell: Cell, vocabulary: int) -> dict[str, Any]:
    """What the worker is to run: the same ids for every engine and every round."""
    if not cell.second:
        return token_ids(cell.prompt, cell.decode + WARM_UP, vocabulary)
    names = {"first": 1, "second": 0}
    return {
        "sessions": [
            {"name": name, "warmup": WARM_UP} | token_ids(cell.prompt, cell.decode + WARM_UP, vocabulary, more)
            for name, more in names.items()
        ]
    }


def token_ids(prompt: int, decode: int, vocabulary: int, more: int = 0) -> dict[str, list[int]]:
    """Random ids; others for another `more`."""
    generator = random.Random(20261129 + more)
    return {
        "prompt": [generator.randrange(vocabulary) for _ in range(prompt)],
        "decode": [generator.randrange(vocabulary) for _ in range(decode)],
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    keys = (
        "prefill_tok_s",
        "decode_tok_s",
        "decode_ms_median",
        "decode_bytes_per_token",
        "prefill_bytes",
        "hit_rate",
        "stall_ms_per_token",
        "rss_peak_bytes",
        "cgroup_peak_bytes",
        "device_bytes",
        "major_faults",
        "load_s",
    )
    return {key: spread([r[key] for r in results]) for key in keys if all(r.get(key) is not None for r in results)}


if __name__ == "__main__":
    main()
