"""The bootstrap against all resamples there are, on sets small enough to list them."""

from itertools import product

import numpy as np
import pytest

from stoker.evaluate.bootstrap import COVERAGE, perplexity_ratio, ratio_interval


def all_means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of every ordered draw with replacement: N^N of them, all equally likely."""
    draws = np.array(list(product(range(len(sums)), repeat=len(sums))))
    return np.sort(sums[draws].sum(1) / counts[draws].sum(1))


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_is_that_of_all_resamples(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(5, 60, 6)
    sums = random.normal(0.02, 0.1, 6) * counts
    means = all_means(sums, counts)  # 46,656
    low, high = ratio_interval(sums, counts)
    tail = (1 - COVERAGE) / 2
    # Where our ends lie in the exact distribution: 5,000 draws place them to about half a point.
    assert (means <= low).mean() == pytest.approx(tail, abs=0.01)
    assert (means <= high).mean() == pytest.approx(1 - tail, abs=0.01)


def test_equal_documents_leave_no_doubt() -> None:
    ratio, low, high = perplexity_ratio(np.full(5, 12.0), np.full(5, 10.0), np.full(5, 4))
    assert ratio == low == high == pytest.approx(np.exp(0.5))


def test_pairing_removes_what_documents_have_in_common() -> None:
    """Documents of very unlike difficulty, the second model a little worse on each: paired, that is beyond doubt."""
    random = np.random.default_rng(0)
    counts = np.full(40, 100)
    base = random.normal(400, 150, 40)
    worse = base + random.normal(1.0, 0.2, 40)
    ratio, low, high = perplexity_ratio(worse, base, counts)
    assert 1 < low < ratio < high < 1.02
    assert ratio == pytest.approx(np.exp(0.01), abs=1e-3)


def test_longer_documents_weigh_more() -> None:
    ratio, _, _ = perplexity_ratio(np.array([10.0, 0.0]), np.zeros(2), np.array([10, 90]))
    assert ratio == pytest.approx(np.exp(0.1))
