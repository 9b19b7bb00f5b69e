"""Several answers at once against one, through the batcher, each following its own stretch of recorded real routes.

    python benchmarks/serve_batch.py STORE --routes FILE [--memory 4GiB] [--rounds 3] [--batches 1 4 8]

One process; every round runs each batch size once, so that drift of the machine falls on all alike, and measures the
device's own rate before and after each. Beside tokens per second it computes what bounds them: the bytes that must be
read when a step reads the union of its experts but for those in the slots, at the device's rate. `bound` takes the
misses of a cache of as many slots by decayed frequency that may leave out what it read (the best known causal rule),
`clairvoyant` those of one that knows the future; no engine on these slots can beat the latter.
"""

import argparse
import json
import queue
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker.bench.device import device_rate
from stoker.bench.provenance import spread, write_result
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Failed, Job, Piece
from stoker.generate.model import Model
from stoker.generate.request import Request, SamplingOptions
from stoker.routing.replay import RouteReplay
from stoker.runtime.model import Options, load

RESULT = Path(__file__).parent / "results" / "serve_batch.json"
PROMPT_TOKENS = 4
HALF_LIFE = 8.0  # the best of 4 to 32 on these routes
GIB = 1 << 30


class Lanes:
    """Gives every sequence of a runtime a stretch of the trace of its own, from its first token on."""

    def __init__(self, runtime: Any, replay: RouteReplay) -> None:
        self.replay, self.starts = replay, list[int]()
        self._of: dict[int, int] = {}
        self._advance, self._new = runtime.advance, runtime.new_sequence
        runtime.advance, runtime.new_sequence = self.advance, self.new_sequence
        runtime.follow(replay)

    def new_sequence(self) -> Any:
        sequence = self._new()
        self._of[id(sequence)] = self.starts.pop(0)
        return sequence

    def advance(self, parts: Sequence[Any]) -> Any:
        flat = sorted(parts, key=lambda part: not part.decode)  # the order in which a step lays them out
        first = [self._of[id(part.sequence)] + part.sequence.length for part in flat]
        self.replay.place([at + i for at, part in zip(first, flat, strict=True) for i in range(len(part.ids))])
        return self._advance(parts)


def run(model: Model, lanes: Lanes, starts: list[int], warm: int, steps: int, vocabulary: int) -> dict[str, Any]:
    """`len(starts)` answers at once: `warm` tokens each, then `steps` measured ones while all of them run."""
    generator, batch = random.Random(0), len(starts)
    lanes.starts = list(starts)
    batcher, events = Batcher(model, parallel=batch), queue.Queue[tuple[float, Any]]()
    marks: list[tuple[float, dict[str, Any]]] = []
    said = [0]

    def listen(event: Any) -> None:
        if isinstance(event, Piece) and event.samples:
            said[0] += 1
            if said[0] in (batch * warm, batch * (warm + steps)):
                marks.append((time.perf_counter(), model.runtime.counters()))
        events.put((time.perf_counter(), event))

    prompts = [tuple(generator.randrange(vocabulary) for _ in range(PROMPT_TOKENS)) for _ in starts]
    with batcher._wake:  # all of them are admitted in one turn, so that they run side by side to the end
        for prompt in prompts:
            batcher.submit(Job(Request(prompt, SamplingOptions(), warm + steps, ignore_eos=True)), listen)
    left = batch
    while left:
        _, event = events.get(timeout=600)
        assert not isinstance(event, Failed), event
        left -= isinstance(event, Done)
    batcher.close()
    (began, before), (ended, after) = marks
    grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    seconds = ended - began
    return {
        "batch": batch,
        "tok_s": batch * steps / seconds,
        "step_ms": 1e3 * seconds / steps,
        "stall_ms": grown["stall_ns"] / 1e6 / steps,
        "read_bytes": (grown["demand_bytes"] + grown["prefetch_bytes"]) / steps,
        "hit_rate": grown["hits"] / max(1, grown["hits"] + grown["misses"]),
        "misses": grown["misses"] / steps,
        "wasted_bytes": grown["prefetch_wasted_bytes"] / steps,
        "starts": starts,
    }


def unions(routes_LTK: np.ndarray, starts: list[int], tokens: int) -> list[list[list[int]]]:
    """Per layer and step, the experts that the sequences need together, the most wanted first."""
    at = (np.asarray(starts)[:, None] + np.arange(tokens)) % routes_LTK.shape[1]
    found = []
    for routes_TK in routes_LTK:
        steps = []
        for column in at.T:
            experts, counts = np.unique(routes_TK[column], return_counts=True)
            steps.append(experts[np.argsort(-counts, kind="stable")].tolist())
        found.append(steps)
    return found


def causal_misses(steps: list[list[int]], slots: int, skip: int) -> int:
    """Decayed frequency with bypass: after a step the `slots` best of what it had at hand stay."""
    scores: dict[int, float] = {}
    kept: set[int] = set()
    weight, misses = 1.0, 0
    for index, needed in enumerate(steps):
        misses += sum(expert not in kept for expert in needed) if index >= skip else 0
        weight *= 2 ** (1 / HALF_LIFE)
        for expert in needed:
            scores[expert] = scores.get(expert, 0.0) + weight
        kept = set(sorted(kept.union(needed), key=lambda expert: -scores[expert])[:slots])
    return misses


def clairvoyant_misses(steps: list[list[int]], slots: int, skip: int) -> int:
    """Belady's rule with bypass: what is needed next the soonest stays. The fewest misses there can be."""
    next_use: list[dict[int, int]] = []
    later: dict[int, int] = {}
    for index in range(len(steps) - 1, -1, -1):
        next_use.append(dict(later))
        later.update(dict.fromkeys(steps[index], index))
    next_use.reverse()
    kept: set[int] = set()
    misses = 0
    for index, needed in enumerate(steps):
        misses += sum(expert not in kept for expert in needed) if index >= skip else 0
        soonest = sorted(kept.union(needed), key=lambda expert: next_use[index].get(expert, len(steps) + 1))
        kept = set(soonest[:slots])
    return misses


def bounds(
    routes_LTK: np.ndarray, cell: dict[str, Any], warm: int, steps: int, slots: Sequence[int], record_bytes: int
) -> dict[str, float]:
    """Bytes of a measured step by the two rules, and of its whole union."""
    per_layer = unions(routes_LTK, cell["starts"], PROMPT_TOKENS + warm + steps)
    skip = PROMPT_TOKENS + warm
    scale = record_bytes / steps
    return {
        "union_bytes": scale * sum(len(needed) for layer in per_layer for needed in layer[skip:]),
        "bound_bytes": scale * sum(causal_misses(s, n, skip) for s, n in zip(per_layer, slots, strict=True)),
        "clairvoyant_bytes": scale * sum(clairvoyant_misses(s, n, skip) for s, n in zip(per_layer, slots, strict=True)),
    }


def summary(cells: list[dict[str, Any]], singles: list[float]) -> dict[str, Any]:
    """Medians of one batch size; `ratio` is paired with the single answers of the same round."""
    names = ("tok_s", "step_ms", "stall_ms", "read_bytes", "hit_rate", "misses", "wasted_bytes", "union_bytes",
             "bound_bytes", "clairvoyant_bytes", "bound_tok_s", "clairvoyant_tok_s")  # fmt: skip
    figures = {name: spread([cell[name] for cell in cells]) for name in names}
    ratios = {
        "ratio": [cell["tok_s"] / single for cell, single in zip(cells, singles, strict=True)],
        "bound_ratio": [cell["bound_tok_s"] / single for cell, single in zip(cells, singles, strict=True)],
        "clairvoyant_ratio": [cell["clairvoyant_tok_s"] / single for cell, single in zip(cells, singles, strict=True)],
        "of_bound": [cell["tok_s"] / cell["bound_tok_s"] for cell in cells],
    }
    return figures | {name: spread(values) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--routes", required=True, help="an .npz with `experts` [L, T, K], or a stoker trace")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=24)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--prefetch", type=int, default=3)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    options = Options(
        memory=arguments.memory, threads=arguments.threads, ctx_size=1024, kv_tokens=arguments.kv_tokens,
        parallel=max(arguments.batches), policy=arguments.policy, prefetch=arguments.prefetch, depth=arguments.depth,
    )  # fmt: skip
    runtime = load(arguments.store, options)
    replay = RouteReplay.open(arguments.routes)
    lanes = Lanes(runtime, replay)
    cells: dict[int, list[dict[str, Any]]] = {batch: [] for batch in arguments.batches}
    rates: list[float] = [device_rate(arguments.store, 1.0)]
    record_bytes = max(pool.layout.record_bytes for pool in runtime.store.pools)
    slots = runtime.ledger()["slots"]
    say(f"{slots[0]} slots a layer, depth {runtime.depth}, device {rates[0] / 1e9:.2f} GB/s")
    with Model(runtime) as model:
        for round_ in range(arguments.rounds):
            for batch in arguments.batches:
                apart = replay.tokens // max(arguments.batches)
                starts = [(i * apart + round_ * 317 + (round_ if batch == 1 else 0) * apart) for i in range(batch)]
                cell = run(model, lanes, starts, arguments.warm, arguments.steps, runtime.vocab_size)
                rates.append(device_rate(arguments.store, 1.0))
                cell["device_bytes_per_s"] = sum(rates[-2:]) / 2
                cells[batch].append(cell)
                say(
                    f"round {round_ + 1}, {batch} at once: {cell['tok_s']:.2f} tok/s, step {cell['step_ms']:.0f} ms, "
                    f"stall {cell['stall_ms']:.0f} ms, {cell['read_bytes'] / 1e6:.0f} MB, hits {cell['hit_rate']:.1%}, "
                    f"wasted {cell['wasted_bytes'] / 1e6:.0f} MB, device {cell['device_bytes_per_s'] / 1e9:.2f} GB/s"
                )
        peak = model.stats()["peak_rss_bytes"]
        ledger = model.ledger()
    for batch in arguments.batches:
        for cell in cells[batch]:
            cell |= bounds(replay.experts_LTK, cell, arguments.warm, arguments.steps, slots, record_bytes)
            busy_s = (cell["step_ms"] - cell["stall_ms"]) / 1e3
            for name in ("bound", "clairvoyant"):
                cell[f"{name}_tok_s"] = batch / max(cell[f"{name}_bytes"] / cell["device_bytes_per_s"], busy_s)
    singles = [cell["tok_s"] for cell in cells[arguments.batches[0]]]
    result = {
        "device_bytes_per_s": spread(rates), "rss_peak_bytes": peak, "ledger": ledger, "depth": runtime.depth,
        "options": {
            name: Path(value).name if name == "routes" else value
            for name, value in vars(arguments).items()
            if name not in ("store", "out")
        },
        "batches": {str(batch): summary(cells[batch], singles) for batch in arguments.batches},
        "cells": cells,
    }  # fmt: skip
    for batch, figures in result["batches"].items():
        shown = {name: round(figures[name]["median"], 3) for name in
                 ("tok_s", "ratio", "bound_tok_s", "of_bound", "bound_ratio", "clairvoyant_ratio")}  # fmt: skip
        say(f"{batch}: {json.dumps(shown)}")
    write_result(arguments.out, result)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
