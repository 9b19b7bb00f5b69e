"""Single tokens under pinned rosters in one call: against torch and numpy, and what is refused."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from stoker.native.attention import topk_softmax
from stoker.native.roster import PinnedRoster, PinnedStep, TokenFacts, held_shares
from stoker.routing.roster import Phase, Roster, top
from stoker.routing.select import LayerRule, weigh


def some_roster(random: np.random.Generator, experts: int, chosen: int, size: int) -> tuple[PinnedRoster, Any]:
    member_E = np.zeros(experts, dtype=bool)
    member_E[random.permutation(experts)[:size]] = True
    arrays = member_E, np.zeros(experts, dtype=np.int64), np.full(experts, -1)
    return PinnedRoster(*arrays, chosen), arrays


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("experts", "chosen", "size"), [(128, 8, 32), (8, 2, 4), (40, 1, 1), (16, 16, 16), (64, 6, 48)]
)
def test_is_the_best_of_the_members_with_the_layers_own_weights(
    experts: int, chosen: int, size: int, renormalise: bool
) -> None:
    random = np.random.default_rng(experts)
    rosters = [some_roster(random, experts, chosen, size) for _ in range(50)]
    logits_TE = torch.from_numpy(random.normal(size=(50, experts)).astype(np.float32) * 3)
    logits_TE[::5] = logits_TE[::5].round()
    weights_TK, gate_TK = topk_softmax(logits_TE, chosen, renormalise)
    step = PinnedStep([[None, one] for one, _ in rosters], [True, renormalise])
    route = step.route(1, logits_TE, gate_TK, weights_TK)
    assert route is not None and step.covers(1) and not step.covers(0)
    scores_TE = logits_TE.double().numpy()
    member_TE = np.stack([arrays[0] for _, arrays in rosters])
    free_TK, used_TK = top(scores_TE, chosen), top(np.where(member_TE, scores_TE, -np.inf), chosen)
    assert np.array_equal(step.free_LTK[1], free_TK)
    kept, mass, kl = 0, 0.0, 0.0
    theirs_TK = weigh(logits_TE, torch.from_numpy(used_TK), LayerRule(chosen, renormalise=renormalise))
    for row, (_, (_, count_E, last_E)) in enumerate(rosters):
        gate, used = set(gate_TK[row].tolist()), set(used_TK[row].tolist())
        same = gate == used
        assert route[0][row].tolist() == (gate_TK[row].tolist() if same else used_TK[row].tolist())
        assert torch.equal(route[1][row], weights_TK[row] if same else theirs_TK[row])
        assert not count_E.any()
        (facts,) = map(TokenFacts._make, step.finish(row, 7))
        assert count_E.sum() == chosen and sorted(np.flatnonzero(last_E == 7)) == sorted(used)
        assert facts.layer == 1 and facts.changed == len(set(free_TK[row].tolist()) - used)
        assert facts.range == np.ptp(scores_TE[row])
        weight_K = np.exp(scores_TE[row][free_TK[row]])
        assert facts.held == pytest.approx(weight_K[member_TE[row][free_TK[row]]].sum() / weight_K.sum())
        p_E = logits_TE[row].softmax(-1).double()
        kept += len(gate & used)
        mass += float(p_E[list(used)].sum() / p_E[list(gate)].sum())
        kl += meter_kl(p_E.numpy(), gate, used)
        if row == 0:
            shares_T = held_shares(np.take_along_axis(scores_TE, free_TK, axis=1)[:1], free_TK[:1], member_TE[0])
            assert shares_T[0] == facts.held, "one number, whoever asks"
    meters = step.take_meters()
    assert (meters.tokens, meters.kept) == (50, kept)
    assert meters.mass == pytest.approx(mass) and meters.kl == pytest.approx(kl, abs=1e-6)
    assert step.take_meters().tokens == 0


def meter_kl(p_E: np.ndarray, gate: set[int], used: set[int]) -> float:
    gate_sum, used_sum = p_E[list(gate)].sum(), p_E[list(used)].sum()
    pairs = ((p_E[e] / gate_sum, p_E[e] / used_sum if e in used else 1e-9) for e in gate)
    return float(sum(one * np.log(one / other) for one, other in pairs))


def test_steps_are_what_the_plain_rule_does_one_token_at_a_time() -> None:
    """Two sequences, three layers of which one's roster is not pinned: the same choices, counts and sums."""
    random = np.random.default_rng(5)
    ours = [[pinned(random, 16, 4, 8) for _ in range(3)] for _ in range(2)]
    theirs = [[roster.copy() for roster in row] for row in ours]
    step = PinnedStep([[row[0].native(), None, row[2].native()] for row in ours], [True] * 3)
    given, copies = [], []
    for number in range(6):
        step.begin()
        routed = (0, 2) if number != 3 else (2,)
        for layer in routed:
            logits_TE = torch.from_numpy(random.normal(size=(2, 16)).astype(np.float32))
            weights_TK, gate_TK = topk_softmax(logits_TE, 4, True)
            if number == 4:  # tried, given up, and tried again
                step.route(layer, logits_TE.flip(1), gate_TK, weights_TK)
            found = step.route(layer, logits_TE, gate_TK, weights_TK)
            assert found is not None
            given.append(found[0])
            copies.append(found[0].clone())
            for row in range(2):
                wanted_K = theirs[row][layer].route(logits_TE[row : row + 1].numpy())[0]
                assert sorted(found[0][row].tolist()) == sorted(wanted_K.tolist())
        for row in range(2):
            facts = step.finish(row, ours[row][2].tokens)
            assert [layer for layer, *_ in facts] == list(routed)
            for layer, score_range, held, changed in facts:
                free_TK = step.free_LTK[layer, row : row + 1]
                scores = partial(step.scores, layer, row)
                assert not ours[row][layer].note_token(score_range, held, changed, free_TK, scores)
    assert all(map(torch.equal, given, copies)), "who keeps a step's routes keeps them"
    for one, other in zip(chain(*ours), chain(*theirs), strict=True):
        assert one.range_sum == other.range_sum and one.changed == other.changed and one.tokens == other.tokens
        assert np.array_equal(one.count_E, other.count_E)


def pinned(random: np.random.Generator, experts: int, chosen: int, size: int) -> Roster:
    roster = Roster(experts, chosen, size, 0.1, pin_at=20)
    roster.route(random.normal(size=(20, experts)))
    assert roster.phase is Phase.PINNED
    return roster


def test_says_nothing_where_a_logit_is_no_number() -> None:
    roster, (_, count_E, _) = some_roster(np.random.default_rng(1), 8, 2, 4)
    step = PinnedStep([[roster]], [True])
    index_TK, weights_TK = torch.tensor([[0, 1]]), torch.ones(1, 2)
    for value in (float("nan"), float("inf"), float("-inf")):
        assert step.route(0, torch.zeros(1, 8), index_TK, weights_TK) is not None
        logits_TE = torch.zeros(1, 8)
        logits_TE[0, 5] = value
        assert step.route(0, logits_TE, index_TK, weights_TK) is None
        assert step.finish(0, 1) == [] and not count_E.any(), "what was said before no longer counts"


def test_what_does_not_fit_is_not_routed_or_refused() -> None:
    roster, (member_E, count_E, last_E) = some_roster(np.random.default_rng(1), 8, 2, 4)
    other, _ = some_roster(np.random.default_rng(1), 9, 2, 4)
    step = PinnedStep([[roster]], [True])
    good = (torch.zeros(1, 8), torch.tensor([[0, 1]]), torch.ones(1, 2))
    for place, wrong in (
        (0, torch.zeros(1, 7)),
        (0, torch.zeros(1, 8, dtype=torch.float64)),
        (1, torch.tensor([[0, 1]], dtype=torch.int32)),
        (2, torch.ones(1, 4)[:, ::2][:, :1]),
        (2, torch.ones(2, 4).T[:1]),
        (0, torch.zeros(2, 8)),
    ):
        parts = list(good)
        parts[place] = wrong
        assert step.route(0, *good) is not None
        assert step.route(0, *parts) is None and step.finish(0, 1) == []
    assert not PinnedStep([[roster], [other]], [True]).covers(0), "of two shapes"
    with pytest.raises(IndexError, match="not in"):
        step.route(0, good[0], torch.tensor([[0, 8]]), good[2])
    with pytest.raises(IndexError):
        step.finish(1, 1)
    for rosters_TL in ([], [[None]], [[roster, roster]], [[roster], [PinnedRoster(member_E, count_E, last_E, 3)]]):
        with pytest.raises(ValueError, match=r"expected rosters|layers"):
            PinnedStep(rosters_TL, [True])
    with pytest.raises(ValueError, match="fewer members"):
        PinnedRoster(member_E, count_E, last_E, 5)
    with pytest.raises(ValueError, match="expected contiguous"):
        PinnedRoster(member_E, count_E[:4], last_E, 2)
    with pytest.raises(IndexError, match="not in"):
        held_shares(np.zeros((1, 2)), np.array([[0, 8]]), member_E)
    with pytest.raises(ValueError, match="expected two"):
        held_shares(np.zeros((1, 3)), np.array([[0, 1]]), member_E)
