"""Runs the variants of a plan round by round, each from cold, and hands back what every run measured.

Our own variants run one after the other in this process; with a peer every run is a process of its own in a memory
cgroup. Owns processes and caches; draws no conclusions.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stoker import __version__
from stoker.bench import worker
from stoker.bench.cases import COLD, MEASURED, Plan, Variant
from stoker.bench.confine import run_confined
from stoker.errors import StokerError
from stoker.native.io import cached_bytes, drop_cache

Run = dict[str, Any]
Say = Callable[[str], None]


def run_rounds(plan: Plan, say: Say, after_round: Callable[[], None] | None = None) -> dict[str, list[Run]]:
    """Every run of every variant by the variant's name, in the order of the rounds."""
    runs: dict[str, list[Run]] = {variant.name: [] for variant in plan.variants}
    if not plan.separate and len(plan.variants) * plan.repeats > 1:
        say("loading once, unmeasured, so that every run finds the same room")
        _settle(plan)
    for round_ in range(plan.repeats):
        for variant in plan.order(round_):
            say(f"round {round_ + 1} of {plan.repeats}: {variant.name}")
            runs[variant.name].append({"round": round_, **run_once(plan, variant, last=round_ == plan.repeats - 1)})
        if after_round is not None:
            after_round()
    return runs


def run_once(plan: Plan, variant: Variant, last: bool = True) -> Run:
    """One variant, loaded afresh: its sessions by name, ledger, peak memory, and whether cold was cold."""
    files = weight_files(variant)
    if not variant.direct:
        for file in files:
            drop_cache(file)
    cached_before = sum(cached_bytes(file) for file in files)
    started = time.monotonic()
    result = _in_a_process(plan, variant) if plan.separate else _here(plan, variant, record=last)
    result["sessions"] = {name: figures for name, figures in result["sessions"].items() if name in MEASURED}
    if COLD in result["sessions"]:
        result["cold"] = how_cold(variant, cached_before, result)
    return {"wall_s": time.monotonic() - started, **result}


def weight_files(variant: Variant) -> list[Path]:
    """The files that hold a variant's weights."""
    path = Path(variant.model)
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def how_cold(variant: Variant, cached_before: int, result: Run) -> dict[str, Any]:
    """By what the cold session was cold, and whether that was seen: `verified` is False where it may have been warm."""
    if variant.direct:
        return {"by": "direct reads", "verified": bool(result["direct_reads"]), "cached_bytes": cached_before}
    return {"by": "page cache dropped", "verified": cached_before == 0, "cached_bytes": cached_before}


def _settle(plan: Plan) -> None:
    """What libraries take once and keep (about 40 MB) is taken before the first run, not in it."""
    first = plan.variants[0]
    engine = worker.StokerEngine(first.model, dict(first.options))
    worker.session(engine, list(plan.sessions[0].prompt[:2]), list(plan.sessions[0].decode[:1]))
    engine.close()


def _here(plan: Plan, variant: Variant, record: bool) -> Run:
    """In this process. Memory is handed back before and after, so that each variant finds the same room."""
    _hand_back()
    recorder = _recorder(plan, variant) if record and plan.trace is not None else None
    try:
        engine = worker.StokerEngine(
            variant.model,
            dict(variant.options),
            preload=plan.preload,
            routes=plan.routes,
            route_weights=plan.route_weights,
            recorder=recorder,
        )
        if recorder is not None:
            recorder.describe(ledger=engine.runtime.ledger())
        try:
            sessions = {
                one.name: worker.session(engine, list(one.prompt), list(one.decode), one.warmup)
                for one in plan.sessions
            }
            return {"sessions": sessions, "load_s": engine.load_s, **engine.about(), "rss_peak_bytes": _peak_rss()}
        finally:
            engine.close()
    finally:
        if recorder is not None:
            recorder.close()
        _hand_back()


def _recorder(plan: Plan, variant: Variant) -> Any:
    from stoker.store.reader import open_store
    from stoker.trace.writer import TraceWriter

    assert plan.trace is not None
    experts = max(pool.experts for pool in open_store(variant.model).pools)
    about = {"model": variant.model, "stoker": __version__, "experts": experts, "bench": variant.name}
    return TraceWriter(plan.trace, {**about, **variant.options, "routes": plan.routes})


def _hand_back() -> None:
    """Return freed memory to the system and start the peak of resident memory anew (Linux; elsewhere it goes on)."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss() -> int | None:
    """Peak resident bytes since `_hand_back`; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _in_a_process(plan: Plan, variant: Variant) -> Run:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"sessions": [session.as_dict() for session in plan.sessions]}, file)
        file.flush()
        return _confined(_command(plan, variant, file.name), plan.limit_bytes)


def _command(plan: Plan, variant: Variant, ids: str) -> list[str]:
    common = ["--ids", ids, "--threads", str(plan.threads), "--ctx-size", str(plan.ctx_size)]
    if variant.engine != "stoker":
        assert plan.peer_python is not None
        flags = [] if variant.mmap else ["--no-mmap"]
        return [plan.peer_python, worker.__file__, "llama", variant.model, *common, *flags]
    options = variant.options
    named = [
        name
        for name in ("memory", "path", "policy", "depth", "prefetch", "routing", "adapter")
        if options.get(name) is not None
    ]
    flags = [word for name in named for word in (f"--{name}", str(options[name]))]
    flags += [] if variant.direct else ["--buffered"]
    flags += ["--warm"] if plan.preload else []
    return [sys.executable, "-m", worker.__name__, "stoker", variant.model, *common, *flags]


def _confined(command: Sequence[str], limit_bytes: int | None) -> Run:
    """In a cgroup. Without a limit and without the right to make one, in a plain process (`confined` False)."""
    if limit_bytes is None and os.geteuid() != 0:
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode:
            raise StokerError("the worker failed", where=" ".join(command), got=child.stderr[-2000:])
        return {**json.loads(child.stdout.strip().splitlines()[-1]), "confined": False}
    return {**run_confined(list(command), limit_bytes, timeout_s=3600), "confined": limit_bytes is not None}
