"""Windows of training text in a fixed order, and sets of windows to evaluate on.

The order is a function of seed and step alone: a run that starts again at step s sees what it would have seen.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.testbed.sources import DOMAINS
from recipes.testbed.tokenizer import DIRECTORY

TOKENS = DIRECTORY / "tokens"


def tokens(domain: str, split: str, directory: Path = TOKENS) -> np.ndarray:
    """uint16 ids of one domain's split, documents one after the other, each closed by the end token."""
    return np.load(directory / f"{domain}.{split}.npy", mmap_mode="r")


@dataclass(frozen=True)
class Windows:
    """All training windows: `width` inputs and the token after each; windows of every domain in one shuffled order."""

    width: int
    seed: int
    directory: Path = TOKENS

    @cached_property
    def streams(self) -> list[np.ndarray]:
        return [tokens(domain, "train", self.directory) for domain in DOMAINS]

    @cached_property
    def places(self) -> np.ndarray:
        """int64 [windows, 2]: domain and first token."""
        each = [np.arange(0, len(stream) - self.width, self.width) for stream in self.streams]
        return np.concatenate([np.stack((np.full(len(at), i), at), 1) for i, at in enumerate(each)])

    def batch(self, step: int, sequences: int) -> Tensor:
        """int64 [sequences, width + 1] of one step; an epoch is a fresh permutation, its ragged end is left out."""
        steps_an_epoch = len(self.places) // sequences
        epoch, at = divmod(step, steps_an_epoch)
        chosen = self._order(epoch)[at * sequences : (at + 1) * sequences]
        rows = [self.streams[domain][low : low + self.width + 1] for domain, low in self.places[chosen]]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _order(self, epoch: int) -> np.ndarray:
        cached = self.__dict__.setdefault("_orders", {})
        if epoch not in cached:
            cached.clear()
            cached[epoch] = np.random.default_rng((self.seed, epoch)).permutation(len(self.places))
        return cached[epoch]


def evaluation_windows(
    domain: str, split: str, width: int, most: int | None = None, directory: Path = TOKENS
) -> Tensor:
    """int64 [n, width + 1] windows of one split, one after the other; `most`: evenly spaced ones only."""
    stream = tokens(domain, split, directory)
    starts = spread_evenly(np.arange(0, len(stream) - width, width), most)
    return torch.from_numpy(np.stack([stream[low : low + width + 1] for low in starts]).astype(np.int64))


def spread_evenly(rows: np.ndarray, most: int | None) -> np.ndarray:
    """At most so many rows, at even distances; the same ones whatever the rows are."""
    if most is None or len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).astype(int)]
