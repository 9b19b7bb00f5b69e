"""Rules of routing for the testbed's training forward (`recipes.testbed.model.layer_step`, `choose`).

Each takes a layer's logits [B, T, E] of whole windows and gives experts [B, T, K]; the weights stay the router's own.
The roster is stoker's own rule, one fresh state a window and layer. Choices carry no gradient: what trains the router
are the weights of the experts that were chosen.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from stoker.routing.roster import Roster, top
from stoker.routing.roster_options import RosterOptions


@dataclass
class Free:
    """The gate's own top-k. Every rule notes what it chose, int64 [B, T, K] a call, by layer."""

    chosen: int
    seen: dict[int, list[np.ndarray]] = field(default_factory=dict)
    noting: bool = False

    def __call__(self, layer: int, logits_BTE: Tensor) -> Tensor:
        taken_BTK = self.choose(layer, logits_BTE.detach().float().numpy())
        if self.noting:
            self.seen.setdefault(layer, []).append(taken_BTK)
        return torch.from_numpy(taken_BTK)

    def choose(self, layer: int, scores_BTE: np.ndarray) -> np.ndarray:
        return np.stack([top(scores_TE.astype(np.float64), self.chosen) for scores_TE in scores_BTE])


@dataclass
class Rostered(Free):
    """stoker's roster. shift_at: it forgets all it knows at this token, as a sequence that starts afresh there."""

    options: RosterOptions = field(default_factory=lambda: RosterOptions((4,)))
    shift_at: int | None = None
    states: dict[int, list[Roster]] = field(default_factory=dict)

    def choose(self, layer: int, scores_BTE: np.ndarray) -> np.ndarray:
        tokens, experts = scores_BTE.shape[1:]
        cuts = [0, tokens] if self.shift_at is None else [0, self.shift_at, tokens]
        rows = []
        for scores_TE in scores_BTE:
            parts = []
            for low, high in pairwise(cuts):
                pin_at = self.options.pin_after.place(high - low, high - low)
                state = self.options.new(layer, experts, self.chosen, pin_at)
                parts.append(state.route(scores_TE[low:high]))
            rows.append(np.concatenate(parts))
            if self.noting:
                self.states.setdefault(layer, []).append(state)
        return np.stack(rows)


@dataclass
class Amplified(Free):
    """Rich get richer: an expert's logit rises with the share of this window's tokens that used it, in units of the
    running mean range: the training pressure that the paper found not to last."""

    strength: float = 1.0

    def choose(self, layer: int, scores_BTE: np.ndarray) -> np.ndarray:
        batch, tokens, _ = scores_BTE.shape
        unit_BT = np.ptp(scores_BTE, axis=-1).cumsum(1) / np.arange(1, tokens + 1)
        count_BE = np.zeros_like(scores_BTE[:, 0])
        taken_BTK = np.empty((batch, tokens, self.chosen), dtype=np.int64)
        rows = np.arange(batch)[:, None]
        for token in range(tokens):
            bias_BE = self.strength * unit_BT[:, token, None] * count_BE / max(1, token)
            taken_BTK[:, token] = top(scores_BTE[:, token] + bias_BE, self.chosen)
            count_BE[rows, taken_BTK[:, token]] += 1
        return taken_BTK


@dataclass
class Distilling(Rostered):
    """A roster whose choices the router also learns by heart: `loss` is the mean cross-entropy of the router's
    probabilities on what the barrier made of them, over the layers since `take`."""

    losses: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, logits_BTE: Tensor) -> Tensor:
        taken_BTK = super().__call__(layer, logits_BTE)
        self.losses.append(-logits_BTE.log_softmax(-1).gather(2, taken_BTK).mean())
        return taken_BTK

    def take(self) -> Tensor:
        loss = torch.stack(self.losses).mean()
        self.losses.clear()
        return loss


def working_set(rule: Free, tokens: int = 256) -> np.ndarray:
    """Distinct experts that each layer used in the first `tokens` of a window: float64 [L], means over windows."""
    means = []
    for layer in sorted(rule.seen):
        windows = np.concatenate([one[:, :tokens] for one in rule.seen[layer]])
        means.append(np.mean([len(np.unique(window)) for window in windows]))
    return np.array(means)
