"""What was tuned is what `auto` runs, and nothing else is; a live trial keeps no loser."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import stoker
from stoker.bench.tune import Request, tune
from stoker.cli.main import build_app
from stoker.plan.planner import Choice, RunPlan
from stoker.plan.profile import machine_key
from stoker.plan.tuner import choices_path, recall, remember
from stoker.runtime.budget import default_threads
from stoker.store.reader import open_store
from tests.generate.stores import pack, write_checkpoint
from tests.plan.machines import machine

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


def planned(monkeypatch: pytest.MonkeyPatch, candidates: tuple[tuple[str, Choice], ...]) -> None:
    """The planner's answer and this machine's profile, made up."""
    monkeypatch.setattr("stoker.cli.probe.profile_for", lambda *_: (machine(), Path("profile.json")))
    token = SimpleNamespace()
    monkeypatch.setattr("stoker.plan.planner.plan", lambda _: RunPlan(Choice(), {}, token, candidates))


def tuning(store: Path, *arguments: str) -> str:
    command = ["tune", str(store), "--memory", "2GiB", "--threads", str(default_threads()), *arguments]
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_tune_that_decides_nothing_keeps_what_was_decided(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = choices_path(open_store(tuned).fingerprint, machine_key(tuned, default_threads()))
    before = path.read_text()
    planned(monkeypatch, (("depth 8", Choice(depth=8)),))
    monkeypatch.setattr("stoker.bench.tune._Clock.has_room", lambda *_: False)
    said = tuning(tuned)
    assert "nothing could be tried" in said and "policy lfru" in said and "True" not in said
    assert path.read_text() == before
    planned(monkeypatch, ())  # everything in memory
    assert "nothing to try" in tuning(tuned) and path.read_text() == before


def test_a_tune_begins_with_what_was_remembered(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[Choice, Choice]] = []

    def measured(_: object, one: Choice, other: Choice) -> tuple[list[float], list[float]]:
        pairs.append((one, other))
        return [10.0, 10.0], [11.0, 11.0]

    planned(monkeypatch, (("depth 4", Choice(depth=4)), ("path staged", Choice(path="staged"))))
    monkeypatch.setattr("stoker.bench.tune._Bench.pairs", measured)
    said = tuning(tuned)
    kept = Choice(policy="lfru", prefetch=0, depth=4)
    assert pairs == [(kept, replace(kept, path="staged")), (kept, Choice())], "depth 4 is what it begins with"
    assert "begins with what was remembered" in said and "kept: what was remembered" in said
    path = choices_path(open_store(tuned).fingerprint, machine_key(tuned, default_threads()))
    assert recall(path, 2 * GIB) == kept


def test_plan_names_what_auto_will_use(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.cli.probe.profile_for", lambda *_: (machine(), Path("profile.json")))
    done = CliRunner().invoke(
        build_app(), ["plan", str(tuned), "--memory", "2GiB", "--threads", str(default_threads())]
    )
    assert done.exit_code == 0 and "remembered" in done.output and "policy lfru" in done.output, done.output
    assert "None" not in done.output, "depth is measured at load"


def test_plan_tells_files_that_are_no_stores_apart(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("")
    for name, told in (("model.gguf", "is a GGUF"), ("notes.txt", "is not a store"), ("gone", "no such store")):
        done = CliRunner().invoke(build_app(), ["plan", str(tmp_path / name)])
        assert done.exit_code == 1 and told in done.output, done.output
