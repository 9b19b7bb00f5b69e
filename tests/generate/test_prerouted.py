"""Prerouted answers through the doors that people use: the same tokens alone, in sessions, batches, from the cache."""

import json
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stoker
from stoker.adapter.init import init_adapter
from stoker.cli.main import build_app
from stoker.errors import AdapterError, OptionError
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Job
from stoker.generate.model import Model
from stoker.generate.prefix import open_prefix_cache
from stoker.generate.request import Request, resolve_sampling
from stoker.store.reader import open_store
from stoker.trace.reader import Trace
from tests.runtime.conftest import packed
from tests.runtime.test_architectures import some_ids

__all__ = ["packed"]
ANSWER = 12
PROMPTS = [some_ids(1, n, seed=n)[0].tolist() for n in (1, 70, 9, 130, 70)]
PROMPTS[4] = PROMPTS[1][:66] + PROMPTS[4][66:]  # begins as another one does


@pytest.fixture(scope="module")
def adapter(packed, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.mktemp("adapter") / "routes"
    init_adapter(open_store(packed("qwen3_moe", 4)), directory, hidden=24, random=True, top_k=1)
    return directory


@pytest.fixture
def model(packed, adapter: Path) -> Iterator[Model]:  # type: ignore[no-untyped-def]
    with stoker.load(packed("qwen3_moe", 4), memory="8GiB", adapter=adapter, ctx_size=256, kv_tokens=1024) as loaded:
        yield loaded


def alone(model: Model, prompt: list[int]) -> list[int]:
    return model.generate(prompt, max_tokens=ANSWER, ignore_eos=True).token_ids


def test_the_mode_is_named(model: Model, packed) -> None:  # type: ignore[no-untyped-def]
    result = model.generate(PROMPTS[2], max_tokens=ANSWER, ignore_eos=True)
    assert result.routing["mode"] == "prerouter" and not result.routing["lossless"]
    assert result.routing["top_k"] == 1 and result.routing["adapter"]["name"] == "routes"
    assert "routing prerouter, K 1, adapter routes" in result.closing_line()
    assert result.as_dict()["routing"]["adapter"]["heads"] == 2
    stats = model.stats()
    assert stats["prerouter_fallbacks"] == 0 and stats["prerouter_routes"] == 2 * (ANSWER - 1)
    assert model.ledger()["adapter_bytes"] > 0
    with stoker.load(packed("qwen3_moe", 4), memory="8GiB", ctx_size=256) as plain:
        exact = plain.generate(PROMPTS[2], max_tokens=ANSWER, ignore_eos=True)
        assert exact.routing == {"mode": "exact", "lossless": True} and "routing" not in exact.closing_line()
        assert exact.token_ids != result.token_ids and plain.ledger()["adapter_bytes"] == 0


def test_a_session_s_next_turn_is_as_if_it_were_the_first(model: Model) -> None:
    with model.session() as session:
        first = model.generate(PROMPTS[2], session=session, max_tokens=ANSWER, ignore_eos=True).token_ids
        turn = [*PROMPTS[2], *first, 7, 8, 9]
        second = model.generate(turn, session=session, max_tokens=ANSWER, ignore_eos=True)
    assert second.usage.cached_tokens == len(PROMPTS[2]), "the prompt stays, the answer is prompt now"
    assert second.token_ids == alone(model, turn)


@pytest.mark.parametrize("kv_tokens", [1024, 320])
def test_batches_and_kept_prefixes_change_nothing(packed, adapter: Path, kv_tokens: int) -> None:  # type: ignore[no-untyped-def]
    """With little room answers are put back and computed again, and prefixes are taken up where they are kept."""
    with stoker.load(
        packed("qwen3_moe", 4), memory="8GiB", adapter=adapter, ctx_size=256, kv_tokens=kv_tokens, parallel=3
    ) as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        prefix = open_prefix_cache(model.runtime)
        batcher = Batcher(model, parallel=3, prefix=prefix)
        sampling = resolve_sampling({}, {})
        try:
            for _ in range(2):
                events: list[queue.Queue[object]] = [queue.Queue() for _ in PROMPTS]
                for prompt, own in zip(PROMPTS, events, strict=True):
                    request = Request(tuple(prompt), sampling, max_tokens=ANSWER, ignore_eos=True)
                    batcher.submit(Job(request), own.put)
                for own, tokens in zip(events, expected, strict=True):
                    while not isinstance(event := own.get(timeout=180), Done):
                        pass
                    assert event.result.token_ids == tokens
            assert prefix is not None and prefix.stats()["hit_tokens"] > 0
            assert model.stats()["prerouter_fallbacks"] == 0
        finally:
            batcher.close()
            if prefix is not None:
                prefix.close()


def test_what_does_not_fit_is_refused_before_loading(packed, adapter: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AdapterError, match="another store"):
        stoker.load(packed("qwen3_moe", 8), memory="8GiB", adapter=adapter)
    with pytest.raises(OptionError, match="unknown routing mode"):
        stoker.load(packed("qwen3_moe", 4), memory="8GiB", routing="random")
    with pytest.raises(OptionError, match="needs an adapter with heads"):
        stoker.load(packed("qwen3_moe", 4), memory="8GiB", routing="prerouter")


def test_the_gate_with_the_adapter_s_k(packed, adapter: Path) -> None:  # type: ignore[no-untyped-def]
    """`--routing gate` leaves the heads aside; K remains the adapter's."""
    with stoker.load(packed("qwen3_moe", 4), memory="8GiB", routing="gate", adapter=adapter, ctx_size=256) as model:
        result = model.generate(PROMPTS[2], max_tokens=4, ignore_eos=True)
        assert result.routing["mode"] == "gate" and result.routing["top_k"] == 1


def test_the_command_and_its_trace(packed, adapter: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trace = tmp_path / "run.trace"
    with stoker.load(packed("qwen3_moe", 4), memory="8GiB", adapter=adapter, ctx_size=256, trace=trace) as model:
        model.generate(PROMPTS[2], max_tokens=4, ignore_eos=True)
    about = Trace(trace).about
    assert about["routing"]["mode"] == "prerouter" and about["routing_counters"]["prerouter_fallbacks"] == 0
    asked = CliRunner().invoke(
        build_app(), ["run", str(packed("qwen3_moe", 8)), "x", "--memory", "8GiB", "--adapter", str(adapter)]
    )
    assert asked.exit_code == 1 and "another store" in asked.output
    assert json.dumps(about["routing"])
