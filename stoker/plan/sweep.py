"""Many policies at many sizes over many traces, on all cores. Owns the processes; replay.py does the work.

Workers start fresh (spawn), load the traces once, and take one (trace, policy, size) at a time, the longest first.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Any

from stoker.errors import OptionError, StokerError
from stoker.plan.curves import greedy_for
from stoker.plan.replay import check_policy, relabelled, replay, replay_global
from stoker.plan.routes import Routes, load_routes

PARTITIONS = ("per-layer", "global", "greedy")
_loaded: dict[str, Routes] = {}


@dataclass(frozen=True)
class Cell:
    """One replay: `slots` a layer on average; "global" shares slots * layers, "greedy" deals them out by curves."""

    path: str
    policy: str
    slots: int
    partition: str = "per-layer"
    warm_up_steps: int | None = None
    most_steps: int | None = None


def sweep(cells: Sequence[Cell], workers: int = 0, done: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
    """The figures of every cell, in their order, with "trace" and "seconds". `workers` 0: one for each usable core.

    `done` is called with the number of finished cells. An error of any cell ends the sweep and is raised.
    """
    for cell in cells:
        check_policy(cell.policy)
        if cell.partition not in PARTITIONS:
            raise OptionError(
                "unknown partition", where="partition", expected=", ".join(PARTITIONS), got=cell.partition
            )
    workers = min(workers or usable_cores(), len(cells))
    results: list[dict[str, Any]] = [{} for _ in cells]
    if workers <= 1:
        for index, cell in enumerate(cells):
            results[index] = run_cell(cell)
            if done:
                done(index + 1)
        return results
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_guarded, cell): index for index, cell in _longest_first(cells)}
        try:
            for count, future in enumerate(as_completed(futures), 1):
                figures = future.result()
                if isinstance(figures, tuple):
                    raise OptionError(figures[0]) if figures[1] == 2 else StokerError(figures[0])
                results[futures[future]] = figures
                if done:
                    done(count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def run_cell(cell: Cell) -> dict[str, Any]:
    """One replay in this process."""
    started = perf_counter()
    routes = _routes(cell.path)
    if cell.most_steps is not None:
        routes = routes.between(0, cell.most_steps)
    pools = len(routes.streams)
    if cell.partition == "global":
        outcome = replay_global(routes, cell.policy, cell.slots * pools, cell.warm_up_steps)
    elif cell.partition == "greedy":
        slots = greedy_for(routes, cell.slots * pools)
        warm_up = max(cell.warm_up_steps or 0, routes.steps // 2)  # never judged on what it was fitted to
        outcome = relabelled(replay(routes, cell.policy, slots, warm_up), "greedy")
    else:
        outcome = replay(routes, cell.policy, cell.slots, cell.warm_up_steps)
    return {
        "trace": routes.name,
        "slots_per_layer": cell.slots,
        **outcome.figures(),
        "seconds": perf_counter() - started,
    }


def sizes(path: str, text: str) -> list[int]:
    """Slots a layer from `16,32` or `12.5%,25%` for the routes of one file."""
    return parse_sizes(text, _routes(path))


def parse_sizes(text: str, routes: Routes) -> list[int]:
    """Slots a layer: numbers, or shares of the experts of a layer."""
    found = []
    for part in text.split(","):
        try:
            share = part.strip().endswith("%")
            value = round(float(part.strip()[:-1]) / 100 * routes.experts) if share else int(part)
        except ValueError:
            raise OptionError("slots a layer", where="--slots", expected="16,32 or 12.5%,25%", got=part) from None
        if value < 1:
            raise OptionError("a cache without slots", where="--slots", expected=f"{routes.k} or more", got=part)
        if value > routes.experts:
            raise OptionError(
                "more slots than a layer has experts", where="--slots", expected=f"at most {routes.experts}", got=part
            )
        found.append(value)
    return found


def add_gap_to_floor(rows: Sequence[dict[str, Any]]) -> None:
    """Where the same sweep has MIN: misses above the floor, and the share of LRU's distance to it recovered."""
    key = ("trace", "slots_per_layer", "partition")
    by_policy = {(*(row[name] for name in key), row["policy"]): row["misses_per_token"] for row in rows}
    for row in rows:
        where = tuple(row[name] for name in key)
        floor, lru = by_policy.get((*where, "min")), by_policy.get((*where, "lru"))
        misses = row["misses_per_token"]
        row["misses_above_floor"] = (misses - floor) / floor if floor else None
        row["gap_recovered"] = (lru - misses) / (lru - floor) if lru and floor and lru > floor else None


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _routes(path: str) -> Routes:
    if path not in _loaded:
        _loaded[path] = load_routes(path)
    return _loaded[path]


def _guarded(cell: Cell) -> dict[str, Any] | tuple[str, int]:
    """Errors with keyword arguments do not survive pickling: they travel as (text, exit code)."""
    try:
        return run_cell(cell)
    except StokerError as error:
        return (error.render(), error.exit_code)


def _longest_first(cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
    """Offline and shared caches take longest; starting them first keeps all cores busy to the end."""
    return sorted(enumerate(cells), key=lambda pair: (pair[1].partition == "per-layer", pair[1].slots))
