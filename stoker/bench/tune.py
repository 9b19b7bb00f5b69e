"""Tries a plan's candidates on the model itself, in pairs of blocks that take turns, inside the budget and the time.

One runtime is loaded at a time, so the budget holds throughout. Both sides of a pair decode the same tokens from an
empty cache that the same prompt filled. Decides nothing: stoker/plan/tuner.py does.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.bench.worker import StokerEngine
from stoker.errors import StokerError
from stoker.plan.planner import Choice
from stoker.plan.tuner import Trial, wins, worth_another

PROMPT_TOKENS = 96
DECODE_TOKENS, WARM_UP = 20, 2
MOST_PAIRS = 4
TEXT = (
    "The lighthouse keeper kept a log of every ship that passed. On the first of March the wind turned north, and by "
    "noon the harbour was grey with sleet. He wrote down the names, the hour and the course of each vessel, as his "
    "father had done before him, and lit the lamp early. What he did not write down was the small boat without a light "
    "that came in after midnight, nor the stranger who knocked at his door and asked, in an accent he could not place, "
    "for the way to the old mine behind the hills."
)


@dataclass(frozen=True)
class Request:
    """What is tuned, inside which budget; `seconds` for everything; `routes`: of a file, in the gates' place."""

    model: Path
    budget_bytes: int
    threads: int | None
    ctx_size: int
    seconds: float = 120.0
    routes: str | None = None


def tune(
    request: Request,
    start: Choice,
    candidates: Sequence[tuple[str, Choice]],
    say: Callable[[str], None] = lambda line: None,
    planned: Choice | None = None,
) -> tuple[Choice, list[Trial]]:
    """The choice that won, and every trial. Stops in time: a block is begun only when one more fits.

    planned: what the candidates are changes of, where `start` is something else (what an earlier tune kept).
    """
    clock = _Clock(request.seconds)
    bench = _Bench(request, clock)
    best, trials = start, []
    for change, candidate in candidates:
        proposed = _applied(best, planned or start, candidate)
        if proposed == best:
            continue
        if not clock.has_room(2):
            say(f"{change}: not tried, the time is up")
            continue
        try:
            before, after = bench.pairs(best, proposed)
        except StokerError as error:
            say(f"{change}: not possible here: {error.what}")
            continue
        if len(before) < 2 and not (before and after[0] > before[0]):
            say(f"{change}: not decided, the time is up")
            continue
        trial = Trial(change, tuple(before), tuple(after), wins(before, after))
        trials.append(trial)
        say(trial.line())
        if trial.kept:
            best = proposed
    return best, trials


def _applied(best: Choice, start: Choice, candidate: Choice) -> Choice:
    """The candidate's difference from where the plan began, on top of what has won since; the plan itself whole."""
    if candidate == start:
        return candidate
    changed = {
        name: getattr(candidate, name)
        for name in ("path", "policy", "depth", "direct", "prefetch", "prefill_chunk", "slots")
        if getattr(candidate, name) != getattr(start, name)
    }
    return replace(best, **changed)


class _Clock:
    """Knows what a block takes, and whether more of them fit."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.block_s = 0.0

    def has_room(self, blocks: int) -> bool:
        return time.monotonic() + 1.1 * blocks * self.block_s < self.end


class _Bench:
    """Blocks: load, fill the cache with a prompt, time some tokens, close."""

    def __init__(self, request: Request, clock: _Clock) -> None:
        self.request, self.clock = request, clock
        self.ids: list[int] = []

    def pairs(self, one: Choice, other: Choice) -> tuple[list[float], list[float]]:
        """ms a token of each, in pairs whose order alternates, until it is clear or the time is up."""
        before: list[float] = []
        after: list[float] = []
        while worth_another(before, after, MOST_PAIRS) and (self.clock.has_room(2) or not self.clock.block_s):
            if len(before) % 2 == 0:
                first, second = self.block(one), self.block(other)
            else:
                second, first = self.block(other), self.block(one)
            before.append(first)
            after.append(second)
        return before, after

    def block(self, choice: Choice) -> float:
        """Median ms a token."""
        started = time.monotonic()
        options = {"memory": self.request.budget_bytes, "threads": self.request.threads}
        options |= {"ctx_size": self.request.ctx_size, **choice.options()}
        engine = StokerEngine(str(self.request.model), options, routes=self.request.routes)
        try:
            engine.begin()
            ids = self.ids or self._prompt(engine.runtime)
            engine.prefill(ids[:PROMPT_TOKENS])
            times = []
            for token in ids[PROMPT_TOKENS:]:
                at = time.perf_counter()
                engine.decode(token)
                times.append((time.perf_counter() - at) * 1e3)
        finally:
            engine.close()
        self.clock.block_s = max(self.clock.block_s, time.monotonic() - started)
        counted = sorted(times[WARM_UP:])
        return counted[len(counted) // 2]

    def _prompt(self, runtime: Any) -> list[int]:
        """The same ids for every block: a text where the model has a tokenizer, else random ids."""
        wanted = PROMPT_TOKENS + WARM_UP + DECODE_TOKENS
        found = list(runtime.tokenizer.encode(TEXT)) if runtime.tokenizer is not None else []
        generator = random.Random(17)
        found = found * (wanted // len(found) + 1) if found else []
        self.ids = (found or [generator.randrange(runtime.vocab_size) for _ in range(wanted)])[:wanted]
        return self.ids
