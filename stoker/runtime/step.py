"""What one step is asked (parts of sequences) and what it shares with the modules inside: phase, paged KV, rotation.

One context per Runtime, refilled before each forward. Modules read it; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from stoker.errors import StokerError
from stoker.routing.rule import Rows

Phase = Literal["prefill", "decode"]
NO_ROWS = Rows(0)
LoraRows = tuple[int, int, str]  # rows [first, last) of a step, and the adapter that they take
ALL_ROWS = 1 << 40  # where a step is one sequence: a module may see more rows than tokens (what is cached, expanded)


class GivenUp(StokerError):
    """Nobody wants the step any more: it ended between two layers."""


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class Part:
    """The next tokens of one sequence (at least one). decode: it continues an answer, so it shapes what stays resident;
    else it is prompt. wants_logits: those after the last token are asked for."""

    sequence: Any
    ids: Sequence[int]
    decode: bool = False
    wants_logits: bool = True


@dataclass
class StepContext:
    """`block_table` int32 [B, M], `seq_of_token` and `pos_of_token` int32 [T], `start_of_seq` int32 [B].

    phase: "decode" where every token continues an answer; decode_tokens: how many of the leading tokens do.
    """

    given_up: Callable[[], bool] | None = None  # asked before each MoE layer; True ends the step with GivenUp
    phase: Phase = "prefill"
    decode_tokens: int = 0
    passing: bool = False  # a look at what the gates' own routes would say: it leaves no trace
    index: int = 0
    kv_base: int = 0
    block_table: Tensor = field(default_factory=_empty)
    seq_of_token: Tensor = field(default_factory=_empty)
    pos_of_token: Tensor = field(default_factory=_empty)
    start_of_seq: Tensor = field(default_factory=_empty)
    lora: tuple[LoraRows, ...] = ()
    rows: Rows = NO_ROWS  # filled where a rule changes routes
    rotary: tuple[Tensor, Tensor] | None = None  # the model's cos and sin of this step, as it hands them to its layers
    cos_TR: Tensor = field(default_factory=_empty)
    sin_TR: Tensor = field(default_factory=_empty)

    def check_wanted(self) -> None:
        if self.given_up is not None and self.given_up():
            raise GivenUp("the step was given up")

    def cache(self) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """The paged cache of this step, as native attention takes it: base, block table, owners, positions, starts."""
        return self.kv_base, self.block_table, self.seq_of_token, self.pos_of_token, self.start_of_seq

    def turn(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin flat over tokens [T, R], the same objects for every layer of the step."""
        if rotary is not self.rotary:
            self.rotary = rotary
            self.cos_TR, self.sin_TR = (part.reshape(-1, part.shape[-1]).contiguous() for part in rotary)
        return self.cos_TR, self.sin_TR
