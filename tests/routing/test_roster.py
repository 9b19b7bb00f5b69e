"""The roster rule against plain Python that goes token by token, and against what it promises."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from stoker.errors import OptionError
from stoker.routing.roster import Phase, Roster
from stoker.routing.roster_options import Prefix, RosterOptions, together
from stoker.routing.settings import roster_settings
from stoker.routing.shift import Shift
from tests.routing.roster_oracle import PlainRoster


def topical(seed: int, tokens: int, experts: int, topics: int = 1, noise: float = 1.0) -> np.ndarray:
    """float32 scores [T, E] with a taste that changes with the topic."""
    random = np.random.default_rng(seed)
    taste = random.normal(size=(topics, experts)) * 1.5
    each = -(-tokens // topics)
    return (np.repeat(taste, each, axis=0)[:tokens] + noise * random.normal(size=(tokens, experts))).astype(np.float32)


CASES = [
    (8, 2, 4, 0.1, 40, None),
    (8, 2, 4, 0.25, None, None),
    (8, 2, 2, 0.0, 30, None),
    (8, 8, 8, 0.2, 10, None),
    (32, 4, 8, 0.05, 60, Shift()),
    (32, 4, 8, 0.3, 60, Shift(evidence=4.0, memory_tokens=48)),
    (32, 4, 8, float("inf"), 60, Shift()),
    (32, 4, 32, 0.1, 25, Shift()),
    (128, 8, 32, 0.15, 3, Shift(settle_tokens=8, explore_tokens=16)),
]


@pytest.mark.parametrize(("experts", "chosen", "size", "delta", "pin_at", "shift"), CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_equals_the_rule_token_by_token(
    experts: int, chosen: int, size: int, delta: float, pin_at: int | None, shift: Shift | None, seed: int
) -> None:
    scores_TE = topical(seed, 300, experts, topics=3)
    plain = PlainRoster(experts, chosen, size, delta, pin_at, shift)
    wanted_TK = [plain.token(row) for row in scores_TE.astype(float).tolist()]
    roster = Roster(experts, chosen, size, delta, pin_at, shift)
    assert roster.route(scores_TE).tolist() == wanted_TK
    assert set(roster.members()) == plain.roster and roster.phase.value == plain.phase
    assert roster.pins == sum(what == "pin" for _, what in plain.log)


@pytest.mark.parametrize(("experts", "chosen", "size", "delta", "pin_at", "shift"), CASES)
def test_cuts_do_not_matter(
    experts: int, chosen: int, size: int, delta: float, pin_at: int | None, shift: Shift | None
) -> None:
    scores_TE = topical(5, 300, experts, topics=2)
    whole = Roster(experts, chosen, size, delta, pin_at, shift)
    wanted_TK = whole.route(scores_TE)
    for lengths in ([1] * 300, [7] * 43, [64, 1, 1, 200, 34], [299, 1]):
        parts = Roster(experts, chosen, size, delta, pin_at, shift)
        got, first = [], 0
        for length in lengths:
            got.append(parts.route(scores_TE[first : first + length]))
            first += length
        assert np.array_equal(np.concatenate(got), wanted_TK)
        assert parts.members() == whole.members() and parts.changed == whole.changed
        assert parts.displaced == whole.displaced and parts.range_sum == whole.range_sum


def test_the_cases_reach_every_part_of_the_rule() -> None:
    """Displacement, pinning and a shift all happen in the cases above: a rule that never did them would be caught."""
    rosters = []
    for experts, chosen, size, delta, pin_at, shift in CASES:
        roster = Roster(experts, chosen, size, delta, pin_at, shift)
        roster.route(topical(1, 300, experts, topics=3))
        rosters.append(roster)
    assert any(one.displaced for one in rosters) and any(one.pins > 1 for one in rosters)
    assert any(one.phase is Phase.BARRIER for one in rosters)


def test_once_pinned_only_members_are_used_and_a_copy_goes_its_own_way() -> None:
    scores_TE = topical(3, 200, 32)
    roster = Roster(32, 4, 8, 0.2, pin_at=40)
    roster.route(scores_TE[:40])
    assert roster.pinned and len(roster.members()) == 8
    copy = roster.copy()
    assert set(roster.route(scores_TE[40:]).ravel()) <= set(roster.members())
    assert copy.tokens == 40 and np.array_equal(copy.route(scores_TE[40:]), roster.route(scores_TE[40:]))


def test_no_bias_until_m_experts_were_used() -> None:
    scores_TE = topical(4, 50, 32, noise=0.0)  # always the same four
    roster = Roster(32, 4, 8, float("inf"))
    free_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :4]
    assert np.array_equal(roster.route(scores_TE), free_TK) and roster.phase is Phase.EXPLORE


def test_a_shift_is_seen_and_pinned_anew_within_64_tokens() -> None:
    scores_TE = topical(8, 600, 32, topics=2)
    roster = Roster(32, 4, 8, 0.25, pin_at=60, shift=Shift())
    roster.route(scores_TE[:300])
    before = set(roster.members())
    assert roster.pins == 1
    roster.route(scores_TE[300:364])
    assert roster.pins == 2 and roster.pinned and len(before & set(roster.members())) < 6
    roster.route(scores_TE[364:])
    assert roster.pins == 2


@pytest.mark.parametrize("trained", [None, {"sizes": [8], "pin_after": "60", "delta": 0.25, "shift": None}])
def test_without_shifts_the_same_text_never_moves_a_pinned_roster(trained: dict[str, object] | None) -> None:
    scores_TE = topical(8, 600, 32, topics=2)
    pins = {}
    for shift in (None, True, False):
        asked = SimpleNamespace(roster_size="8", pin_after="60", delta=0.25, shift=shift)
        roster = roster_settings(asked, 32, 4, trained).new(0, 32, 4, pin_at=60)
        roster.route(scores_TE[:60])
        members = roster.members()
        roster.route(scores_TE[60:])
        pins[shift] = roster.pins, roster.members() == members
    assert pins == {None: (2, False), True: (2, False), False: (1, True)}


def test_union_of_pinned_rosters() -> None:
    one, two = (Roster(8, 2, 2, 0.0, pin_at=1) for _ in range(2))
    assert together([one, two]) == 0
    one.route(np.array([[3, 2, 0, 0, 0, 0, 0, 0.0]]))
    two.route(np.array([[3, 0, 2, 0, 0, 0, 0, 0.0]]))
    assert together([one, two]) == 3


def test_settings_are_read_or_refused() -> None:
    options = RosterOptions.parse("32,24", "20%", 0.1)
    assert options.sizes == (32, 24) and options.pin_after.place(10, 1000) == 200
    assert Prefix.parse("256").place(10, 1000) == 256 and Prefix.parse("prompt").place(100, 1000) == 100
    assert Prefix.parse("never").place(10, 1000) is None and str(Prefix.parse("20%")) == "20%"
    options.check_shape(2, 64, 8)
    for layers, experts, chosen in ((3, 64, 8), (2, 30, 8), (2, 64, 25)):
        with pytest.raises(OptionError):
            options.check_shape(layers, experts, chosen)
    for size, pin_after, delta in (("x", "20%", 0.1), ("4", "0%", 0.1), ("4", "-3", 0.1), ("4", "20%", -1.0)):
        with pytest.raises(OptionError):
            RosterOptions.parse(size, pin_after, delta)
