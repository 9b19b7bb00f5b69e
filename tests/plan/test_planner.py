"""The planner where the answer is known, and the tuner's rule and memory: what loses is never left on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.plan.forecast import Machine, Setting
from stoker.plan.forecast_routing import Uniform, curves
from stoker.plan.planner import Choice, Situation, forecast_of, plan
from stoker.plan.routes import from_array
from stoker.plan.tuner import Trial, choices_path, median_ratio, recall, remember, wins, worth_another
from tests.plan.machines import machine, model

GIB = 1 << 30


def situation(slots: int = 16, **changes: Any) -> Situation:
    setting = Setting(slots=slots, ring_records=8, prefill_chunk=512)
    base = Situation(model(), Machine(machine(record_ms=3.0)), setting, curves()["general"], (slots,) * 10)
    return replace(base, **changes)


def test_every_choice_is_explained_in_a_line() -> None:
    found = plan(situation())
    assert set(found.reasons) == {"slots", "path", "policy", "prefetch", "depth", "reads", "prefill chunk", "heads"}
    assert all(reason and "\n" not in reason for reason in found.reasons.values())


def test_the_choice_is_never_slower_by_forecast_than_the_default() -> None:
    for slots in (4, 8, 16, 32, 48):
        one = situation(slots)
        assert forecast_of(one, plan(one).choice).tokens_s >= 0.999 * forecast_of(one, Choice()).tokens_s


def test_uniform_routing_gives_no_reason_to_leave_lru() -> None:
    found = plan(situation(routing=Uniform()))
    assert found.choice.policy == "lru" and "no other is worth" in found.reasons["policy"]


def test_a_policy_that_hits_more_is_taken_where_reads_decide() -> None:
    assert plan(situation()).choice.policy != "lru"


def test_heads_are_worth_training_where_reads_and_arithmetic_could_overlap() -> None:
    """Told with both speeds, never chosen: the output would change."""
    waits = plan(situation())
    assert waits.reasons["heads"].startswith("worth training") and "change the output" in waits.reasons["heads"]
    assert plan(situation(62)).reasons["heads"].startswith("not worth training")
    assert plan(situation(64)).reasons["heads"].startswith("not worth training: every expert stays")


def test_all_resident_leaves_nothing_to_decide() -> None:
    found = plan(situation(64))
    assert found.choice == Choice() and not found.candidates and "all experts fit" in found.reasons["slots"]


def test_prefetch_is_off_where_it_cannot_help() -> None:
    blind = situation(slots=4, machine=Machine(machine(record_ms=30.0, expert_bytes_s=1e12)), routing=Uniform())
    assert plan(blind).choice.prefetch == 0


def test_where_direct_reads_are_refused_the_plan_is_buffered() -> None:
    refused = Machine(replace(machine(), direct=False))
    found = plan(situation(machine=refused))
    assert found.choice.direct is False and "refuses" in found.reasons["reads"]


def test_slots_follow_need_where_routes_are_known() -> None:
    random = np.random.default_rng(0)
    narrow = random.integers(0, 6, (5, 2000, 1)) + np.arange(4) * 6 % 24
    wide = np.argsort(random.random((5, 2000, 64)), axis=-1)[:, :, :4]
    routes = from_array(np.concatenate([narrow, wide]), "made", 64)
    found = plan(situation(routes=routes))
    assert found.choice.slots is not None and sum(found.choice.slots) <= 160 and min(found.choice.slots) >= 4
    assert "by need" in found.reasons["slots"]
    evenly = plan(situation())
    assert evenly.choice.slots is None and "evenly" in evenly.reasons["slots"]


def test_options_are_what_the_engine_takes() -> None:
    from stoker.runtime.plan import Options

    assert Options(**Choice().options()).policy == "lru"
    assert Options(**Choice(slots=(4, 5), prefetch=0, policy="lfru").options()).slots == (4, 5)


# ---- the tuner


@pytest.mark.parametrize(
    ("before", "after", "won"),
    [
        ([100, 100, 100], [90, 91, 89], True),
        ([100, 100, 100], [99.5, 99.5, 99.5], False),  # less than it is worth
        ([100, 100, 100], [90, 90, 110], False),  # one of three loses
        ([100, 100, 100, 100], [90, 90, 90, 101], True),
        ([100], [50], False),  # one pair proves nothing
        ([100, 100], [110, 120], False),
    ],
)
def test_only_what_wins_in_pairs_is_kept(before: list[float], after: list[float], won: bool) -> None:
    assert wins(before, after) is won


def test_drift_that_hits_both_sides_of_a_pair_decides_nothing() -> None:
    drift = [1.0, 2.0, 4.0, 1.5]
    assert not wins([100 * d for d in drift], [100 * d for d in drift])
    assert wins([100 * d for d in drift], [80 * d for d in drift])
    assert median_ratio([100 * d for d in drift], [80 * d for d in drift]) == pytest.approx(1.25)


def test_a_clear_loser_is_given_up_early() -> None:
    assert worth_another([], [], 4)
    assert not worth_another([100], [130], 4)
    assert not worth_another([100, 100], [104, 103], 4)
    assert worth_another([100, 100], [104, 97], 4)
    assert not worth_another([100] * 4, [90] * 4, 4)


def test_a_choice_is_remembered_by_store_machine_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = choices_path("fingerprint", {"cpu": "a"})
    assert path != choices_path("fingerprint", {"cpu": "b"}) != choices_path("other", {"cpu": "b"})
    assert recall(path, 4 * GIB) is None
    trial = Trial("policy lfru", (100.0, 100.0), (90.0, 91.0), kept=True)
    remember(path, 4 * GIB, Choice(policy="lfru"), [trial])
    remember(path, 8 * GIB, Choice(policy="s3-fifo"), [])
    assert recall(path, int(4.2 * GIB)) == Choice(policy="lfru")
    assert recall(path, 8 * GIB) == Choice(policy="s3-fifo")
    assert recall(path, 16 * GIB) is None, "another budget, another choice"
    remember(path, 4 * GIB, Choice(), [])
    assert recall(path, 4 * GIB) == Choice(), "the newer one counts"
    assert "+10" in trial.line() and "kept" in trial.line()


def test_slots_of_a_larger_budget_are_not_used_in_a_smaller_one(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    remember(path, 4 * GIB, Choice(slots=(5, 7), policy="lfru"), [])
    assert recall(path, 4 * GIB) == Choice(slots=(5, 7), policy="lfru")
    assert recall(path, int(3.9 * GIB)) == Choice(policy="lfru")


def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    for text in ("{", "[]", '{"version": 2, "entries": 3}', '{"version": 0, "entries": []}'):
        path.write_text(text)
        assert recall(path, 4 * GIB) is None
