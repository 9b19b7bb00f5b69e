"""What a student costs on held-out windows: perplexity along its routes against the base's exact routes, paired.

The same windows for both; the interval is a bootstrap over windows. `stoker eval` measures more, by serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stoker.train.data import Windows
from stoker.train.session import Student

RESAMPLES = 2000


def measured(student: Student, held: Windows) -> dict[str, Any]:
    """Perplexity of the student and of its base with the gates' routes, and their ratio with a 95% interval."""
    ours = student.token_losses(held).mean(1)
    heads, student.heads = student.heads, None
    try:
        with student.untrained():
            exact = student.token_losses(held).mean(1)
    finally:
        student.heads = heads
    return {
        "perplexity": perplexity(ours),
        "perplexity_exact": perplexity(exact),
        **ratio(ours, exact),
        "windows": len(held),
        "tokens": len(held) * (held.width - 1),
    }


def perplexity(losses_W: np.ndarray) -> float:
    return round(float(np.exp(losses_W.mean())), 4)


def ratio(losses_W: np.ndarray, base_W: np.ndarray) -> Mapping[str, Any]:
    """Perplexity over the base's, and its 95% interval: windows are resampled, the same ones for both."""
    difference_W = losses_W - base_W
    picks = np.random.default_rng(0).integers(0, len(difference_W), (RESAMPLES, len(difference_W)))
    low, high = np.quantile(np.exp(difference_W[picks].mean(1)), (0.025, 0.975))
    center = float(np.exp(difference_W.mean()))
    return {"ratio": round(center, 4), "ratio_95": [round(float(low), 4), round(float(high), 4)]}
