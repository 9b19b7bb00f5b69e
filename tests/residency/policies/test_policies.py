"""Policies against plain oracles, and what all of them promise: capacity, protection, event atomicity, no torch."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BudgetError, OptionError
from stoker.residency.policies import POLICIES, Policy, lfru, make_policy, scored

EXPERTS, K = 12, 3
NAMES = [name for name in POLICIES if name != "static"]
events_strategy = st.lists(st.permutations(range(EXPERTS)).map(lambda p: list(p[:K])), min_size=1, max_size=60)


def oracle(events: list[list[int]], capacity: int, worth: Callable[[dict, int, int], object]) -> list[set[int]]:
    """Hits of each event under "evict the smallest worth(history, key, now)" by full search."""
    history: dict[int, list[int]] = {}  # key -> events of its uses
    resident: set[int] = set()
    hits = []
    for now, event in enumerate(events):
        hits.append(resident & set(event))
        for key in event:
            history.setdefault(key, []).append(now)
        for key in event:
            if key not in resident:
                if len(resident) == capacity:
                    resident.remove(min(resident - set(event), key=lambda k: worth(history, k, now)))
                resident.add(key)
    return hits


def run(policy: Policy, events: list[list[int]]) -> list[set[int]]:
    hits = []
    for event in events:
        hits.append(set(event) - set(policy.access(event)))
        assert len(policy) <= policy.capacity and set(event) <= set(policy)
    return hits


@pytest.fixture(params=["ranked as a small cache", "as a large one"], scope="module")
def _ranking(request: pytest.FixtureRequest) -> Iterator[None]:
    """Large caches are ranked in other ways than small ones; both are held to the same."""
    with pytest.MonkeyPatch.context() as patch:
        if "large" in request.param:
            patch.setattr(scored, "SMALL", 0)
            patch.setattr(lfru, "SMALL", 0)
        yield


def decayed(history: dict, key: int, now: int) -> float:
    return sum(2 ** ((use - now) / 16) for use in history[key])


def equal(a: object, b: object) -> bool:
    return isclose(a, b, rel_tol=1e-9) if isinstance(a, float) and isinstance(b, float) else a == b


def no_ties(worth: Callable[[dict, int, int], object], events: list[list[int]], capacity: int) -> bool:
    """Whether the oracle's choice was ever between equals (then policies may differ)."""
    seen_tie = False

    def spying(history: dict, key: int, now: int) -> object:
        nonlocal seen_tie
        value = worth(history, key, now)
        others = [k for k in history if k != key and k not in events[now]]
        seen_tie |= any(equal(worth(history, k, now), value) for k in others)
        return value

    oracle(events, capacity, spying)
    return not seen_tie


@pytest.mark.usefixtures("_ranking")
@pytest.mark.parametrize(
    ("name", "worth"),
    [
        ("decayed-lfu", decayed),
        ("lfru", lambda history, key, now: len(history[key]) / (now - history[key][-1] + 1)),
        ("lfu", lambda history, key, now: (len(history[key]), history[key][-1])),
    ],
)
def test_scored_policies_equal_a_full_search(name: str, worth: Callable[[dict, int, int], object]) -> None:
    rng, compared = random.Random(1), 0
    for _ in range(200):
        capacity = rng.randint(K, EXPERTS - 1)
        weights = [1.0 / (1 + rank) for rank in range(EXPERTS)]
        events = [_draw(rng, weights) for _ in range(rng.randint(3, 40))]
        if not no_ties(worth, events, capacity):
            continue
        compared += 1
        got, expected = run(make_policy(name, capacity), events), oracle(events, capacity, worth)
        assert got == expected
    assert compared >= 10


def _draw(rng: random.Random, weights: list[float]) -> list[int]:
    pool, event = list(range(EXPERTS)), []
    for _ in range(K):
        event.append(rng.choices(pool, [weights[key] for key in pool])[0])
        pool.remove(event[-1])
    return event


@given(events_strategy, st.integers(K, EXPERTS))
@settings(max_examples=150, deadline=None)
def test_lru_is_the_most_recent_distinct_keys(events: list[list[int]], capacity: int) -> None:
    policy = make_policy("lru", capacity)
    recency: list[int] = []
    for event in events:
        assert set(policy) == set(recency[:capacity])
        policy.access(event)
        recency = event + [key for key in recency if key not in event]


@given(events_strategy, st.integers(K, EXPERTS))
@settings(max_examples=100, deadline=None)
def test_fifo_keeps_the_latest_admissions(events: list[list[int]], capacity: int) -> None:
    policy, queue = make_policy("fifo", capacity), []
    for event in events:
        for key in [key for key in event if key not in queue]:
            if len(queue) == capacity:
                queue.remove(next(old for old in queue if old not in event))
            queue.append(key)
        policy.access(event)
        assert set(policy) == set(queue)


@pytest.mark.usefixtures("_ranking")
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_every_policy_promises(name: str, data: st.DataObject) -> None:
    """Random events, removals, prefetches and resizes: never over capacity, never a protected victim, honest."""
    policy = make_policy(name, data.draw(st.integers(K, EXPERTS)))
    for _ in range(data.draw(st.integers(1, 40))):
        before = set(policy)
        action = data.draw(st.sampled_from(["event", "event", "event", "remove", "prefetch", "resize"]))
        if action == "event":
            event = data.draw(st.permutations(range(EXPERTS)))[:K]
            policy.touch(event)
            assert set(policy) == before
            for key in event:
                if key not in policy:
                    resident = set(policy)
                    victim = policy.admit(key, event)
                    assert victim not in event
                    assert (victim is None) == (len(resident) < policy.capacity)
                    assert set(policy) == (resident | {key}) - {victim}
        elif action == "remove" and before:
            key = data.draw(st.sampled_from(sorted(before)))
            policy.remove(key)
            assert set(policy) == before - {key}
        elif action == "prefetch" and len(before) < EXPERTS:
            key = data.draw(st.sampled_from(sorted(set(range(EXPERTS)) - before)))
            victim = policy.admit(key, ())
            assert victim != key and set(policy) == (before | {key}) - {victim}
        elif action == "resize":
            evicted = policy.resize(data.draw(st.integers(K, EXPERTS)))
            assert set(policy) == before - set(evicted) and len(set(evicted)) == len(evicted)
        assert len(policy) <= policy.capacity


@pytest.mark.usefixtures("_ranking")
@pytest.mark.parametrize("name", NAMES)
def test_all_protected_is_an_error_and_loses_nothing(name: str) -> None:
    policy = make_policy(name, 3)
    policy.access([0, 1, 2])
    with pytest.raises(BudgetError, match="every resident expert is in use"):
        policy.admit(3, [0, 1, 2, 3])
    assert set(policy) == {0, 1, 2}
    assert policy.admit(3, [0, 2]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_keys_may_be_pairs_and_runs_are_deterministic(name: str) -> None:
    rng = random.Random(3)
    events = [[(0, key) for key in rng.sample(range(EXPERTS), K)] for _ in range(300)]
    numbers = [[key for _, key in event] for event in events]
    pairs = run(make_policy(name, 6), events)
    assert pairs == run(make_policy(name, 6), events)
    assert [{key for _, key in hit} for hit in pairs] == run(make_policy(name, 6), numbers)


def test_decayed_frequency_survives_its_rescaling() -> None:
    """Weights grow by 2^(1/h) an event; with h = 0.05 they overflow in 50 events unless they are rescaled."""
    rng = random.Random(5)
    events = [rng.sample(range(EXPERTS), K) for _ in range(4000)]
    fast = run(make_policy("decayed-lfu:0.05", 6), events)
    assert fast[3900:] == run(make_policy("decayed-lfu:0.05", 6), events[3000:])[900:]  # memory of 0.05 events


def test_frequency_beats_recency_where_it_should() -> None:
    """Two hot keys, then a scan: LRU loses them, LFU, LFRU and decayed frequency keep them."""
    events = [[0, 1]] * 30 + [[2, 3], [4, 5]]
    kept = {name: {0, 1} <= set(_after(name, events)) for name in ("lru", "fifo", "lfu", "lfru", "decayed-lfu")}
    assert kept == {"lru": False, "fifo": False, "lfu": True, "lfru": True, "decayed-lfu": True}


def _after(name: str, events: list[list[int]]) -> Policy:
    policy = make_policy(name, 4)
    for event in events:
        policy.access(event)
    return policy


def test_s3_fifo_lets_one_hit_wonders_pass_and_promotes_the_proven() -> None:
    policy = make_policy("s3-fifo", 20)
    for event in [[0, 1]] * 4 + [[key] for key in range(100, 160)]:
        policy.access(event)
    assert {0, 1} <= set(policy)
    assert policy.access([159]) == [] and policy.access([101]) == [101]


def test_arc_adapts_to_a_loop_that_lru_cannot_hold() -> None:
    """Hot pairs mixed with a long scan: ARC keeps the pairs."""
    events = [event for i in range(200) for event in ([0, 1], [10 + i % 40])]
    arc, lru = make_policy("arc", 3), make_policy("lru", 3)
    assert sum(map(len, run(arc, events))) >= sum(map(len, run(lru, events)))
    assert {0, 1} <= set(arc)


def test_static_keeps_the_hot_and_bypasses_or_passes_the_rest_through() -> None:
    scratchless = make_policy("static", 2, ranking=[5, 7, 1])
    assert scratchless.bypasses and scratchless.access([5, 1]) == [5, 1]
    assert set(scratchless) == {5} and scratchless.access([5, 1]) == [1]
    engine = make_policy("static", 4, ranking=[5, 7, 1], transient=2)
    assert not engine.bypasses
    for event in ([5, 1], [2, 3], [7, 1]):
        engine.access(event)
        assert set(event) <= set(engine)
    assert {5, 7} <= set(engine) and len(engine) == 4
    assert engine.resize(3) and 5 in engine


@pytest.mark.parametrize("name", ["belady", "", "lru:3", "decayed-lfu:x", "arc:1"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(OptionError):
        make_policy(name, 8)


def test_bad_options_are_refused() -> None:
    for make in (
        lambda: make_policy("lru", 0),
        lambda: make_policy("lru", 8, half_life=3),
        lambda: make_policy("static", 8),
        lambda: make_policy("decayed-lfu", 8, half_life=0),
    ):
        with pytest.raises(OptionError):
            make()


def test_policies_simulator_and_traces_load_no_torch() -> None:
    code = (
        "import sys, pkgutil, importlib\n"
        "import stoker.residency.policies, stoker.plan, stoker.trace, stoker.cli.simulate, stoker.cli.trace\n"
        "for package in (stoker.residency.policies, stoker.plan, stoker.trace):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "bad = {'torch', 'transformers', 'stoker.runtime', 'stoker.native._io'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
