"""Measures the routing modes of a store for the quality contract: what each costs in KL and perplexity, how fast it is.

Every mode is loaded by itself inside the same budget; quality on calibration text against the gates' own routes, speed
by decoding on the same text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.adapter.adapter import model_top_k
from stoker.errors import OptionError
from stoker.evaluate.models import StoreScorer
from stoker.evaluate.results import ALL
from stoker.evaluate.run import Text, evaluate, tokenised
from stoker.generate.quality import MeasuredMode
from stoker.runtime.model import Options, Runtime, load
from stoker.store.reader import Store

SPEED_TOKENS = 96
SPEED_WINDOWS = 2
WARM_TOKENS = 16  # of each window's decode, not counted


@dataclass(frozen=True)
class Candidate:
    """A mode by name, and the fields of Options that make it; none: exact."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


EXACT = Candidate("exact")


def measure_modes(
    store: Path,
    candidates: Sequence[Candidate],
    text: Text,
    options: Options,
    say: Callable[[str], None] = lambda _: None,
) -> list[MeasuredMode]:
    """Exact first, then each candidate. Raises what loading one raises."""
    found = []
    for candidate in (EXACT, *candidates):
        try:
            found.append(_measured(store, candidate, text, options))
            say(described(found[-1]))
        except OptionError as error:  # a mode that does not fit the model's routers
            say(f"{candidate.name}: left out: {error.what}")
    return found


def _measured(store: Path, candidate: Candidate, text: Text, options: Options) -> MeasuredMode:
    with ExitStack() as stack:
        runtime = stack.enter_context(load(store, replace(options, **candidate.options)))
        plain = stack.enter_context(load(store, options)) if candidate.options.get("adapter") else None
        return measure_mode(runtime, candidate, text, plain)


def measure_mode(runtime: Runtime, candidate: Candidate, text: Text, plain: Runtime | None = None) -> MeasuredMode:
    """One loaded mode. Exact is its own reference: it costs nothing by definition, and only its speed is measured.

    plain: the same store without the mode, where more than routes may differ; None: the gates' routes in this one.
    """
    ms, read_bytes = decode_speed(runtime, text)
    if not candidate.options:
        return MeasuredMode(candidate.name, {}, 0.0, 0.0, 1.0, 1.0, ms, read_bytes, 0)
    result = evaluate(runtime, text, reference=None if plain is None else StoreScorer(plain))
    against = result["against_reference"]["all"]
    domains = [one for name, one in result["against_reference"].items() if name != ALL]
    return MeasuredMode(
        name=candidate.name,
        options=candidate.options,
        kl=against["kl_mean"],
        kl_high=against["kl_mean_95"][1],
        ratio=against["ratio"],
        ratio_high=against["ratio_95"][1],
        ms_per_token=ms,
        read_bytes_per_token=read_bytes,
        tokens=result["tokens"],
        fed=result["fed"],
        adapter_fingerprint=runtime.adapter_fingerprint,
        slot_agreement=result.get("routes_against_gate", {}).get("slot_agreement", 1.0),
        kl_worst=max(one["kl_mean"] for one in domains),
        ratio_worst=max(one["ratio"] for one in domains),
    )


def decode_speed(runtime: Runtime, text: Text) -> tuple[float, float]:
    """Median milliseconds and mean bytes read a token, over decode steps that follow the text."""
    spent_ms: list[float] = []
    read_bytes = 0
    for window in tokenised(runtime, text)[:SPEED_WINDOWS]:
        prompt, answer = window.ids[: text.prompt_tokens], window.ids[text.prompt_tokens :][:SPEED_TOKENS]
        sequence = runtime.new_sequence()
        sequence.prompt_tokens = len(prompt)
        try:
            runtime.prefill(sequence, prompt)
            for place, token in enumerate(answer):
                before, began = _bytes(runtime), time.perf_counter()
                runtime.decode([sequence], [token])
                if place >= WARM_TOKENS:
                    spent_ms.append(1000 * (time.perf_counter() - began))
                    read_bytes += _bytes(runtime) - before
        finally:
            sequence.close()
    return statistics.median(spent_ms), read_bytes / len(spent_ms)


def _bytes(runtime: Runtime) -> int:
    counters = runtime.counters()
    return int(counters["demand_bytes"] + counters["prefetch_bytes"])


def described(mode: MeasuredMode) -> str:
    """One line for people."""
    line = f"{mode.name:28}{mode.ms_per_token:9.2f} ms a token{mode.read_bytes_per_token / 1e6:9.2f} MB read"
    if mode.options:
        line += f"   KL {mode.kl:.5f} (up to {mode.kl_high:.5f}, worst domain {mode.kl_worst:.5f})"
        line += f"   perplexity x {mode.ratio:.4f} (up to {mode.ratio_high:.4f}, worst domain {mode.ratio_worst:.4f})"
        line += f"   experts kept {mode.slot_agreement:.1%}"
    return line


LEADS = (0.02, 0.05, 0.1, 0.2)  # lambda of cache-aware routing
ROSTERS = (4, 2)  # rosters of a quarter and of half of the experts


def candidates(store: Store, adapters: Sequence[Path]) -> list[Candidate]:
    """The modes that there are for a store: cache-aware, rosters, and those of the adapters at hand."""
    experts, top_k = min(pool.experts for pool in store.pools), model_top_k(store)
    found = [Candidate(f"cache-aware {lead:g}", {"routing": "cache-aware", "cache_lambda": lead}) for lead in LEADS]
    sizes = [experts // share for share in ROSTERS if experts // share >= top_k]
    found += [Candidate(f"roster {size}", {"routing": "roster", "roster_size": str(size)}) for size in sizes]
    return found + [Candidate(f"adapter {directory.name}", {"adapter": str(directory)}) for directory in adapters]
