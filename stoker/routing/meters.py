"""What a rule that replaces experts did to the gates' choices: the meters of every lossy mode, as running sums.

After colibri's CACHE_ROUTE meters: how many choices were swapped, what weight they had, how far the route's
distribution moved. Knows logits and choices alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.native.roster import StepMeters

TINY = 1e-9


@dataclass
class Meters:
    """Sums over tokens and layers. `mass`: of the gate's probability on its own choices, how much the used ones have;
    `kl`: of the used route's renormalised weights from the gate's, nats, with what is not used at TINY."""

    choices: int = 0
    kept: int = 0
    tokens: int = 0
    changed_tokens: int = 0
    mass: float = 0.0
    kl: float = 0.0

    def note(self, probabilities_TE: Tensor, gate_TK: Tensor, used_TK: Tensor) -> None:
        """One layer of a step: softmax or sigmoid scores float32 [T, E], choices of the gate and of the rule."""
        same_TK = (gate_TK[:, :, None] == used_TK[:, None, :]).any(-1)
        changed_T = ~same_TK.all(-1)
        changed = int(changed_T.sum())
        self.tokens += len(gate_TK)
        self.choices += gate_TK.numel()
        self.kept += int(same_TK.sum())
        self.changed_tokens += changed
        self.mass += len(gate_TK) - changed
        if changed:
            rows_XE = probabilities_TE[changed_T]
            gate_XK, used_XK = rows_XE.gather(1, gate_TK[changed_T]), rows_XE.gather(1, used_TK[changed_T])
            self.mass += float((used_XK.sum(-1) / gate_XK.sum(-1).clamp_min(TINY)).sum())
            self.kl += float(_route_kl(rows_XE, gate_TK[changed_T], used_TK[changed_T]).sum())

    def add(self, more: StepMeters, chosen: int) -> None:
        """What a native call summed up, of tokens with `chosen` choices each."""
        self.tokens += more.tokens
        self.choices += more.tokens * chosen
        self.kept += more.kept
        self.changed_tokens += more.changed_tokens
        self.mass += more.mass
        self.kl += more.kl

    def figures(self) -> dict[str, float]:
        """swapped_share of the choices, slot_agreement, weight_mass_kept, route_kl a token and layer (nats)."""
        agreement = self.kept / self.choices if self.choices else 1.0
        tokens = max(1, self.tokens)
        return {
            "swapped_share": 1.0 - agreement,
            "slot_agreement": agreement,
            "weight_mass_kept": self.mass / tokens if self.tokens else 1.0,
            "route_kl": self.kl / tokens,
        }


def _route_kl(rows_XE: Tensor, gate_XK: Tensor, used_XK: Tensor) -> Tensor:
    """KL(gate's route || used route) of each token, [X]."""
    gate_XE, used_XE = (
        torch.zeros_like(rows_XE).scatter_(1, index_XK, rows_XE.gather(1, index_XK)) for index_XK in (gate_XK, used_XK)
    )
    gate_XE = gate_XE / gate_XE.sum(-1, keepdim=True).clamp_min(TINY)
    used_XE = (used_XE / used_XE.sum(-1, keepdim=True).clamp_min(TINY)).clamp_min(TINY)
    return (gate_XE * (gate_XE.clamp_min(TINY) / used_XE).log()).sum(-1)
