"""How often each layer chose each expert since loading: one count a (token, choice), for pictures and metrics.

Plain lists, bumped by the thread that runs the steps: for the few choices of a decode step that is several times
cheaper than an array. Owns the counts alone; knows neither slots nor routes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LISTED = 512  # choices up to which counting one by one costs less than a pass over all experts


class LayerUses:
    """The counts of one layer, by expert id of its pool."""

    __slots__ = ("counts", "layer")

    def __init__(self, layer: int, experts: int) -> None:
        self.layer = layer
        self.counts = [0] * experts

    def single(self, experts: Sequence[int]) -> None:
        """One token's choices."""
        counts = self.counts
        for expert in experts:
            counts[expert] += 1

    def step(self, index_TK: Tensor) -> None:
        """A step's choices [T, K]."""
        if index_TK.numel() <= LISTED:
            self.single(index_TK.flatten().tolist())
            return
        counts = self.counts
        for expert, count in enumerate(index_TK.flatten().bincount().tolist()):
            counts[expert] += count


def as_array(layers: Sequence[LayerUses]) -> NDArray[np.int64]:
    """int64 [L, E], E of the widest layer. Safe from another thread: a step in progress may be counted in part."""
    uses_LE = np.zeros((len(layers), max((len(layer.counts) for layer in layers), default=0)), np.int64)
    for row, layer in zip(uses_LE, layers, strict=True):
        row[: len(layer.counts)] = layer.counts
    return uses_LE
