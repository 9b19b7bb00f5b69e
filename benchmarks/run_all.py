"""Reproduces the engine table: makes the models, measures in one go, writes README's table. Called by `run_all`.

    benchmarks/run_all [--llama-python PY] [--store DIR] [--gguf FILE] [--plan]

Prints a plan with minutes first: what cannot run here is left out, with the reason. What a run that was killed had
measured is used by the next one with the same commit and options; finished parts are not run again within a day unless
--again is given. Needs root for the engine table (memory cgroups), and a machine that does nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
sys.path.insert(0, str(ROOT))

from stoker.bench.confine import die_with_parent  # noqa: E402
from stoker.bench.provenance import provenance  # noqa: E402
from stoker.quant.formats import WeightFormat  # noqa: E402
from stoker.store.manifest import NAME as MANIFEST  # noqa: E402
from stoker.store.synth import RandomWeights, store_bytes  # noqa: E402
from stoker.store.synth_gguf import gguf_bytes  # noqa: E402
from stoker.store.synth_shapes import shape  # noqa: E402

SHAPE = "qwen3-30b-a3b"
GIB = 1 << 30
RESIDENT_BYTES = 18 * GIB
FRESH_S = 24 * 3600
SYNTH_BYTES_PER_MINUTE = 12e9
"""Slow disks write less: the plan's minutes are for the machine whose results are committed."""


@dataclass(frozen=True)
class Part:
    """One command. `writes`: what proves that it finished. `why_not`: why it cannot run here, None if it can."""

    name: str
    minutes: float
    command: tuple[str, ...]
    writes: Path
    why_not: str | None = None
    reuse: bool = False  # a model: once written, it stays
    note: str = ""


def main() -> None:
    arguments = parse()
    parts = plan(arguments)
    started = time.monotonic()
    show(parts, arguments)
    if arguments.plan:
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in parts:
        left = arguments.minutes - (time.monotonic() - started) / 60
        if (reason := part.why_not or kept(part, arguments)) is not None:
            say(f"{part.name}: {reason}")
        elif part.minutes > left:
            failed.append(f"{part.name}: {part.minutes:.0f} minutes are more than the {left:.0f} that are left")
            say(failed[-1])
        elif not run(part, arguments):
            failed.append(f"{part.name} failed")
    if arguments.readme:
        publish(parts, arguments)
    say(f"{(time.monotonic() - started) / 60:.1f} minutes" + "".join(f"\n  {text}" for text in failed))
    sys.exit(1 if failed else 0)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run_all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ROOT / "models" / "bench"
    parser.add_argument("--store", type=Path, help="the synthetic store; made if it is not there")
    parser.add_argument("--gguf", type=Path, help="the same shape for the peer; made if it is not there")
    parser.add_argument(
        "--llama-python", metavar="PY", help="a Python with llama-cpp-python; else the peer is left out"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the engine table (default 2)")
    parser.add_argument("--minutes", type=float, default=40, help="what does not fit in is left out (default 40)")
    parser.add_argument("--only", nargs="*", metavar="PART", help="only these parts (models are made as needed)")
    parser.add_argument("--layers", type=int, help="a trial with fewer layers: its results stay in --work")
    parser.add_argument("--work", type=Path, default=models / "run", help="logs and what is measured so far")
    parser.add_argument("--again", action="store_true", help="run finished parts again")
    parser.add_argument("--plan", action="store_true", help="print the plan and stop")
    arguments = parser.parse_args(words)
    suffix = f"-{arguments.layers}l" if arguments.layers else ""
    arguments.store = arguments.store or models / f"{SHAPE}{suffix}"
    arguments.gguf = arguments.gguf or models / f"{SHAPE}{suffix}-q4_0.gguf"
    arguments.readme = arguments.layers is None
    arguments.llama_python = arguments.llama_python or os.environ.get("STOKER_LLAMA_PYTHON")
    return arguments


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> list[Part]:
    """All parts in the order in which they run."""
    no_peer = without_peer(arguments)
    models = [store_part(arguments)] + ([gguf_part(arguments)] if no_peer is None else [])
    parts = [*models, *small_parts(arguments), engine_part(arguments, no_peer, models)]
    if arguments.only is None:
        return parts
    if unknown := set(arguments.only) - {part.name for part in parts}:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in parts)}")
    return [part for part in parts if part.name in arguments.only or ("engine" in arguments.only and part in models)]


def store_part(arguments: argparse.Namespace) -> Part:
    found = shape(SHAPE, arguments.layers)
    nbytes = store_bytes(found, RandomWeights(found, WeightFormat("affine", 4, 64), 0))
    command = stoker("synth", SHAPE, str(arguments.store), *layers(arguments))
    return model_part("store", nbytes, command, arguments.store / MANIFEST, wrong_store(arguments))


def gguf_part(arguments: argparse.Namespace) -> Part:
    nbytes = gguf_bytes(shape(SHAPE, arguments.layers))
    command = stoker("synth", SHAPE, "--gguf-only", "--gguf", str(arguments.gguf), *layers(arguments))
    wrong = None
    if arguments.gguf.exists() and abs(arguments.gguf.stat().st_size - nbytes) > 0.01 * nbytes:
        wrong = f"{arguments.gguf} is not of this shape: name another --gguf"
    return model_part("gguf", nbytes, command, arguments.gguf, wrong)


def model_part(name: str, nbytes: int, command: tuple[str, ...], writes: Path, wrong: str | None) -> Part:
    """A model that is made once; it needs room on the disk."""
    folder = next(parent for parent in writes.parents if parent.exists())
    free = psutil.disk_usage(str(folder)).free
    if wrong is None and not writes.exists() and free < nbytes + GIB:
        wrong = f"needs {nbytes / 1e9:.0f} GB on the disk of {folder}, {free / 1e9:.0f} GB are free"
    return Part(name, nbytes / SYNTH_BYTES_PER_MINUTE, command, writes, wrong, reuse=True)


def wrong_store(arguments: argparse.Namespace) -> str | None:
    if not (arguments.store / MANIFEST).exists():
        return None
    config = json.loads((arguments.store / "config.json").read_text())
    wanted = shape(SHAPE, arguments.layers).text
    if all(config.get(key) == wanted[key] for key in ("num_hidden_layers", "num_experts", "moe_intermediate_size")):
        return None
    return f"{arguments.store} is not of this shape: name another --store"


def without_peer(arguments: argparse.Namespace) -> str | None:
    """Why llama.cpp cannot run; None if it can."""
    python = arguments.llama_python
    if python is None:
        return "no --llama-python PY with llama-cpp-python was given: the table has no peer"
    found = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    return None if found.returncode == 0 else f"{python} cannot import llama_cpp: {found.stderr.strip()[-200:]}"


def small_parts(arguments: argparse.Namespace) -> list[Part]:
    """What the engine's figures are read against."""
    demo = ROOT / "models" / "demo" / "store"
    no_demo = None if (demo / MANIFEST).exists() else "the demo model is not there: run ./demo once"

    def part(name: str, minutes: float, out: str, *words: Any, why_not: str | None = None) -> Part:
        file = results(arguments) / f"{name}.json"
        return Part(name, minutes, python(f"{name}.py", *words, out, file), file, why_not)

    return [
        part("disk", 1.2, "--out", "--dir", arguments.store.parent),
        part("kernels", 1.0, "--output"),
        part("step_overhead", 0.5, "--output"),
        part("trace_overhead", 1.5, "--output", f"demo={demo}", why_not=no_demo),
        part("simulate", 4.0, "--out"),
    ]


def engine_part(arguments: argparse.Namespace, no_peer: str | None, models: list[Part]) -> Part:
    """The table itself. Cells that do not fit into this machine's memory are left out."""
    why_not = next((f"{part.name}: {part.why_not}" for part in models if part.why_not), None)
    if why_not is None and os.geteuid() != 0:
        why_not = "needs root: memory cgroups, caches dropped between runs"
    words: list[Any] = ["engine.py", arguments.store, "--quick", "--repeats", arguments.rounds]
    words += ["--out", results(arguments) / "engine.json", "--keep", arguments.work / "engine.part.json"]
    if no_peer is None:
        words += ["--gguf", arguments.gguf, "--llama-python", arguments.llama_python]
    skipped = [word for word, needed in (("resident", RESIDENT_BYTES), ("8GiB", 8.5 * GIB), ("4GiB", 4.5 * GIB))
               if psutil.virtual_memory().available < needed]  # fmt: skip
    words += ["--skip", *skipped] if skipped else []
    minutes = 2.3 + arguments.rounds * (4.1 + (4.8 if no_peer is None else 0.0))
    note = f", without {', '.join(skipped)}: not enough memory is free" if skipped else ""
    return Part("engine", minutes, python(*words), results(arguments) / "engine.json", why_not, note=note)


def results(arguments: argparse.Namespace) -> Path:
    """Where results go: beside the committed ones, or to --work for a trial."""
    return HERE / "results" if arguments.readme else arguments.work


def python(script: Any, *words: Any) -> tuple[str, ...]:
    return (sys.executable, str(HERE / script), *(str(word) for word in words))


def stoker(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "from stoker.cli.main import main; main()", *words)


def layers(arguments: argparse.Namespace) -> list[str]:
    return ["--layers", str(arguments.layers)] if arguments.layers else []


def show(parts: list[Part], arguments: argparse.Namespace) -> None:
    say(f"load {os.getloadavg()[0]:.1f}, {psutil.virtual_memory().available / GIB:.1f} GiB of memory free")
    if os.getloadavg()[0] > 0.7:
        say("other programs are running: the figures will be lower than the machine can do")
    if (no_peer := without_peer(arguments)) is not None:
        say(no_peer)
    left = [part for part in parts if part.why_not is None and kept(part, arguments) is None]
    for part in parts:
        reason = part.why_not or kept(part, arguments)
        say(
            f"  {part.name:15} " + (f"left out: {reason}" if part.why_not else reason or f"{part.minutes:4.1f} minutes")
        )
    say(f"about {sum(part.minutes for part in left):.0f} minutes")


# ---- running ---------------------------------------------------------------------------------------------------------


def stamp(part: Part, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a finished part was made with."""
    return {"commit": provenance()["commit"], "command": list(part.command)}


def stamp_file(part: Part, arguments: argparse.Namespace) -> Path:
    return Path(arguments.work) / f"{part.name}.done.json"


def kept(part: Part, arguments: argparse.Namespace) -> str | None:
    """Why a part need not run: its result is there. None if it must run."""
    if not part.writes.exists():
        return None
    if part.reuse:
        return f"{part.writes} is there"
    file = stamp_file(part, arguments)
    if arguments.again or not file.exists() or json.loads(file.read_text()) != stamp(part, arguments):
        return None
    age_s = time.time() - file.stat().st_mtime
    return f"done {age_s / 60:.0f} minutes ago (--again repeats it)" if age_s < FRESH_S else None


def run(part: Part, arguments: argparse.Namespace) -> bool:
    """Run a part; its output goes to the terminal and to a log. True when it finished and wrote its result."""
    part.writes.parent.mkdir(parents=True, exist_ok=True)
    log, started = arguments.work / f"{part.name}.log", time.monotonic()
    say(f"{part.name}: {part.minutes:.1f} minutes, log in {log}")
    with log.open("w") as file, subprocess.Popen(
        part.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            print(f"  {line}", end="", file=sys.stderr, flush=True)
            file.write(line)
    fine = child.returncode == 0 and part.writes.exists()
    if fine:
        stamp_file(part, arguments).write_text(json.dumps(stamp(part, arguments)))
    ending = "done" if fine else f"exit {child.returncode}"
    say(f"{part.name}: {ending} in {(time.monotonic() - started) / 60:.1f} minutes")
    return fine


def publish(parts: list[Part], arguments: argparse.Namespace) -> None:
    """README's table, where the engine was measured now or within a day."""
    engine = next((part for part in parts if part.name == "engine"), None)
    if engine is None or engine.why_not or not stamp_file(engine, arguments).exists():
        say("README's table stays: the engine was not measured")
        return
    subprocess.run(python("table.py"), check=True)
    say("README's table is written")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
