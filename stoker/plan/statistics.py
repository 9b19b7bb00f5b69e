"""What routes look like: reuse by lag, popularity, working sets. The figures that a synthetic trace must match.

Arrays [L, T, K] of one token a step; per layer first, then a median or a mean over layers by the caller.
"""

import numpy as np

from stoker.trace.measures import distinct_in_windows

REUSE_LAGS = (1, 8, 64, 1024)


def reuse(experts_LTK: np.ndarray, lag: int) -> np.ndarray:
    """Share of a token's experts that the token `lag` before also used, float64 [L]."""
    now, before = experts_LTK[:, lag:], experts_LTK[:, :-lag]
    found = np.zeros(now.shape[:2], np.int64)
    for choice in range(now.shape[2]):
        found += (now == before[:, :, choice, None]).sum(2)
    return found.mean(1) / now.shape[2]


def traffic_share(experts_LTK: np.ndarray, top: int) -> np.ndarray:
    """Share of all uses that the `top` most used experts get, float64 [L]."""
    counts = [np.sort(np.bincount(layer.ravel()))[::-1] for layer in experts_LTK]
    return np.array([count[:top].sum() / count.sum() for count in counts])


def working_set(experts_LTK: np.ndarray, window_tokens: int = 256) -> np.ndarray:
    """Mean number of distinct experts in a window, float64 [L]."""
    layers, tokens, k = experts_LTK.shape
    token_of = np.repeat(np.arange(tokens), k)
    return np.array(
        [np.mean(distinct_in_windows(experts_LTK[i].ravel(), token_of, window_tokens, tokens)) for i in range(layers)]
    )


def recall(guess_LTK: np.ndarray, truth_LTK: np.ndarray) -> np.ndarray:
    """Share of the true experts that the guess contains, float64 [L]."""
    found = (truth_LTK[..., :, None] == guess_LTK[..., None, :]).any(-1)
    return found.mean((1, 2))


def describe(experts_LTK: np.ndarray) -> dict[str, float]:
    """The calibration figures: medians over layers of reuse, popularity and the working set of 256 tokens."""
    lags = [lag for lag in REUSE_LAGS if lag < experts_LTK.shape[1]]
    return {
        **{f"reuse_lag_{lag}": float(np.median(reuse(experts_LTK, lag))) for lag in lags},
        "reuse_lag_1_first_layer": float(reuse(experts_LTK[:1], 1)[0]),
        "reuse_lag_1_last_layer": float(reuse(experts_LTK[-1:], 1)[0]),
        "top_8_share": float(np.median(traffic_share(experts_LTK, 8))),
        "top_32_share": float(np.median(traffic_share(experts_LTK, 32))),
        "working_set_256": float(np.median(working_set(experts_LTK))),
    }
