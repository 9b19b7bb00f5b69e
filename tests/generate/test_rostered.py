"""Rosters and cache-aware routing through the doors that people use: named, metered, the same alone and in batches."""

import queue
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import stoker
from stoker.cli.main import build_app
from stoker.errors import OptionError
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Job
from stoker.generate.model import Model
from stoker.generate.prefix import open_prefix_cache
from stoker.generate.report import described
from stoker.generate.request import Request, resolve_sampling
from stoker.trace.reader import Trace
from tests.runtime.conftest import packed
from tests.runtime.test_architectures import some_ids

__all__ = ["packed"]
ANSWER = 24
PROMPTS = [some_ids(1, n, seed=n)[0].tolist() for n in (20, 70, 33, 70)]
PROMPTS[3] = PROMPTS[1][:66] + PROMPTS[3][66:]  # begins as another one does
ROSTER = {"routing": "roster", "roster_size": "4", "pin_after": "prompt", "delta": 0.1}
OWN = {"routing": "cache-aware", "cache_lambda": 0.2, "own_slots": 4}


def alone(model: Model, prompt: list[int]) -> list[int]:
    return model.generate(prompt, max_tokens=ANSWER, ignore_eos=True).token_ids


def opened(store: Path, **more: Any) -> Model:
    return stoker.load(store, **{"memory": "8GiB", "ctx_size": 256, "kv_tokens": 1024} | more)


@pytest.mark.parametrize("options", [ROSTER, OWN], ids=["roster", "cache-aware"])
@pytest.mark.parametrize("kv_tokens", [1024, 256])
def test_batches_and_the_prefix_cache_change_nothing(packed, options: dict[str, Any], kv_tokens: int) -> None:  # type: ignore[no-untyped-def]
    """With little room answers are put back and computed again, to the same rosters."""
    with opened(packed("qwen3_moe", 4), **options, kv_tokens=kv_tokens, parallel=3) as model:
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
        finally:
            batcher.close()
            if prefix is not None:
                prefix.close()


def test_a_session_s_next_turn_is_as_if_it_were_the_first(packed) -> None:  # type: ignore[no-untyped-def]
    with opened(packed("qwen3_moe", 4), **ROSTER) as model:
        with model.session() as session:
            first = model.generate(PROMPTS[0], session=session, max_tokens=ANSWER, ignore_eos=True).token_ids
            turn = [*PROMPTS[0], *first, 7, 8, 9]
            second = model.generate(turn, session=session, max_tokens=ANSWER, ignore_eos=True)
        assert second.token_ids == alone(model, turn) and second.usage.cached_tokens == 0


def test_rosters_are_named_and_read_nothing(packed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Six slots for eight experts: the answer's tokens read nothing, and all that tells of a run names the mode."""
    trace = tmp_path / "run.trace"
    with opened(packed("qwen3_moe", 4), **ROSTER, slots=(6, 6, 6), trace=trace) as model:
        result = model.generate(PROMPTS[1], max_tokens=ANSWER, ignore_eos=True)
        assert result.stats["decode"]["read_bytes"] == 0 and result.stats["decode"]["misses"] == 0
        assert result.routing["mode"] == "roster" and result.routing["settings"]["sizes"] == [4]
        line = result.closing_line()
        assert "routing roster, sizes 4, pin after prompt, delta 0.1" in line and "of choices swapped" in line
        stats = model.stats()
        assert stats["roster_pins"] == 1 and 0 < stats["route_meters"]["swapped_share"] < 1
    about = Trace(trace).about
    assert about["routing"]["mode"] == "roster" and about["routing_counters"]["roster_pins"] == 1


def test_sequences_are_admitted_as_their_rosters_fit(packed) -> None:  # type: ignore[no-untyped-def]
    with opened(packed("qwen3_moe", 4), **ROSTER, slots=(6, 6, 6)) as model:
        assert model.runtime.rule.room() == 1, "4 of 6 slots, then 2 are left"
        sequence = model.runtime.new_sequence()
        model.runtime.prefill(sequence, PROMPTS[0])
        assert model.runtime.rule.room() == 0
        sequence.close()
        assert model.runtime.rule.room() == 1
    with opened(packed("qwen3_moe", 4), **ROSTER) as model:
        assert model.runtime.rule.room() is None, "every expert has a slot"


def test_cache_aware_answers_may_be_their_own(packed) -> None:  # type: ignore[no-untyped-def]
    with opened(packed("qwen3_moe", 4), **OWN, slots=(4, 4, 4)) as model:
        first = alone(model, PROMPTS[0])
        alone(model, PROMPTS[1])
        assert alone(model, PROMPTS[0]) == first
        assert model.stats()["swapped_choices"] > 0
    with opened(packed("qwen3_moe", 4), routing="cache-aware", cache_lambda=0.0) as model:
        none = alone(model, PROMPTS[0])
    with opened(packed("qwen3_moe", 4)) as model:
        assert alone(model, PROMPTS[0]) == none, "no lead: the model's own routes, bit for bit"


def test_no_shift_is_carried_to_the_rosters_and_told(packed) -> None:  # type: ignore[no-untyped-def]
    for shift in (None, True, False):
        with opened(packed("qwen3_moe", 4), **ROSTER, shift=shift) as model:
            told = model.generate(PROMPTS[0], max_tokens=1).routing
            assert (model.runtime.rule.options.shift is None) == (shift is False)
        assert (told["settings"]["shift"] is None) == (shift is False)
        assert described(told).endswith("no shift") == (shift is False)


def test_options_are_refused_by_name(packed) -> None:  # type: ignore[no-untyped-def]
    store = packed("qwen3_moe", 4)
    for options, message in (
        ({"roster_size": "4"}, "no effect without --routing roster"),
        ({"shift": False}, "--shift/--no-shift.*no effect without --routing roster"),
        ({"routing": "cache-aware", "shift": True}, "no effect without --routing roster"),
        ({"routing": "roster", "cache_lambda": 0.1}, "no effect without --routing cache-aware"),
        ({"routing": "roster", "roster_size": "9"}, "do not fit"),
        ({"routing": "roster", "pin_after": "soon"}, "cannot be read"),
        ({"routing": "cache-aware", "cache_lambda": 2.0}, "out of range"),
    ):
        with pytest.raises(OptionError, match=message):
            opened(store, **options)
    for words in (["--roster-size", "4"], ["--no-shift"], ["--shift"]):
        asked = CliRunner().invoke(build_app(), ["run", str(store), "x", "--memory", "8GiB", *words])
        assert asked.exit_code == 2 and "--routing roster" in asked.output
