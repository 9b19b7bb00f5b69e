"""The generator: its shape and repeatability, and its acceptance against public routes."""

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import OptionError
from stoker.plan.replay import replay
from stoker.plan.routes import from_array, load_routes
from stoker.plan.statistics import describe, recall, reuse, traffic_share, working_set
from stoker.plan.synthetic import generate

STALE_GATE_RECALL = 0.886  # measured on Qwen3-30B-A3B, mean over layers


def test_shape_order_and_repeatability() -> None:
    made = generate("general", 200, layers=4, experts=64, k=6, seed=3)
    assert made.experts_LTK.shape == (4, 200, 6) and made.experts_LTK.dtype == np.int16
    assert all(len(set(row)) == 6 for layer in made.experts_LTK for row in layer.tolist())
    assert made.experts_LTK.min() >= 0 and made.experts_LTK.max() < 64
    assert (made.stale_LTK[0] == -1).all() and (made.stale_LTK[1:] >= 0).all()
    again, other = (generate("general", 200, layers=4, experts=64, k=6, seed=seed) for seed in (3, 4))
    np.testing.assert_array_equal(made.experts_LTK, again.experts_LTK)
    assert (made.experts_LTK != other.experts_LTK).any()
    assert generate("code", 5, layers=1, experts=4, k=4).experts_LTK.shape == (1, 5, 4)


def test_a_shift_changes_who_is_popular() -> None:
    made = generate("general", 1000, layers=4, shift_at=500, shift_correlation=0.2).experts_LTK[2]
    first, second = (np.bincount(part.ravel(), minlength=128) for part in (made[:500], made[500:]))
    same = generate("general", 1000, layers=4).experts_LTK[2]
    kept, moved = (np.bincount(part.ravel(), minlength=128) for part in (same[:500], same[500:]))
    assert np.corrcoef(first, second)[0, 1] < np.corrcoef(kept, moved)[0, 1] - 0.15


@pytest.mark.parametrize("arguments", [("prose", 10), ("general", 0), ("general", 10, 2, 8, 9)])
def test_what_cannot_be_is_refused(arguments: tuple) -> None:
    with pytest.raises(OptionError):
        generate(*arguments)


def test_statistics_of_routes_that_are_known() -> None:
    routes = np.array([[[0, 1], [1, 2], [2, 3], [0, 1]]])
    assert reuse(routes, 1).tolist() == [pytest.approx(2 / 6)] and reuse(routes, 3).tolist() == [1.0]
    assert traffic_share(routes, 1).tolist() == [3 / 8] and working_set(routes, 2).tolist() == [3.5]
    assert recall(routes, routes[..., ::-1]).tolist() == [1.0] and recall(routes, routes + 1).tolist() == [0.5]


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["general", "code"])
def test_acceptance(traces: Path, domain: str) -> None:
    """Reuse at lags 1, 8, 64, 1024 within .02, popularity of the top 8 and 32 within .03, working set of 256 tokens
    within 6, LRU and MIN at 16 and 32 slots within .02, recall of the stale gate within .02."""
    real = load_routes(traces / f"qwen3_{domain}.npz")
    truth = describe(np.stack([stream.experts.reshape(real.steps, -1) for stream in real.streams]))
    made = generate(domain, real.steps)
    figures = describe(made.experts_LTK)
    tolerance = {name: 0.02 for name in truth} | {"top_8_share": 0.03, "top_32_share": 0.03, "working_set_256": 6.0}
    tolerance |= {"reuse_lag_1_first_layer": 0.03, "reuse_lag_1_last_layer": 0.03}
    off = {name: (figures[name], truth[name]) for name in truth if abs(figures[name] - truth[name]) > tolerance[name]}
    routes = from_array(made.experts_LTK, n_experts=128)
    for policy in ("lru", "min"):
        for slots in (16, 32):
            got, wanted = (replay(one, policy, slots).hit_rate for one in (routes, real))
            if abs(got - wanted) > 0.02:
                off[f"{policy} at {slots}"] = (got, wanted)
    found = float(recall(made.stale_LTK[1:], made.experts_LTK[1:]).mean())
    if abs(found - STALE_GATE_RECALL) > 0.02:
        off["stale gate recall"] = (found, STALE_GATE_RECALL)
    assert not off
