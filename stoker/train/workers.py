"""One process, or several of `accelerate launch`: who computes which rows, and how gradients are added up.

Every process holds the same trained weights and the same optimiser; only gradients and sums travel.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn


class Workers:
    """rank and world of this process; world 1 needs no library."""

    def __init__(self) -> None:
        self.rank, self.world, self._accelerator = 0, 1, None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=True)
            self.rank, self.world = self._accelerator.process_index, self._accelerator.num_processes

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by the sum over processes (one message)."""
        if self._accelerator is None:
            return
        held = [p for p in parameters]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held])
        flat = self._accelerator.reduce(flat, "sum")
        for parameter, piece in zip(held, flat.split([p.numel() for p in held]), strict=True):
            parameter.grad = piece.view_as(parameter)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over processes."""
        if self._accelerator is None:
            return list(values)
        return self._accelerator.reduce(torch.tensor(values, dtype=torch.float64), "sum").tolist()

    def wait(self) -> None:
        """Until all processes are here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()
