"""What was tuned is what `auto` runs, and nothing else is; a live trial keeps no loser."""

from pathlib import Path

import pytest

import stoker
from stoker.bench.tune import Request, tune
from stoker.plan.planner import Choice
from stoker.plan.profile import machine_key
from stoker.plan.tuner import choices_path, remember
from stoker.runtime.budget import default_threads
from stoker.store.reader import open_store
from tests.generate.stores import pack, write_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("tuned")
    return pack(write_checkpoint(base / "checkpoint"), base / "store", "--bits", 8, "--group-size", 32)


@pytest.fixture
def tuned(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = choices_path(open_store(store).fingerprint, machine_key(store, default_threads()))
    remember(path, 2 * GIB, Choice(policy="lfru", prefetch=0, depth=4), [])
    return store


def test_auto_takes_what_was_tuned(tuned: Path) -> None:
    with stoker.load(tuned, memory=2 * GIB, ctx_size=64) as model:
        options = model.runtime.options
        assert (options.policy, options.prefetch, options.depth) == ("lfru", 0, 4)


def test_what_is_named_is_obeyed_and_other_budgets_know_nothing(tuned: Path) -> None:
    with stoker.load(tuned, memory=2 * GIB, ctx_size=64, policy="lru") as model:
        assert (model.runtime.options.policy, model.runtime.options.prefetch) == ("lru", 3)
    with stoker.load(tuned, memory=3 * GIB, ctx_size=64) as model:
        assert model.runtime.options.policy == "lru"
    with stoker.load(tuned, memory=2 * GIB, ctx_size=64, prefetch=2) as model:
        assert (model.runtime.options.policy, model.runtime.options.prefetch) == ("lfru", 2)


def test_a_trial_keeps_no_loser(store: Path) -> None:
    request = Request(store, 2 * GIB, 1, 256, seconds=60)
    start = Choice()
    said: list[str] = []
    best, trials = tune(request, start, [("path whole_layer", Choice(path="whole_layer"))], said.append)
    assert best == start and len(trials) == 1 and not trials[0].kept
    assert trials[0].ratio < 1 and "not kept" in said[0]


def test_time_is_a_limit(store: Path) -> None:
    said: list[str] = []
    candidates = [(f"depth {depth}", Choice(depth=depth)) for depth in (2, 4, 8)]
    best, trials = tune(Request(store, 2 * GIB, 1, 256, seconds=0.001), Choice(), candidates, said.append)
    assert best == Choice() and len(trials) <= 1 and any("the time is up" in line for line in said)
