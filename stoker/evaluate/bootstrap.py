"""Paired bootstrap over documents: how sure a difference in perplexity is. numpy alone.

Documents are resampled, not tokens: tokens of one document are not independent. Both sides get the same documents
(Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 8; percentile intervals, chapter 13).
"""

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 5000
COVERAGE = 0.95
Floats = NDArray[np.float64]


def ratio_interval(sums_N: Floats, counts_N: NDArray[np.int64], *, seed: int = 0) -> tuple[float, float]:
    """95% interval of sum(sums) / sum(counts) where the N documents are drawn again with replacement.

    sums float64 [N]: of some quantity over each document's tokens; counts int64 [N]: its tokens, at least 1.
    """
    picks_RN = np.random.default_rng(seed).integers(0, len(sums_N), (RESAMPLES, len(sums_N)))
    means_R = sums_N[picks_RN].sum(1) / counts_N[picks_RN].sum(1)
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(means_R, (tail, 1 - tail))
    return float(low), float(high)


def perplexity_ratio(losses_N: Floats, base_N: Floats, counts_N: NDArray[np.int64]) -> tuple[float, float, float]:
    """Perplexity over the base's, and the ends of its paired 95% interval, from each document's summed losses in
    nats [N] over its tokens [N]."""
    difference_N = losses_N - base_N
    low, high = ratio_interval(difference_N, counts_N)
    return float(np.exp(difference_N.sum() / counts_N.sum())), float(np.exp(low)), float(np.exp(high))
