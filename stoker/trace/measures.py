"""The measures that traces and the simulator share, by their exact definitions (docs/metrics.md). Pure arithmetic."""

from collections.abc import Sequence
from math import ceil

import numpy as np

WORKING_SET_TOKENS = 256
SAMPLES_NEEDED = {0.95: 200, 0.99: 1000}
"""A percentile above the median of fewer samples than this is noise, and is not reported (None)."""


def percentile(samples: Sequence[float] | np.ndarray, share: float) -> float | None:
    """Nearest rank: the ceil(share * n)-th smallest. None where n is too small for that share."""
    n = len(samples)
    if n == 0 or n < SAMPLES_NEEDED.get(share, 1):
        return None
    return float(np.partition(np.asarray(samples), ceil(share * n) - 1)[ceil(share * n) - 1])


def latency(samples_ms: Sequence[float] | np.ndarray) -> dict[str, float | int | None]:
    """Mean, p50, p95, p99 and max of a list of milliseconds; no trimming."""
    n = len(samples_ms)
    return {
        "n": n,
        "mean": float(np.mean(samples_ms)) if n else None,
        "p50": percentile(samples_ms, 0.5),
        "p95": percentile(samples_ms, 0.95),
        "p99": percentile(samples_ms, 0.99),
        "max": float(np.max(samples_ms)) if n else None,
    }


def share(part: float, whole: float) -> float | None:
    """part / whole; None of nothing."""
    return part / whole if whole else None


def distinct_in_windows(experts: np.ndarray, event_of_expert: np.ndarray, window: int, total: int) -> list[int]:
    """Distinct experts in each whole window of `window` events of one pool. `total`: the number of events.

    A run shorter than one window counts as one window.
    """
    windows = max(1, total // window)
    pairs = np.unique(np.stack([event_of_expert // window, experts]), axis=1)
    return np.bincount(pairs[0], minlength=windows)[:windows].tolist()
