"""Roster coverage: worked cases, and the figures known from public routes."""

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import OptionError
from stoker.plan.roster import pinned, shifted
from stoker.plan.routes import from_array, load_routes


def test_a_roster_covers_what_the_prefix_saw_most() -> None:
    """Prefix [0 1][0 2]: with m = 2 the roster is {0, 2} (a tie: the most recent stays); the rest uses 0 0 1 2 3 0."""
    routes = from_array(np.array([[[0, 1], [0, 2], [0, 3], [2, 1], [5, 0]]]), n_experts=8)
    coverage = pinned(routes, 2, 5, 0.4)
    assert coverage.mean == pytest.approx(3 / 6) and coverage.windows == 1
    assert pinned(routes, 8, 5, 0.4).mean == pytest.approx(4 / 6)  # expert 3 and 5 were never seen
    assert coverage.loads_per_token == pytest.approx(2 / 5)


def test_a_shift_of_topic_is_met_by_the_old_roster() -> None:
    low, high = (np.tile(np.array([[[base, base + 1]]]), (1, 40, 1)) for base in (0, 4))
    a, b = from_array(low, n_experts=8), from_array(high, n_experts=8)
    assert shifted(a, b, 2, 20, 20).mean == 0 and shifted(a, a, 2, 20, 20).mean == 1


def test_what_cannot_be_is_refused() -> None:
    routes = from_array(np.tile(np.array([[[0, 1]]]), (1, 40, 1)), n_experts=8)
    for m, window, prefix in ((1, 20, 0.2), (9, 20, 0.2), (4, 41, 0.2), (4, 20, 0.0)):
        with pytest.raises(OptionError):
            pinned(routes, m, window, prefix)


def test_public_routes(traces: Path) -> None:
    """A roster from a fifth of 256 tokens covers .44-.60 (m = 16), .63-.77 (32), .85-.91 (64) over four domains, the
    worst layer .45-.54; after a shift .07-.36."""
    general, code = (load_routes(traces / f"qwen3_{domain}.npz") for domain in ("general", "code"))
    assert 0.44 <= pinned(general, 16).mean <= 0.60 and 0.44 <= pinned(code, 16).mean <= 0.605
    assert 0.63 <= pinned(general, 32).mean <= 0.775 and 0.63 <= pinned(code, 32).mean <= 0.775
    assert 0.85 <= pinned(general, 64).mean <= 0.91 and 0.445 <= pinned(general, 32).worst <= 0.545
    assert 0.07 <= shifted(code, general, 32).mean <= 0.36
