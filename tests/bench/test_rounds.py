"""What is fed, in which order, how cold is checked, and the figures that come of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.bench import interleave
from stoker.bench.cases import Plan, Variant, given_sessions, peer_variant, random_sessions, stoker_variants
from stoker.bench.device import block_device, device_rate
from stoker.bench.figures import notes, result, variant_figures
from stoker.bench.interleave import run_once, run_rounds
from stoker.bench.request import Request, build
from stoker.bench.worker import session, summarise
from stoker.errors import OptionError
from stoker.native.io import cached_bytes
from stoker.trace.measures import latency

BASE = {"memory": "4GiB", "path": "hot", "policy": "lru", "threads": 1, "ctx_size": 512, "depth": 8, "direct": True,
        "prefetch": 0}  # fmt: skip


class Clock:
    """An engine whose counters and times are known."""

    load_s = 0.5

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.counts = {"read_bytes": 0, "hits": 0, "misses": 0, "reads": 0, "stall_ns": 0, "prefetch_bytes": 0,
                       "dropped_experts": 0}  # fmt: skip

    def begin(self) -> None:
        self.calls.append("begin")

    def prefill(self, ids: list[int]) -> None:
        self.calls.append(f"prefill {ids}")
        self._grow(read_bytes=1000, misses=4, stall_ns=2_000_000_000)

    def decode(self, token: int) -> None:
        self.calls.append(f"decode {token}")
        self._grow(read_bytes=10 * token, hits=3, misses=1, reads=1, stall_ns=5_000_000)

    def counters(self) -> dict[str, int]:
        return dict(self.counts)

    def about(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...

    def _grow(self, **more: int) -> None:
        for name, value in more.items():
            self.counts[name] += value


def test_a_session_counts_each_phase_alone() -> None:
    engine = Clock()
    figures = session(engine, [1, 2], [7, 8, 9], warmup=1)
    assert engine.calls == ["begin", "prefill [1, 2]", "decode 7", "decode 8", "decode 9"]
    assert (figures["prefill_bytes"], figures["prefill_stall_s"]) == (1000, 2.0)
    assert figures["decode_bytes_per_token"] == 85 and figures["decode_tokens"] == 2
    assert figures["hit_rate"] == 0.75 and figures["stall_ms_per_token"] == 5.0
    assert figures["total_tokens"] == 5 and figures["total_s"] > figures["prefill_s"]
    assert len(figures["decode_ms"]) == 2
    assert session(Clock(), [1], [])["decode_tok_s"] is None


def test_ids_are_seeded_and_shared_by_no_session(tmp_path: Path) -> None:
    cold, warm = random_sessions(40, 30, 5, 1000, seed=3)
    assert (cold.name, len(cold.prompt), len(cold.decode), cold.warmup) == ("cold", 40, 30, 0)
    assert (warm.name, len(warm.decode), warm.warmup) == ("warm", 35, 5)
    assert random_sessions(40, 30, 5, 1000, seed=3) == (cold, warm) != random_sessions(40, 30, 5, 1000, seed=4)
    assert set(cold.prompt) != set(warm.prompt) and max(cold.prompt + warm.decode) < 1000
    first, _ = random_sessions(40, 30, 5, 1000, seed=3, preload=True)
    assert first.name == "warm-up", "nothing is cold when all is read first"
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"prompt": [5, 6], "decode": [1, 2, 3]}))
    cold, warm = given_sessions(file, 1, 10)
    assert cold.decode == (2, 3) and warm.decode == (1, 2, 3) and cold.prompt == warm.prompt == (5, 6)
    for wrong in (
        '{"prompt": [5]}',
        '{"prompt": [], "decode": [1,2]}',
        '{"prompt": [11], "decode": [1,2]}',
        "[",
        "[1]",
    ):
        file.write_text(wrong)
        with pytest.raises(OptionError, match="--ids"):
            given_sessions(file, 1, 10)


def test_variants_and_their_order() -> None:
    variants = stoker_variants("m", BASE, ["exact"], [])
    assert [v.name for v in variants] == ["stoker hot lru", "stoker exact lru"]
    assert stoker_variants("m", BASE, [], ["arc"])[1].options["policy"] == "arc"
    both = stoker_variants("m", BASE, ["exact"], ["lfru"])
    assert [v.name for v in both] == ["stoker hot lru", "stoker exact lru", "stoker hot lfru"]
    plan = Plan(variants, (), 2, 1, 512)
    assert [v.name for v in plan.order(1)] == ["stoker exact lru", "stoker hot lru"], "every other round backwards"
    with pytest.raises(OptionError, match="twice"):
        stoker_variants("m", BASE, ["hot"], [])
    with pytest.raises(OptionError, match="no policy"):
        stoker_variants("m", {**BASE, "path": "exact"}, [], ["arc"])
    for wrong in ("vllm=x", "llama.cpp", "llama.cpp=/gone.gguf"):
        with pytest.raises(OptionError, match="--vs"):
            peer_variant(wrong, mmap=True)


def test_rounds_on_a_store(mini: Path, slots: Callable[[int], None]) -> None:
    slots(6)
    variants = stoker_variants(str(mini), BASE, ["exact"], [])
    plan = Plan(variants, random_sessions(24, 12, 4, 512, 0), 2, 1, 512)
    said: list[str] = []
    runs = run_rounds(plan, said.append)
    assert said[0].startswith("loading once")
    assert [line.split(": ")[1] for line in said[1:]] == [
        "stoker hot lru", "stoker exact lru", "stoker exact lru", "stoker hot lru"]  # fmt: skip
    document = result(plan, runs, {"options": {}})
    hot, exact = document["variants"].values()
    for figures in (hot, exact):
        assert figures["cold_by"] == "direct reads" and figures["cold_verified"] is True
        assert figures["cold"]["decode_tok_s"]["n"] == figures["warm"]["prefill_tok_s"]["n"] == 2
        assert figures["warm"]["token_ms"]["n"] == 24 and figures["warm"]["token_ms"]["p95"] is None
        assert figures["rss_peak_bytes"]["max"] > 1e8
    record = 16384
    assert hot["cold"]["prefill_bytes"]["median"] >= 4 * 6 * record
    assert exact["warm"]["hit_rate"]["max"] == 0
    assert exact["warm"]["decode_bytes_per_token"]["median"] == 4 * 4 * record, "exact reads what a token uses, no more"
    assert 0 < hot["warm"]["hit_rate"]["median"] < 1
    same = [run["sessions"]["cold"]["decode_misses"] for run in runs["stoker hot lru"]]
    assert same[0] == same[1], "rounds feed the same ids to the same cold engine"
    assert document["notes"] == []


def test_buffered_is_cold_by_dropped_caches(mini: Path) -> None:
    (variant,) = stoker_variants(str(mini), {**BASE, "direct": False}, [], [])
    expert_file = next(mini.glob("experts-*"))
    expert_file.read_bytes()
    assert cached_bytes(expert_file) > 0
    run = run_once(Plan((variant,), random_sessions(8, 4, 0, 512, 0), 1, 1, 512), variant)
    assert run["cold"] == {"by": "page cache dropped", "verified": True, "cached_bytes": 0}


def test_cold_that_was_not_is_said(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dropping caches does nothing, the result does not claim cold."""
    (variant,) = stoker_variants(str(mini), {**BASE, "direct": False}, [], [])
    plan = Plan((variant,), random_sessions(8, 4, 0, 512, 0), 1, 1, 512)
    next(mini.glob("experts-*")).read_bytes()
    monkeypatch.setattr(interleave, "drop_cache", lambda _: None)
    run = run_once(plan, variant)
    assert run["cold"]["verified"] is False and run["cold"]["cached_bytes"] > 0
    assert variant_figures([run])["cold_verified"] is False
    assert any("not verified" in line for line in notes(plan, {variant.name: [run]}))


def test_preload_reads_everything_and_has_no_cold(mini: Path) -> None:
    (variant,) = stoker_variants(str(mini), BASE, [], [])
    plan = Plan((variant,), random_sessions(8, 4, 2, 512, 0, preload=True), 1, 1, 512, preload=True)
    run = run_once(plan, variant)
    assert set(run["sessions"]) == {"warm"} and "cold" not in run
    assert run["sessions"]["warm"]["hit_rate"] == 1 and run["sessions"]["warm"]["prefill_bytes"] == 0


@pytest.mark.root
def test_in_processes_of_their_own(mini: Path, tmp_path: Path) -> None:
    """A peer's runs: a stand-in interpreter shows what it is told; ours runs confined beside it."""
    peer = tmp_path / "python"
    peer.write_text(
        f"#!/bin/sh\nexec {sys.executable} - \"$@\" <<'END'\n"
        "import json, sys\n"
        "plan = json.load(open(sys.argv[sys.argv.index('--ids') + 1]))\n"
        "s = {'prefill_tok_s': 1.0, 'prefill_s': 2.0, 'total_s': 3.0, 'prefill_tokens': 1, 'decode_tokens': 1,\n"
        "     'total_tokens': 2, 'decode_ms': [1.0]}\n"
        "told = {'arguments': sys.argv[1:], 'ids': plan['sessions']}\n"
        "print(json.dumps({'sessions': {n['name']: s for n in plan['sessions']}, 'load_s': 0.1, 'told': told}))\nEND\n"
    )
    peer.chmod(0o755)
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF" * 1024)
    request = Request(
        str(mini), memory="1GiB", prefetch=0, depth=4, prompt=8, decode=4, warmup=1, repeats=1, threads=1,
        ctx_size=512, peer=f"llama.cpp={gguf}", peer_python=str(peer),
    )  # fmt: skip
    plan, about = build(request)
    assert plan.separate and plan.limit_bytes == 1 << 30
    runs = run_rounds(plan, lambda _: None)
    ours, theirs = runs["stoker auto lru"][0], runs["llama.cpp mmap"][0]
    assert theirs["told"]["ids"] == [json.loads(json.dumps(s.as_dict())) for s in plan.sessions], "the same ids"
    assert theirs["told"]["arguments"][1:3] == ["llama", str(gguf)] and "--no-mmap" not in theirs["told"]["arguments"]
    assert ours["confined"] and theirs["confined"] and 1e8 < ours["cgroup_peak_bytes"] <= 1 << 30
    assert ours["sessions"]["warm"]["decode_tokens"] == 4 and ours["cold"]["verified"]
    assert theirs["cold"] == {"by": "page cache dropped", "verified": True, "cached_bytes": 0}
    document = result(plan, runs, about)
    assert document["variants"]["llama.cpp mmap"]["cold"]["prefill_tok_s"]["median"] == 1.0


def test_rooms_that_differ_are_said() -> None:
    plan = Plan((Variant("a", "stoker", "m"),), (), 1, 1, 1)
    runs = {"a": [{"ledger": {"slots": [10, 10]}}, {"ledger": {"slots": [9, 9]}}]}
    assert any("18 and 20" in line for line in notes(plan, runs))


def test_the_device_of_a_store(mini: Path) -> None:
    assert device_rate(mini, seconds=0.1) > 1e6
    assert block_device(mini) is None or Path("/sys/block", str(block_device(mini))).exists()


def test_the_median_is_the_nearest_rank() -> None:
    counts = {"read_bytes": 0}
    figures = summarise(1.0, 4, [0.04, 0.01, 0.03, 0.02], counts, counts)
    assert figures["decode_ms_median"] == latency([40.0, 10.0, 30.0, 20.0])["p50"] == 20
