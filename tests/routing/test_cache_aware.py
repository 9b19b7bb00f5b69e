"""Cache-aware routing against plain Python token by token; meters against worked cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.errors import OptionError
from stoker.routing.cache_aware import CacheAwareOptions, Lane, OwnCache
from stoker.routing.meters import Meters
from tests.routing.roster_oracle import best
from tests.routing.test_roster import topical


class PlainCacheAware:
    """s = z + lambda * mean range * in the LRU cache; the J best of z are always used."""

    def __init__(self, chosen: int, slots: int, lead: float, always: int) -> None:
        self.chosen, self.slots, self.lead, self.always = chosen, slots, lead, always
        self.recent: list[int] = []  # the cache, most recent last
        self.ranges: list[float] = []

    def token(self, scores: list[float], biased: bool = True) -> list[int]:
        self.ranges.append(max(scores) - min(scores))
        unit = sum(self.ranges) / len(self.ranges)
        taken = best(scores, self.chosen)
        if biased:
            lifted = [s + self.lead * unit * (e in self.recent) for e, s in enumerate(scores)]
            keep = best(scores, self.always)
            others = [e for e in best(lifted, len(scores)) if e not in keep]
            taken = sorted((keep + others)[: self.chosen], key=lambda e: (-scores[e], e))
        for expert in taken:
            self.recent = [one for one in self.recent if one != expert] + [expert]
        self.recent = self.recent[-self.slots :]
        return taken


CASES = [(8, 0.1, 1), (8, 0.3, 2), (12, 0.05, 0), (4, 1.0, 4), (8, 0.0, 1)]


@pytest.mark.parametrize(("slots", "lead", "always"), CASES)
def test_equals_the_rule_token_by_token(slots: int, lead: float, always: int) -> None:
    scores_TE = topical(3, 200, 32, topics=2)
    options = CacheAwareOptions(lead, always, slots)
    plain = PlainCacheAware(4, slots, lead, always)
    wanted = [plain.token(row, biased=token >= 50) for token, row in enumerate(scores_TE.astype(float).tolist())]
    whole, parts = Lane(OwnCache(slots)), Lane(OwnCache(slots))
    assert whole.route(scores_TE, 4, options, 50, None).tolist() == wanted
    got = [parts.route(scores_TE[low : low + 10], 4, options, max(0, 50 - low), None) for low in range(0, 200, 10)]
    assert np.concatenate(got).tolist() == wanted


def test_a_lead_lowers_misses_and_none_changes_nothing() -> None:
    scores_TE = topical(4, 400, 32)
    free_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :4]
    misses = {}
    for lead in (0.0, 0.1, 0.3):
        lane = Lane(OwnCache(8))
        taken_TK = lane.route(scores_TE, 4, CacheAwareOptions(lead, 1, 8), 0, None)
        misses[lead] = lane.cache.misses
        assert (taken_TK[:, 0] == free_TK[:, 0]).all()
        assert lead or np.array_equal(taken_TK, free_TK)
    assert misses[0.3] < misses[0.1] < 0.9 * misses[0.0]


def test_residency_that_is_given_is_used() -> None:
    resident_E = np.zeros(8, dtype=bool)
    resident_E[5] = True
    scores = np.array([[4.0, 3, 2.9, 0, 0, 2.8, 0, 0]])
    assert Lane(None).route(scores, 3, CacheAwareOptions(0.1, 1), 0, resident_E).tolist() == [[0, 1, 5]]
    assert Lane(None).route(scores, 3, CacheAwareOptions(0.01, 1), 0, resident_E).tolist() == [[0, 1, 2]]
    assert Lane(None).route(scores, 3, CacheAwareOptions(0.1, 3), 0, resident_E).tolist() == [[0, 1, 2]]


def test_meters_of_a_worked_case() -> None:
    """The gate's {0, 1} of .5 .3 .1 .1 became {0, 2}: half the choices kept, .6 of .8 of the mass; and one token that
    kept its choices."""
    probabilities = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]])
    meters = Meters()
    meters.note(probabilities, torch.tensor([[0, 1], [0, 1]]), torch.tensor([[2, 0], [1, 0]]))
    figures = meters.figures()
    assert figures["slot_agreement"] == pytest.approx(3 / 4) and figures["swapped_share"] == pytest.approx(1 / 4)
    assert figures["weight_mass_kept"] == pytest.approx((0.6 / 0.8 + 1) / 2)
    lost = 0.625 * np.log(0.625 / (0.5 / 0.6)) + 0.375 * np.log(0.375 / 1e-9)
    assert figures["route_kl"] == pytest.approx(lost / 2, rel=1e-3)
    assert Meters().figures()["slot_agreement"] == 1.0


def test_what_cannot_be_is_refused() -> None:
    for lead, always, slots in ((-0.1, 1, 0), (1.1, 1, 0), (0.1, -1, 0), (0.1, 1, -2)):
        with pytest.raises(OptionError):
            CacheAwareOptions(lead, always, slots)
