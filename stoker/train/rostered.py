"""Training along rosters: the serving rule in the place of the gates' top-k, over whole windows at once.

Choices carry no gradient; weights do. Each window and layer begins with a roster that knows nothing, as a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.routing.roster_options import RosterOptions
from stoker.routing.select import LayerRule, ranks, weigh


class RosterRoutes:
    """A route function for `TrainingModel.follow`, for one forward pass (and its backward pass) over B windows of T
    tokens. A layer that is computed again is answered the same."""

    def __init__(self, options: RosterOptions, rules: Sequence[LayerRule], windows: int) -> None:
        self.options, self.rules, self.windows = options, rules, windows
        self._taken: dict[int, Tensor] = {}

    def __call__(
        self, layer: int, hidden_ND: Tensor, logits_NE: Tensor, index_NK: Tensor, weights_NK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """experts int64 [B * T, K] and their weights by the layer's own rule."""
        rule = self.rules[layer]
        if layer not in self._taken:
            self._taken[layer] = self._choose(layer, logits_NE.detach(), rule)
        taken_NK = self._taken[layer]
        return taken_NK, weigh(logits_NE.float(), taken_NK, rule).to(weights_NK.dtype)

    def _choose(self, layer: int, logits_NE: Tensor, rule: LayerRule) -> Tensor:
        scores_BTE = ranks(logits_NE.float(), rule).view(self.windows, -1, logits_NE.shape[-1]).numpy()
        tokens, experts = scores_BTE.shape[1:]
        pin_at = self.options.pin_after.place(tokens, tokens)
        rosters = [self.options.new(layer, experts, rule.top_k, pin_at) for _ in range(self.windows)]
        taken = [roster.route(scores_TE) for roster, scores_TE in zip(rosters, scores_BTE, strict=True)]
        return torch.from_numpy(np.concatenate(taken))


def check(options: RosterOptions, rules: Sequence[LayerRule], experts: int) -> None:
    """Raises OptionError where the rosters do not fit the model, or windows of text."""
    options.check_shape(len(rules), experts, rules[0].top_k)
    if options.pin_after.prompt:
        expected = "a share (20%), a number of tokens, or never"
        raise OptionError("text has no prompts", where="--pin-after", expected=expected, got="prompt")
    if any(rule.groups > 1 for rule in rules):
        raise OptionError("rosters do not fit a router that chooses groups first", where="train roster")
