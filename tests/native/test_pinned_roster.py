"""Single tokens under pinned rosters in one call: against torch and numpy, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stoker.native.attention import topk_softmax
from stoker.native.roster import PinnedRoster, TokenFacts, held_shares, pinned_tokens
from stoker.routing.roster import top
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
    probabilities_TE = logits_TE.softmax(-1)
    weights_TK, gate_TK = topk_softmax(logits_TE, chosen, renormalise)
    route = pinned_tokens([one for one, _ in rosters], logits_TE, probabilities_TE, gate_TK, weights_TK, renormalise)
    assert route is not None
    scores_TE = logits_TE.double().numpy()
    member_TE = np.stack([arrays[0] for _, arrays in rosters])
    free_TK, used_TK = top(scores_TE, chosen), top(np.where(member_TE, scores_TE, -np.inf), chosen)
    assert np.array_equal(route.free.numpy(), free_TK)
    theirs_TK = weigh(logits_TE, torch.from_numpy(used_TK), LayerRule(chosen, renormalise=renormalise))
    for row, facts in enumerate(map(TokenFacts._make, route.facts)):
        gate, used = set(gate_TK[row].tolist()), set(used_TK[row].tolist())
        same = gate == used
        assert route.experts[row].tolist() == (gate_TK[row].tolist() if same else used_TK[row].tolist())
        assert torch.equal(route.weights[row], weights_TK[row] if same else theirs_TK[row])
        assert facts.kept == len(gate & used) and facts.changed == len(set(free_TK[row].tolist()) - used)
        assert facts.range == np.ptp(scores_TE[row])
        weight_K = np.exp(scores_TE[row][free_TK[row]])
        assert facts.held == pytest.approx(weight_K[member_TE[row][free_TK[row]]].sum() / weight_K.sum())
        p_E = probabilities_TE[row]
        assert facts.mass == pytest.approx(float(p_E[list(used)].sum() / p_E[list(gate)].sum()))
        assert facts.kl == 0 if same else facts.kl > 0
    shares_T = held_shares(np.take_along_axis(scores_TE, free_TK, axis=1)[:1], free_TK[:1], member_TE[0])
    assert shares_T[0] == route.facts[0][1], "one number, whoever asks"


def test_counts_uses_where_they_are_kept() -> None:
    roster, (_, count_E, last_E) = some_roster(np.random.default_rng(1), 8, 2, 4)
    used_TK = torch.tensor([[0, 1], [1, 5]])
    roster.use(used_TK, 0, 7)
    roster.use(used_TK, 1, 8)
    assert count_E.tolist() == [1, 2, 0, 0, 0, 1, 0, 0] and last_E.tolist() == [7, 8, -1, -1, -1, 8, -1, -1]


def test_says_nothing_where_a_logit_is_no_number() -> None:
    roster, _ = some_roster(np.random.default_rng(1), 8, 2, 4)
    for value in (float("nan"), float("inf"), float("-inf")):
        logits_TE = torch.zeros(1, 8)
        logits_TE[0, 5] = value
        index_TK, weights_TK = torch.tensor([[0, 1]]), torch.ones(1, 2)
        assert pinned_tokens([roster], logits_TE, logits_TE.softmax(-1), index_TK, weights_TK, True) is None


def test_what_does_not_fit_is_refused() -> None:
    roster, (member_E, count_E, last_E) = some_roster(np.random.default_rng(1), 8, 2, 4)
    good = (torch.zeros(1, 8), torch.zeros(1, 8), torch.tensor([[0, 1]]), torch.ones(1, 2))
    for place, wrong in (
        (0, torch.zeros(1, 7)),
        (1, torch.zeros(1, 8, dtype=torch.float64)),
        (2, torch.tensor([[0, 1]], dtype=torch.int32)),
        (3, torch.ones(1, 4)[:, ::2][:, :1]),
        (0, torch.zeros(8, 2).T[:1]),
    ):
        parts = list(good)
        parts[place] = wrong
        with pytest.raises(ValueError, match="expected contiguous"):
            pinned_tokens([roster], *parts, True)
    with pytest.raises(IndexError, match="not in"):
        pinned_tokens([roster], *good[:2], torch.tensor([[0, 8]]), good[3], True)
    with pytest.raises(IndexError, match="not in"):
        roster.use(torch.tensor([[-1, 0]]), 0, 1)
    with pytest.raises(ValueError, match="expected int64"):
        roster.use(torch.tensor([[1, 0]]), 1, 1)
    with pytest.raises(ValueError, match="fewer members"):
        PinnedRoster(member_E, count_E, last_E, 5)
    with pytest.raises(ValueError, match="expected contiguous"):
        PinnedRoster(member_E, count_E[:4], last_E, 2)
    with pytest.raises(IndexError, match="not in"):
        held_shares(np.zeros((1, 2)), np.array([[0, 8]]), member_E)
    with pytest.raises(ValueError, match="expected two"):
        held_shares(np.zeros((1, 3)), np.array([[0, 1]]), member_E)
