"""`quality=`: the mode that is loaded, what is told of it, and what happens when its bound breaks while it serves."""

import logging
import queue
from pathlib import Path

import pytest

import stoker
from stoker.adapter.init import init_adapter
from stoker.errors import OptionError, StokerError
from stoker.generate import quality
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Failed, Job
from stoker.generate.model import Model
from stoker.generate.probe import QualityProbe, probe_of
from stoker.generate.quality import MeasuredMode, Promise, Records, remember
from stoker.generate.request import Request, resolve_sampling
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer, packed
from tests.runtime.test_architectures import some_ids

__all__ = ["packed"]
GIB = 2**30
MEMORY = 6 * GIB  # the process that runs the tests counts
PROMPT = some_ids(1, 20, seed=1)[0].tolist()
EXACT = MeasuredMode("exact", {}, 0.0, 0.0, 1.0, 1.0, 20.0, 0.0, 0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "cache_directory", lambda: tmp_path / "cache")


@pytest.fixture
def store(packed: Packer, tmp_path: Path) -> Path:
    """A store of which one fast mode was measured: random heads, KL up to 0.02."""
    directory = packed("qwen3_moe", 4)
    adapter = init_adapter(open_store(directory), tmp_path / "heads", hidden=24, random=True, top_k=1)
    options = {"adapter": str(tmp_path / "heads")}
    fast = MeasuredMode(
        "heads", options, 0.01, 0.02, 1.01, 1.02, 5.0, 0.0, 900, adapter_fingerprint=adapter.fingerprint
    )
    remember(open_store(directory).fingerprint, Records(MEMORY, [EXACT, fast]))
    return directory


def load(store: Path, bound: str) -> Model:
    return stoker.load(store, memory=MEMORY, ctx_size=256, threads=1, quality=bound)


def test_the_bound_decides_what_is_loaded(store: Path) -> None:
    with load(store, "kl<=0.05") as model:
        assert model.runtime.mode.routing == "prerouter"
        assert model.promise is not None and model.promise.about()["chosen"] == "heads"
        assert probe_of(model) is not None and probe_of(model).limit == 0.05
        model.generate(PROMPT, max_tokens=4, ignore_eos=True)
        model.check_quality()  # a mode that was promised may replace experts
    with load(store, "ppl<=+5%") as model:
        assert probe_of(model).limit == 0.02  # what was measured of the mode
    for bound in ("kl<=0.015", "exact"):
        with load(store, bound) as model:
            result = model.generate(PROMPT, max_tokens=4, ignore_eos=True)
            assert result.routing["lossless"] and probe_of(model) is None
            model.check_quality()


def test_one_or_the_other(store: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--quality chooses the mode"):
        stoker.load(store, memory=MEMORY, quality="kl<=0.05", adapter=tmp_path / "heads")
    with pytest.raises(OptionError, match="stoker eval modes"):
        stoker.load(store, memory=2 * MEMORY, quality="kl<=0.05")


def test_an_adapter_that_changed_is_refused(store: Path, tmp_path: Path) -> None:
    init_adapter(open_store(store), tmp_path / "other", hidden=24, random=True, top_k=1, seed=1)
    for file in (tmp_path / "other").iterdir():
        (tmp_path / "heads" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(OptionError, match="changed since it was measured"):
        load(store, "kl<=0.05")


def test_exact_says_when_it_was_not() -> None:
    kept = Promise(quality.Bound("exact"))
    kept.check({"dropped_experts": 0, "swapped_choices": 0})
    for name in ("dropped_experts", "swapped_choices", "prerouter_routes"):
        with pytest.raises(StokerError, match=name):
            kept.check({name: 3})


def answers(batcher: Batcher, count: int, tokens: int) -> list[Done]:
    """So many answers to the same prompt at once."""
    events: list[queue.Queue[object]] = [queue.Queue() for _ in range(count)]
    sampling = resolve_sampling({}, {})
    for own in events:
        batcher.submit(Job(Request(tuple(PROMPT), sampling, max_tokens=tokens, ignore_eos=True)), own.put)
    found = []
    for own in events:
        while not isinstance(event := own.get(timeout=180), Done):
            assert not isinstance(event, Failed), event
        found.append(event)
    return found


def test_a_broken_bound_ends_in_exact_answers(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Random heads are far from the gates: with every token probed the bound breaks in the first answers; those go on
    by the gates, and what comes after is bit for bit the plain model's."""
    with stoker.load(store, memory=MEMORY, ctx_size=256, threads=1) as plain:
        exact = plain.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids
    with load(store, "kl<=0.05") as model, caplog.at_level(logging.WARNING, "stoker.engine"):
        probe = QualityProbe(model.runtime, 1e-6, share=1.0)
        batcher = Batcher(model, parallel=2, probe=probe)
        try:
            answers(batcher, 2, 40)
            assert probe.broken and 32 <= probe.stats()["probes"] < 80
            (after,) = answers(batcher, 1, 12)
        finally:
            batcher.close()
        assert after.result.token_ids == exact
        about = model.runtime.mode.about()
    assert about == {"mode": "exact", "lossless": True, "fell_back_from": "prerouter"}
    assert "prerouter broke its bound" in caplog.text


def test_a_bound_that_holds_changes_nothing(store: Path) -> None:
    with load(store, "kl<=0.05") as model:
        expected = model.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids
        batcher = Batcher(model, parallel=2, probe=QualityProbe(model.runtime, 100.0, share=1 / 2))
        try:
            assert [done.result.token_ids for done in answers(batcher, 2, 12)] == [expected] * 2
            stats = batcher.probe.stats()
        finally:
            batcher.close()
        assert stats["probes"] == 11 and stats["kl_mean"] > 0.05  # they are random heads
        assert model.runtime.mode.routing == "prerouter" and not stats["broken"]
