"""Steps of single tokens under pinned rosters take one native call: they must be the general rule in every bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.native.attention import topk_softmax
from stoker.routing.roster import Roster
from stoker.routing.roster_options import Prefix, RosterOptions
from stoker.routing.rosters import RosterRule, RosterState
from stoker.routing.rule import LayerInfo, Rows, Span
from stoker.routing.select import LayerRule
from stoker.routing.shift import Shift

LAYERS, STEPS, PROMPT, TOPIC = 2, 150, 20, 50
QUICK = Shift(evidence=4.0, settle_tokens=8, memory_tokens=48, explore_tokens=16)


class General(RosterRule):
    """Without the native call."""

    def _begin(self, rows: Rows) -> None:
        super()._begin(rows)
        self._step = None


def rule_of(kind: type[RosterRule], layer_rule: LayerRule, experts: int, size: int, shift: Shift | None) -> RosterRule:
    rule = kind(RosterOptions((size,), Prefix(tokens=PROMPT + 5), 0.1, shift))
    rule.attach(
        [
            LayerInfo(index, index, experts, 8, layer_rule.top_k, 4096, lambda: (), lambda: layer_rule, slots=experts)
            for index in range(LAYERS)
        ]
    )
    return rule


def steps(seed: int, sequences: int) -> Iterator[list[tuple[int, int]]]:
    """(sequence, tokens) of each step: prompts alone and mixed with answers, later ever other answers together, some
    with two tokens at once."""
    random = np.random.default_rng(seed)
    left = dict.fromkeys(range(sequences), PROMPT)
    for step in range(STEPS):
        step_parts = []
        for one in range(sequences):
            if left[one] and (one == 0 or step > 7 * one):
                tokens = min(left[one], 7)
                left[one] -= tokens
                step_parts.append((one, tokens))
            elif not left[one] and random.random() < 0.9:
                step_parts.append((one, 2 if random.random() < 0.05 else 1))
        if step_parts:
            yield step_parts


def some_logits(random: np.random.Generator, taste_E: np.ndarray, tokens: int, coarse: bool) -> Tensor:
    logits_TE = taste_E + random.normal(size=(tokens, len(taste_E)))
    if coarse:  # many equal ones
        logits_TE = np.round(logits_TE * 2) / 2
    return torch.from_numpy(logits_TE.astype(np.float32))


def state_of(roster: Roster) -> dict[str, object]:
    found = {name: value for name, value in vars(roster).items() if name not in ("_native", "detector")}
    found |= {} if roster.detector is None else vars(roster.detector)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def same_states(ours: RosterState, theirs: RosterState) -> bool:
    return [state_of(one) for one in ours.rosters] == [state_of(one) for one in theirs.rosters]


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("layer_rule", "experts", "size", "shift"),
    [
        (LayerRule(8), 128, 32, QUICK),
        (LayerRule(2), 8, 4, QUICK),
        (LayerRule(4, renormalise=False), 32, 8, Shift(evidence=3.0, settle_tokens=4)),
        (LayerRule(3), 24, 3, None),
        (LayerRule(2, "sigmoid"), 8, 4, QUICK),
    ],
)
def test_equals_the_general_rule_in_every_bit(
    layer_rule: LayerRule, experts: int, size: int, shift: Shift | None, coarse: bool, sequences: int
) -> None:
    random = np.random.default_rng(experts)
    fast, general = (rule_of(kind, layer_rule, experts, size, shift) for kind in (RosterRule, General))
    ours, theirs = ([rule.new_state() for _ in range(sequences)] for rule in (fast, general))
    lengths, native = [0] * sequences, 0
    for number, parts in enumerate(steps(experts, sequences)):
        if number % TOPIC == 0:
            taste_SLE = random.normal(size=(sequences, LAYERS, experts)) * 1.5
        ends = np.cumsum([tokens for _, tokens in parts]).tolist()
        spans = [(end - tokens, end, lengths[one], PROMPT) for end, (one, tokens) in zip(ends, parts, strict=True)]
        rows = [
            Rows(number, tuple(Span(*span, states[one]) for span, (one, _) in zip(spans, parts, strict=True)))
            for states in (ours, theirs)
        ]
        for layer in range(LAYERS):
            logits_TE = torch.cat([some_logits(random, taste_SLE[one, layer], n, coarse) for one, n in parts])
            weights_TK, index_TK = topk_softmax(logits_TE, layer_rule.top_k, layer_rule.renormalise)
            if number % 25 == 17:  # a step that fails after this layer and is tried again, as it was or as a new one
                fast.route(layer, rows[0], torch.empty(0), logits_TE.flip(1), index_TK, weights_TK)
                general.route(layer, rows[1], torch.empty(0), logits_TE.flip(1), index_TK, weights_TK)
                rows = [Rows(number, one.spans) for one in rows] if layer == 0 and number % 50 == 17 else rows
            got, wanted = (
                rule.route(layer, one, torch.empty(0), logits_TE, index_TK, weights_TK)
                for rule, one in zip((fast, general), rows, strict=True)
            )
            assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        native += LAYERS - len(ours[parts[0][0]].pending)
        for rule, one in zip((fast, general), rows, strict=True):
            rule.after_step(one)
        for one, tokens in parts:
            lengths[one] += tokens
        assert number % 7 or all(same_states(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(same_states(one, other) for one, other in zip(ours, theirs, strict=True))
    assert fast.counters() == general.counters()
    assert fast.figures() == pytest.approx(general.figures(), rel=1e-4)
    assert (native > 50) == layer_rule.plain
    assert shift is None or fast.counters()["roster_shifts"] > 0 or size == 3
    pins = [roster.pins for state in ours for roster in state.rosters]
    assert shift is None or max(pins) > 1, "a topic changed, and a roster was pinned anew"


def test_logits_that_are_no_numbers_are_for_the_general_rule() -> None:
    rule = rule_of(RosterRule, LayerRule(2), 8, 4, QUICK)
    state = rule.new_state()
    random = np.random.default_rng(3)
    for number in range(PROMPT + 8):
        rows = Rows(number, (Span(0, 1, number, 0, state),))
        for layer in range(LAYERS):
            logits_TE = some_logits(random, np.zeros(8), 1, False)
            if number == PROMPT + 7:
                logits_TE[0, 3] = float("-inf")
            weights_TK, index_TK = topk_softmax(logits_TE, 2, True)
            rule.route(layer, rows, torch.empty(0), logits_TE, index_TK, weights_TK)
            pinned = state.rosters[layer].pinned
            assert (layer not in state.pending) == (pinned and number < PROMPT + 7)
        rule.after_step(rows)
    assert state.pinned and state.tokens == PROMPT + 8


def test_what_is_held_is_said_of_pinned_rosters_that_found_their_slots() -> None:
    held = {0: 4, 1: 3}
    rule = RosterRule(RosterOptions((4,), Prefix(tokens=PROMPT), 0.1, None))
    rule.attach(
        [
            LayerInfo(
                index, index, 8, 8, 2, 4096, lambda: (), lambda: LayerRule(2), 6, lambda _, index=index: held[index]
            )
            for index in range(LAYERS)
        ]
    )
    state, random = rule.new_state(), np.random.default_rng(3)
    for number in range(PROMPT):
        rows = Rows(number, (Span(0, 1, number, 0, state),))
        assert not rule.holds(0, rows)
        for layer in range(LAYERS):
            logits_TE = some_logits(random, np.zeros(8), 1, False)
            weights_TK, index_TK = topk_softmax(logits_TE, 2, True)
            rule.route(layer, rows, torch.empty(0), logits_TE, index_TK, weights_TK)
        rule.after_step(rows)
    assert rule.holds(0, rows) and not rule.holds(1, rows), "one of four found no slot in layer 1"
    assert not rule.holds(0, Rows(0, (*rows.spans, Span(1, 2, 0, 0, rule.new_state()))))
    assert not rule.holds(0, Rows(0, (*rows.spans, Span(1, 2, 0, 0, None))))


def test_a_layer_that_was_routed_and_then_was_not_is_the_general_rule_s() -> None:
    """And the other way round: of one step the last answer counts, whoever gave it."""
    fast, general = (rule_of(kind, LayerRule(2), 8, 4, QUICK) for kind in (RosterRule, General))
    states = [fast.new_state(), general.new_state()]
    random = np.random.default_rng(3)
    for number in range(PROMPT + 12):
        rows = [Rows(number, (Span(0, 1, number, 0, state),)) for state in states]
        for layer in range(LAYERS):
            logits_TE = some_logits(random, np.zeros(8), 1, False)
            no_number_TE = logits_TE.clone()
            no_number_TE[0, 3] = float("-inf")
            tries = {PROMPT + 7: (logits_TE, no_number_TE), PROMPT + 9: (no_number_TE, logits_TE)}
            for tried_TE in tries.get(number, (logits_TE,)):
                weights_TK, index_TK = topk_softmax(tried_TE, 2, True)
                got, wanted = (
                    rule.route(layer, one, torch.empty(0), tried_TE, index_TK, weights_TK)
                    for rule, one in zip((fast, general), rows, strict=True)
                )
                assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        for rule, one in zip((fast, general), rows, strict=True):
            rule.after_step(one)
        assert same_states(*states)
