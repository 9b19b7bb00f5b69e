"""Verdicts on constructed runs whose answer is known: from figures, from traces written row by row, from results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.plan.evidence import Evidence, of_result, of_trace
from stoker.plan.explain import explain, parts_of
from stoker.trace.events import Phase, ReadClass
from stoker.trace.reader import Trace
from stoker.trace.writer import TraceWriter

MB, MS = 10**6, 10**6
# 48 layers of 128 experts, 8 a token, 2 MB each; 16 slots; 40% hits; a device of 2 GB/s, memory of 20 GB/s.
BASE = Evidence(
    "base", tokens=100, token_ms=400.0, stall_ms=250.0, read_bytes=460 * MB, busy_ms=240.0, lanes=3.0, needed=384.0,
    misses=230.0, needed_per_event=8.0, layers=48, experts=128, slots=16.0, record_bytes=2.0 * MB,
    dense_bytes=1000.0 * MB, prefill_tokens=100, prefill_s=5.0, prefill_stall_s=2.0, decode_s=40.0,
    device_bytes_s=2e9, memory_bytes_s=20e9,
)  # fmt: skip


def bound(**changed: Any) -> str:
    return explain(replace(BASE, **changed)).bound


def test_the_parts_of_a_token() -> None:
    parts = parts_of(BASE)
    assert parts["stall"] == 250 and parts["compute"] == pytest.approx((1000 + 768) / 20)
    assert sum(parts.values()) == pytest.approx(400)
    assert parts_of(replace(BASE, stall_ms=None)) == {"waiting, compute and overhead": 400}
    assert parts_of(replace(BASE, memory_bytes_s=None)) == {"stall": 250, "compute and overhead": 150}


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [
        ("device bytes", {}),
        ("device bytes", {"device_bytes_s": None}),
        ("device bytes", {"memory_bytes_s": None, "stall_ms": 160.0, "busy_ms": 200.0}),
        ("latency", {"device_bytes_s": 4e9}),
        ("latency", {"device_bytes_s": None, "lanes": 1.0}),
        ("latency", {"busy_ms": None, "device_bytes_s": 5e9}),
        ("compute", {"stall_ms": 5.0, "token_ms": 100.0, "read_bytes": 10.0 * MB}),
        ("overhead", {"stall_ms": 5.0, "token_ms": 200.0, "read_bytes": 10.0 * MB}),
        ("compute and overhead", {"stall_ms": 5.0, "memory_bytes_s": None}),
        ("compute and overhead", {"stall_ms": None, "read_bytes": 0.0, "through_page_cache": True}),
        ("prefill", {"prefill_s": 70.0}),
        ("device bytes", {"prefill_s": 70.0, "chosen_lengths": True}),
        ("cache below demand", {"slots": 0.0, "misses": 384.0}),
        ("cache below demand", {"slots": 6.0}),
        ("cache below demand", {"misses": 383.0}),
        ("prefetch waste", {"prefetch_bytes": 300.0 * MB, "wasted_bytes": 200.0 * MB}),
        ("page cache starved", {"through_page_cache": True, "rereads": 4.0}),
        ("page cache starved", {"through_page_cache": True, "stall_ms": None, "read_bytes": 900.0 * MB}),
        ("page cache starved", {"through_page_cache": True, "stall_ms": None, "needed": None, "record_bytes": None}),
        ("device bytes", {"through_page_cache": True, "rereads": 1.05}),
        ("nothing measured", {"tokens": 0, "prefill_tokens": 0}),
    ],
)
def test_each_bound_is_named(wanted: str, changed: dict[str, Any]) -> None:
    assert bound(**changed) == wanted


def test_more_memory_is_priced_by_the_runs_own_curve() -> None:
    curve = replace(BASE, hit_rate_with=lambda slots: min(1.0, slots / 40))  # 16: 0.4, 32: 0.8
    change = explain(curve).change
    assert "32 slots a layer instead of 16" in change.what
    assert f"{16 * 48 * 2 * MB / 2**30:.2f} GiB more memory" in change.what
    assert change.then_ms == pytest.approx(150 + 250 * 0.2 / 0.6)
    flat = replace(BASE, hit_rate_with=lambda slots: 0.4)
    assert "fewer bits" in explain(flat).change.what, "where memory buys no hits, fewer bytes a record do"
    better = replace(flat, best_policy=("lfru", 0.3))
    assert "lfru" in explain(better).change.what and explain(better).change.then_ms == pytest.approx(150 + 250 * 0.5, 2)


def test_the_other_changes() -> None:
    assert explain(replace(BASE, device_bytes_s=4e9)).change.then_ms == pytest.approx(150 + 460 / 4)
    assert "16 slots a layer instead of 0" in explain(replace(BASE, slots=0.0, misses=384.0)).change.what
    wasteful = explain(replace(BASE, prefetch_bytes=300.0 * MB, wasted_bytes=230.0 * MB))
    assert wasteful.change.then_ms == pytest.approx(150 + 125) and "prefetch less" in wasteful.change.what
    assert "chunks" in explain(replace(BASE, prefill_s=70.0, prefill_stall_s=60.0)).change.what
    assert "session" in explain(replace(BASE, prefill_s=70.0, prefill_stall_s=6.0)).change.what
    assert "--buffered" in explain(replace(BASE, through_page_cache=True, rereads=4.0)).change.what


def test_lines_and_json_hold_the_figures() -> None:
    verdict = explain(BASE)
    text = "\n".join(verdict.lines())
    for words in ("bound by device bytes", "250.0 of 400.0 ms", "460.0 MB", "40.1% of 384", "16 of 128", "2.00 GB/s"):
        assert words in text
    assert verdict.as_dict()["bound"] == "device bytes" and "would help most" in text


class Clockwork:
    """Writes a trace of 30 decode tokens of one layer with known times."""

    def __init__(self, path: Path, **about: Any) -> None:
        self.writer = TraceWriter(path, {"experts": 16, **about})

    def tokens(self, token_ms: float, wait_ms: float, reads: list[tuple[float, float, int]], cls: ReadClass) -> None:
        """reads: (begin, end, bytes) in ms and bytes after the token's start."""
        random = np.random.default_rng(1)
        for step in range(30):
            start = int(step * token_ms * MS)
            chosen = random.permutation(16)[: max(1, len(reads))]
            for expert, (begin, end, nbytes) in zip(chosen, reads, strict=False):
                times = start + int(begin * MS), start + int(begin * MS), start + int(end * MS)
                self.writer.read(0, int(expert), cls, *times, nbytes)
            misses = len(reads)
            self.writer.layer(step, 0, 0, [chosen.tolist()], [[1.0] * len(chosen)], 0, misses, int(wait_ms * MS))
            self.writer.step(step, Phase.DECODE, 1, start, start + int(token_ms * MS), 0)
        self.writer.close()


def test_a_trace_of_parallel_reads_and_one_of_reads_in_turn(tmp_path: Path) -> None:
    ledger = {"slots": [4], "dense_bytes": 0}
    side_by_side = [(0.0, 8.0, 4 * MB)] * 4  # 16 MB in 8 ms: 2 GB/s
    in_turn = [(2.0 * i, 2.0 * i + 2, 1 * MB) for i in range(4)]  # 4 MB in 8 ms, one at a time
    verdicts = {}
    for name, reads in (("parallel", side_by_side), ("turn", in_turn)):
        Clockwork(tmp_path / name, ledger=ledger).tokens(10, 8, reads, ReadClass.DEMAND)
        evidence = of_trace(Trace(tmp_path / name))
        assert (evidence.token_ms, evidence.stall_ms) == pytest.approx((10, 8)) and evidence.busy_ms == pytest.approx(8)
        evidence = replace(evidence, misses=2.0)  # hits, so that the cache is not the matter
        verdicts[name] = explain(evidence.on(device_bytes_s=2e9, memory_bytes_s=20e9))
        assert evidence.lanes == pytest.approx(4 if name == "parallel" else 1)
    assert verdicts["parallel"].bound == "device bytes" and verdicts["turn"].bound == "latency"


def test_a_trace_that_never_hits_and_one_that_never_waits(tmp_path: Path) -> None:
    Clockwork(tmp_path / "never").tokens(10, 8, [(0.0, 8.0, MB)] * 4, ReadClass.DEMAND)
    assert explain(of_trace(Trace(tmp_path / "never"))).bound == "cache below demand"
    Clockwork(tmp_path / "busy").tokens(10, 0, [], ReadClass.DEMAND)
    assert explain(of_trace(Trace(tmp_path / "busy"))).bound == "compute and overhead"


def test_a_trace_of_wasted_prefetches(tmp_path: Path) -> None:
    file = tmp_path / "waste"
    writer = TraceWriter(file, {"experts": 16, "ledger": {"slots": [8], "dense_bytes": 0}})
    for step in range(30):
        start = step * 10 * MS
        writer.read(0, 9, ReadClass.PREFETCH, start, start, start + 4 * MS, 3 * MB)
        writer.evict(0, 9)  # before anyone asked
        writer.read(0, step % 8, ReadClass.DEMAND, start, start + 4 * MS, start + 8 * MS, 1 * MB)
        writer.layer(step, 0, 0, [[step % 8, (step + 1) % 8]], [[0.5, 0.5]], 1, 1, 8 * MS)
        writer.step(step, Phase.DECODE, 1, start, start + 10 * MS, 0)
    writer.close()
    evidence = of_trace(Trace(file))
    assert evidence.wasted_bytes == pytest.approx(3 * MB) and explain(evidence).bound == "prefetch waste"


def test_a_prompt_alone_is_prefill(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "p", {})
    writer.layer(0, 0, 0, [[1, 2]] * 50, [[0.5, 0.5]] * 50, 0, 2, 9 * MS)
    writer.step(0, Phase.PREFILL, 50, 0, 10 * MS, 0)
    writer.close()
    assert explain(of_trace(Trace(tmp_path / "p"))).bound == "prefill"


def result(buffered: bool = False, device_bytes: int | None = None, peer: bool = False) -> dict[str, Any]:
    """A result of one variant: 8 tokens a second of 48 layers, 80 of 384 misses, 100 ms stall."""

    def one(value: float) -> dict[str, float]:
        return {"median": value, "min": value, "max": value, "n": 1}

    warm = {"decode_tok_s": one(8.0), "prefill_s": one(2.0), "decode_bytes_per_token": one(160.0 * MB)}
    row: dict[str, Any] = {"decode_tokens": 64, "prefill_tokens": 256}
    run: dict[str, Any] = {"sessions": {"warm": row}}
    if not peer:
        warm |= {"hit_rate": one(0.79), "stall_ms_per_token": one(100.0), "prefill_stall_s": one(1.0)}
        row |= {"decode_hits": 304 * 64, "decode_misses": 80 * 64, "decode_prefetch_bytes": 0}
        run |= {"ledger": {"slots": [40] * 48, "dense_bytes": 10**9}}
        run |= {"stats": {"demand_bytes": 20 * 10**9, "prefetch_bytes": 0}}
    if device_bytes is not None:
        run |= {"device_bytes": device_bytes}
    return {
        "model": {"moe_layers": 48, "experts": 128, "top_k": 8, "record_bytes": 2 * MB, "dense_bytes": 10**9},
        "options": {"buffered": buffered},
        "device_bytes_per_s": one(1.7e9),
        "variants": {"v": {"warm": warm}},
        "runs": {"v": [run]},
    }


def test_results() -> None:
    (evidence,) = of_result(result())
    assert (evidence.needed, evidence.misses, evidence.token_ms, evidence.slots) == (384, 80, 125, 40)
    assert explain(evidence).bound == "device bytes" and evidence.source == "v warm"
    (starved,) = of_result(result(buffered=True, device_bytes=84 * 10**9))
    assert starved.rereads == pytest.approx(4) and explain(starved).bound == "page cache starved"
    (fed,) = of_result(result(buffered=True, device_bytes=21 * 10**9))
    assert explain(fed).bound == "device bytes"
    (peer,) = of_result(result(peer=True))
    assert explain(peer).bound == "page cache starved" and peer.stall_ms is None


def test_a_path_that_keeps_nothing_is_to_be_left(tmp_path: Path) -> None:
    """The ledger has room for slots, and the exact path does not use it, whatever the token's time goes to."""
    for name, token_ms in (("stall", 10), ("busy", 40)):
        ledger = {"slots": [12], "dense_bytes": 0}
        clock = Clockwork(tmp_path / name, ledger=ledger)
        clock.writer.describe(path="exact")
        clock.tokens(token_ms, 8, [(0.0, 8.0, MB)] * 4, ReadClass.DEMAND)
        evidence = of_trace(Trace(tmp_path / name))
        verdict = explain(evidence.on(device_bytes_s=2e9, memory_bytes_s=20e9))
        assert evidence.slots == 0 and verdict.change.what.startswith("leave --path exact")
        assert "keeps no expert" in dict(verdict.figures)["in memory"] and "12 of 16" not in "\n".join(verdict.lines())
    document = result()
    document["variants"] = {"stoker exact lru": document["variants"]["v"]}
    document["runs"] = {"stoker exact lru": document["runs"]["v"]}
    (of_bench,) = of_result(document)
    assert of_bench.slots == 0 and explain(of_bench).change.what.startswith("leave --path exact")


def test_overhead_is_shared_by_servers_alone_and_told_from_other_programs() -> None:
    busy = replace(BASE, stall_ms=10.0)  # 301.6 ms of 400 are overhead
    alone, server = explain(busy).change, explain(replace(busy, several=True)).change
    assert "nothing in its options" in alone.what and "requests at a time" in server.what
    assert alone.then_ms is None and server.then_ms is None, "no figure is invented"
    held_up = explain(replace(busy, overhead_ms=50.0)).change
    assert "other programs" in held_up.what and held_up.then_ms == pytest.approx(10 + 88.4 + 50)
    assert "nothing in its options" in explain(replace(busy, overhead_ms=200.0)).change.what
