"""docs/metrics.md names every figure that traces, benchmarks, counters and the simulator give."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.bench.figures import RUN_SPREADS, SPREADS
from stoker.bench.worker import session
from stoker.plan.device import DeviceModel
from stoker.plan.replay import replay
from stoker.plan.roster import pinned
from stoker.plan.routes import from_array
from stoker.plan.timed import replay_timed
from stoker.residency.counters import Counters
from stoker.trace.events import TABLES, Phase, ReadClass
from stoker.trace.reader import Trace
from stoker.trace.summary import summarise
from stoker.trace.writer import TraceWriter

DOCS = Path(__file__).parents[1] / "docs"
OWN_WORDS = {"n", "mean", "p50", "p95", "p99", "max", "min", "median", "prefetch"}  # explained once, as groups


def named(page: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_]+)`", (DOCS / page).read_text()))


def keys(figures: Any) -> Iterator[str]:
    """All keys, but not what was handed in (`about`)."""
    if isinstance(figures, dict):
        for name, value in figures.items():
            yield name
            if name != "about":
                yield from keys(value)


class Still:
    """An engine that does nothing and counts nothing."""

    load_s = 0.0

    def begin(self) -> None: ...

    def prefill(self, ids: list[int]) -> None: ...

    def decode(self, token: int) -> None: ...

    def close(self) -> None: ...

    def counters(self) -> dict[str, int]:
        return dict.fromkeys(
            ("read_bytes", "hits", "misses", "reads", "stall_ns", "prefetch_bytes", "dropped_experts"), 0
        )

    def about(self) -> dict[str, Any]:
        return {}


def trace_summary(folder: Path) -> dict[str, Any]:
    """Every phase and every class of reads."""
    with TraceWriter(folder / "t") as writer:
        for step, phase in enumerate(Phase):
            writer.layer(step, 0, 0, [[0, 1]], [[0.5, 0.5]], 1, 1, 0)
            writer.step(step, phase, 1, step * 10, step * 10 + 5, 1)
        for cls in ReadClass:
            writer.read(0, 1, cls, 0, 1, 2, 4096)
    return summarise(Trace(folder / "t"))


@pytest.fixture
def figures(tmp_path: Path) -> dict[str, set[str]]:
    """Where a name comes from -> the names."""
    routes = from_array(np.random.default_rng(0).permuted(np.tile(np.arange(8), (2, 300, 1)), axis=2)[..., :2])
    timed = replay_timed(routes, "lru", 4, DeviceModel(0.1))
    return {
        "trace summary": set(keys(trace_summary(tmp_path))),
        "counters": {field.name for field in fields(Counters)},
        "a session": set(keys(session(Still(), [1, 2], [3, 4]))),
        "bench": {*SPREADS, *RUN_SPREADS, "token_ms", "cold_by", "cold_verified", "wall_s"},
        "simulate": set(keys(replay(routes, "lru", 4).figures())),
        "simulate with time": set(keys(timed)),
        "rosters": set(keys(pinned(routes, 4).figures())),
    }


def test_every_figure_is_in_the_page_of_measures(figures: dict[str, set[str]]) -> None:
    known = named("metrics.md") | OWN_WORDS
    missing = {source: sorted(names - known) for source, names in figures.items() if names - known}
    assert not missing
    assert all(len(names) > 3 for names in figures.values())  # each source was really asked


def test_every_column_is_in_the_page_of_traces() -> None:
    known = named("trace-format.md")
    assert not {f"{table}.{name}" for table, names in TABLES.items() for name in names if name not in known}
