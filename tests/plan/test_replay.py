"""The simulator against exhaustive search, and its rules: event-atomic, exact cliff, partitions, curves, formats."""

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import OptionError, TraceError
from stoker.plan.curves import greedy_for, greedy_slots, lru_hits_by_size
from stoker.plan.optimal import min_misses, next_uses, windowed_min_misses
from stoker.plan.replay import merge, replay, replay_global, replay_stream
from stoker.plan.routes import Stream, from_array, load_routes
from stoker.plan.sweep import Cell, add_gap_to_floor, sweep
from stoker.trace.events import Phase
from stoker.trace.writer import TraceWriter


def routes_of(events: list[list[int]], experts: int):
    return from_array(np.array(events)[None], n_experts=experts)


def random_events(rng: random.Random, experts: int, k: int, tokens: int) -> list[list[int]]:
    return [rng.sample(range(experts), k) for _ in range(tokens)]


def fewest_misses(events: list[list[int]], capacity: int) -> int:
    """Exhaustive: after each event the cache may become any set of at most `capacity` of what it held and what came."""
    best = {frozenset(): 0}  # contents -> fewest misses so far
    for event in events:
        following: dict[frozenset, int] = {}
        for held, misses in best.items():
            cost = misses + len(set(event) - held)
            union = held | set(event)
            size = min(capacity, len(union))
            for kept in combinations(sorted(union), size):
                key = frozenset(kept)
                following[key] = min(cost, following.get(key, 10**9))
        best = following
    return min(best.values())


@pytest.mark.parametrize(("experts", "k", "tokens"), [(5, 1, 12), (6, 2, 10), (7, 3, 8)])
def test_min_equals_exhaustive_search(experts: int, k: int, tokens: int) -> None:
    rng = random.Random(experts)
    for _ in range(40):
        events = random_events(rng, experts, k, tokens)
        stream = routes_of(events, experts).streams[0]
        for capacity in range(k, experts):
            assert min_misses(stream, capacity).sum() == fewest_misses(events, capacity), (events, capacity)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_window_only_helps_and_the_whole_window_is_min(seed: int) -> None:
    rng = random.Random(seed)
    stream = routes_of(random_events(rng, 10, 2, 40), 10).streams[0]
    capacity = rng.randint(2, 8)
    whole = windowed_min_misses(stream, capacity, 40).sum()
    assert whole == min_misses(stream, capacity).sum()
    assert all(windowed_min_misses(stream, capacity, w).sum() >= whole for w in (1, 2, 5, 10))


def test_no_policy_beats_min() -> None:
    rng = random.Random(2)
    routes = routes_of(random_events(rng, 16, 3, 300), 16)
    for slots in (3, 5, 8, 12):
        floor = replay(routes, "min", slots, 0).misses_per_token
        for policy in ("lru", "fifo", "lfu", "lfru", "decayed-lfu", "s3-fifo", "arc", "static"):
            assert replay(routes, policy, slots, 0).misses_per_token >= floor


def test_next_uses() -> None:
    stream = routes_of([[0, 1], [2, 0], [1, 2], [3, 1]], 4).streams[0]
    assert next_uses(stream).tolist() == [1, 2, 2, 4, 3, 4, 4, 4]


def test_hits_are_taken_before_the_event() -> None:
    """Per-access replay would let 3 evict 1 before 1 is looked at; event-atomic replay counts the hit."""
    routes = routes_of([[1, 2], [3, 1], [2, 3]], 4)
    assert [replay(routes, "lru", 2, 0).misses[0].tolist()] == [[2, 1, 1]]


def test_a_shared_cache_below_one_token_never_hits() -> None:
    rng = np.random.default_rng(0)
    layers, k, experts = 6, 2, 8
    once = np.stack([rng.permutation(experts)[:k] for _ in range(layers)])
    routes = from_array(np.repeat(once[:, None], 50, axis=1), n_experts=experts)  # every token needs the same
    assert routes.demand_per_step == layers * k
    for policy in ("lru", "fifo"):
        assert replay_global(routes, policy, (layers - 1) * k).hit_rate == 0
        assert 0 < replay_global(routes, policy, layers * k - 1).hit_rate < 1  # a part of one event survives the cycle
        assert replay_global(routes, policy, layers * k).hit_rate == 1
        assert replay(routes, policy, k).hit_rate == 1  # the same slots, per layer: no cliff


def test_merging_keeps_every_event_in_order() -> None:
    rng = np.random.default_rng(1)
    array = np.stack([[rng.permutation(9)[:3] for _ in range(20)] for _ in range(4)])
    routes = from_array(array, n_experts=16)
    merged, source = merge(routes)
    events = merged.events()
    for token in range(20):
        for layer in range(4):
            assert events[token * 4 + layer] == [layer * 16 + e for e in array[layer, token].tolist()]
            assert source[token * 4 + layer] == layer


@given(st.integers(0, 10**6), st.integers(3, 12))
@settings(max_examples=40, deadline=None)
def test_stack_distances_equal_replays(seed: int, slots: int) -> None:
    stream = routes_of(random_events(random.Random(seed), 12, 3, 60), 12).streams[0]
    hits = lru_hits_by_size(stream, 12, from_step=10)
    misses = replay_stream(stream, "lru", slots)
    assert hits[slots] == (stream.needed - misses)[10:].sum()


def test_greedy_gives_slots_where_they_pay() -> None:
    flat, steep = np.zeros(17), np.arange(17) * 10
    cliff = np.where(np.arange(17) >= 14, 500, 0)  # not concave: pays only when all of it is there
    assert greedy_slots([flat, steep], 20, [4, 4], 4) == [4, 16]
    assert greedy_slots([steep, cliff], 20, [4, 4], 2)[1] >= 14
    with pytest.raises(OptionError, match="fewer slots"):
        greedy_slots([flat, steep], 7, [4, 4])
    rng = np.random.default_rng(3)
    loop = np.stack([np.arange(12) for _ in range(20)]).reshape(1, -1, 2)[:, :100]  # needs 12 slots, then never misses
    local = np.stack([rng.permutation(4)[:2] for _ in range(100)])[None]  # 4 slots suffice
    routes = from_array(np.concatenate([loop, local]), n_experts=16)
    slots = greedy_for(routes, 16, 50, 2)
    assert slots == [12, 4]
    assert replay(routes, "lru", slots, 50).hit_rate == 1 > replay(routes, "lru", 8, 50).hit_rate


def test_counts_and_warm_up() -> None:
    routes = routes_of([[0, 1], [0, 2], [0, 2], [3, 0]], 4)
    outcome = replay(routes, "lru", 3, 1)
    assert outcome.misses[0].tolist() == [2, 1, 0, 1]
    assert outcome.hit_rate == pytest.approx(4 / 6)
    assert outcome.full_event_hit_rate == pytest.approx(1 / 3)
    assert outcome.compulsory_per_token == pytest.approx(2 / 3)
    figures = outcome.figures()
    assert figures["capacity_misses_per_token"] == 0 and figures["slots_by_pool"] == [3]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda r: replay(r, "lru", 1),
        lambda r: replay(r, "lru", [2, 2]),
        lambda r: replay(r, "lru", 2, warm_up_steps=99),
        lambda r: replay_global(r, "lru", 1),
        lambda r: sweep([Cell("x.npz", "belady", 4)]),
        lambda r: sweep([Cell("x.npz", "min:0", 4)]),
        lambda r: sweep([Cell("x.npz", "static:2", 4)]),
        lambda r: sweep([Cell("x.npz", "lru", 4, "diagonal")]),
    ],
)
def test_what_cannot_be_is_refused(attempt) -> None:
    with pytest.raises(OptionError):
        attempt(routes_of([[0, 1], [1, 2], [2, 0]], 4))


def test_a_sweep_on_two_processes_equals_one_and_reports_progress(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    np.savez(tmp_path / "r.npz", experts=np.stack([[rng.permutation(16)[:2] for _ in range(200)] for _ in range(3)]))
    cells = [Cell(str(tmp_path / "r.npz"), p, s) for p in ("lru", "arc", "min") for s in (4, 8)]
    cells += [Cell(str(tmp_path / "r.npz"), "lru", 4, how) for how in ("global", "greedy")]
    seen: list[int] = []
    rows, alone = sweep(cells, 2, seen.append), sweep(cells, 1)
    assert seen == list(range(1, len(cells) + 1))
    for row in rows + alone:
        row.pop("seconds")
    assert rows == alone and [row["partition"] for row in rows[-2:]] == ["global", "greedy"]
    add_gap_to_floor(rows)
    assert rows[0]["gap_recovered"] == 0 and rows[4]["gap_recovered"] == 1 and rows[4]["misses_above_floor"] == 0
    with pytest.raises(OptionError, match="fewer slots than one event needs"):
        sweep([Cell(str(tmp_path / "r.npz"), "lru", 1), cells[0]], 2)


def test_routes_from_a_trace_are_its_decode_steps(tmp_path: Path) -> None:
    """A prefill, single-token steps, and a step of two sequences: one event a layer, the union of what it needs."""
    with TraceWriter(tmp_path / "t", {"experts": 32}) as writer:
        calls = [(Phase.PREFILL, [[1, 2], [3, 4]]), (Phase.DECODE, [[5, 6]]), (Phase.DECODE, [[7, 5], [5, 8]])]
        for step, (phase, route) in enumerate(calls):
            for layer in range(2):
                writer.layer(step, 0, layer, np.array(route) + layer, np.ones((len(route), 2)), 0, 2, 0)
            writer.step(step, phase, len(route), 0, 1, 0)
    routes = load_routes(tmp_path / "t")
    assert (routes.steps, routes.experts, routes.layers, routes.k) == (2, 32, 2, 3)
    assert len(routes.streams) == 1 and routes.streams[0].layers == (0, 1)  # both layers share a pool
    assert routes.streams[0].events() == [[5, 6], [6, 7], [7, 5, 8], [8, 6, 9]]
    assert replay(routes, "lru", 4, 0).misses[0].tolist() == [2, 1, 1, 1]


def test_route_csv(traces: Path) -> None:
    routes = load_routes(traces / "bmoe_gptoss.route.csv")
    assert (routes.steps, routes.layers, routes.experts, routes.k) == (64, 36, 128, 2)
    assert routes.demand_per_step == 72


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04broken"])
@pytest.mark.parametrize("name", ["r.npz", "r.csv", "r.trace"])
def test_foreign_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=name):
        load_routes(tmp_path / name)


def test_ragged_streams() -> None:
    stream = Stream(0, (0,), np.array([1, 2, 3, 1], np.int32), np.array([0, 3, 4]), np.arange(2), np.arange(2))
    assert stream.events() == [[1, 2, 3], [1]]
    assert stream.between(1, 2).events() == [[1]]
    assert min_misses(stream, 3).tolist() == [3, 0]
