"""What a roster is, as one reads it on a command line or in an adapter, and the rosters of a whole sequence.

Owns sizes, prefix and barrier as settings; the rule itself is in roster.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import OptionError
from stoker.routing.roster import Roster
from stoker.routing.shift import Shift

DELTA = 0.15  # chosen by experiment: docs/routing.md
SHARE = 0.2
LEAST_PREFIX_TOKENS = 16  # of a share or a prompt: fewer choices say nothing


@dataclass(frozen=True)
class Prefix:
    """When a roster is pinned: after a share of the sequence, after so many tokens, after the prompt, or never."""

    share: float | None = None
    tokens: int | None = None
    prompt: bool = False

    @staticmethod
    def parse(text: str) -> Prefix:
        """`20%`, `256`, `prompt` or `never`. Raises OptionError."""
        try:
            if text == "prompt":
                return Prefix(prompt=True)
            if text == "never":
                return Prefix()
            if text.endswith("%") and 0 < float(text[:-1]) < 100:
                return Prefix(share=float(text[:-1]) / 100)
            if int(text) > 0:
                return Prefix(tokens=int(text))
        except ValueError:
            pass
        expected = "a share (20%), a number of tokens, prompt, or never"
        raise OptionError("cannot be read", where="--pin-after", expected=expected, got=text)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{100 * self.share:g}%"
        return str(self.tokens) if self.tokens else "prompt" if self.prompt else "never"

    def place(self, prompt_tokens: int, total_tokens: int) -> int | None:
        """The token at which a sequence pins. total: the prompt and the longest answer that was asked for."""
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return max(LEAST_PREFIX_TOKENS, round(self.share * total_tokens))
        return max(LEAST_PREFIX_TOKENS, prompt_tokens) if self.prompt else None


@dataclass(frozen=True)
class RosterOptions:
    """sizes: m, one for all MoE layers or one a layer. delta: in units of the running mean range; inf: a wall."""

    sizes: tuple[int, ...]
    pin_after: Prefix = field(default_factory=lambda: Prefix(share=SHARE))
    delta: float = DELTA
    shift: Shift | None = field(default_factory=Shift)

    @staticmethod
    def parse(size: str, pin_after: str = str(Prefix(share=SHARE)), delta: float = DELTA, shift: bool = True) -> Any:
        """From the command line's words. Raises OptionError."""
        try:
            sizes = tuple(int(part) for part in size.split(","))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            raise OptionError(
                "cannot be read",
                where="--roster-size",
                expected="a number of experts, or one a layer: 32,24,24",
                got=size,
            )
        if not delta >= 0:
            raise OptionError("out of range", where="--delta", expected="0 or more", got=delta)
        return RosterOptions(sizes, Prefix.parse(pin_after), delta, Shift() if shift else None)

    def check_shape(self, layers: int, experts: int, chosen: int) -> None:
        """Raises OptionError where a model with these axes cannot have such rosters."""
        if len(self.sizes) not in (1, layers) or min(self.sizes) < chosen or max(self.sizes) > experts:
            raise OptionError(
                "the rosters do not fit the model's shape",
                where="--roster-size",
                expected=f"one size, or {layers} (one a MoE layer), each from {chosen} to {experts}",
                got=",".join(map(str, self.sizes)),
            )

    def size(self, layer: int) -> int:
        """m of the MoE layer number `layer`, counting MoE layers alone."""
        return self.sizes[layer if len(self.sizes) > 1 else 0]

    def new(self, layer: int, experts: int, chosen: int, pin_at: int | None) -> Roster:
        return Roster(experts, chosen, self.size(layer), self.delta, pin_at, self.shift)

    def as_dict(self) -> dict[str, Any]:
        """For adapters, stats and fingerprints: what changes the output, and nothing else."""
        delta = self.delta if math.isfinite(self.delta) else "inf"
        found: dict[str, Any] = {"sizes": list(self.sizes), "pin_after": str(self.pin_after), "delta": delta}
        return found | {"shift": vars(self.shift) if self.shift is not None else None}


def together(rosters: Sequence[Roster]) -> int:
    """How many slots the pinned rosters of several sequences need at one layer: the size of their union."""
    members = [roster.member_E for roster in rosters if roster.pinned]
    return int(sum(members[1:], members[0].astype(int)).astype(bool).sum()) if members else 0
