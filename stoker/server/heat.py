"""Which experts were chosen lately, as a picture: use counts that fade as newer ones come.

Pure arithmetic on snapshots of `Model.expert_uses()`. Counts fade with use, not with time: an idle model keeps its
picture.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

FADE_TOKENS = 256  # after so many tokens an old use counts 1/e of a new one
LEVELS = 255


class Heat:
    """Faded uses of one model, float64 [L, E]."""

    def __init__(self) -> None:
        self._seen_LE: NDArray[np.int64] | None = None
        self._heat_LE: NDArray[np.float64] | None = None

    def add(self, uses_LE: NDArray[np.int64], tokens: int) -> None:
        """`uses_LE`: counts since loading; `tokens`: tokens computed since the last call."""
        if self._seen_LE is None or self._seen_LE.shape != uses_LE.shape or (uses_LE < self._seen_LE).any():
            self._heat_LE = uses_LE.astype(np.float64)
        elif tokens > 0:
            assert self._heat_LE is not None
            # New uses arrived over the interval; on the average they have faded by half of it already.
            fade = float(np.exp(-tokens / FADE_TOKENS))
            self._heat_LE = self._heat_LE * fade + (uses_LE - self._seen_LE) * (1 - fade) * FADE_TOKENS / tokens
        self._seen_LE = uses_LE

    def picture(self) -> dict[str, Any]:
        """layers, experts; levels: base64 of uint8 [L * E], 255 the most used; top_share: its share of its layer's
        choices."""
        if self._heat_LE is None or not self._heat_LE.size:
            return {"layers": 0, "experts": 0, "levels": "", "top_share": 0.0}
        heat_LE = self._heat_LE
        layer_L = heat_LE.sum(axis=1)
        shares_LE = heat_LE / np.where(layer_L > 0, layer_L, 1.0)[:, None]
        top = float(shares_LE.max())
        levels = np.rint(shares_LE / (top or 1.0) * LEVELS).astype(np.uint8)
        return {
            "layers": heat_LE.shape[0],
            "experts": heat_LE.shape[1],
            "levels": base64.b64encode(levels.tobytes()).decode(),
            "top_share": top,
        }
