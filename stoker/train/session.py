"""A base with what is trained beside it: heads, LoRA, K. What the stages share, and the student's loss on a batch.

Owns no loop and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.adapter.heads import scale_for
from stoker.errors import OptionError
from stoker.routing.roster_options import RosterOptions
from stoker.routing.select import LayerRule
from stoker.runtime.plan import top_k as configured_top_k
from stoker.train import lora
from stoker.train.data import Batch, Windows
from stoker.train.heads import HIDDEN, Embed, Heads
from stoker.train.lora import LoraLinear, LoraSettings
from stoker.train.model import TrainingModel
from stoker.train.rostered import RosterRoutes, check
from stoker.train.student import StudentRoutes, gates_of, rules_of

SCALE_TOKENS = 4096


@dataclass
class Student:
    """heads None: routes are the gate's, or along rosters; lora empty: the base's linears alone. `top_k` experts a
    token everywhere."""

    model: TrainingModel
    rules: list[LayerRule]
    top_k: int
    heads: Heads | None = None
    lora: dict[str, LoraLinear] = field(default_factory=dict)
    lora_settings: LoraSettings | None = None
    roster: RosterOptions | None = None

    @staticmethod
    def of(model: TrainingModel, top_k: int | None = None) -> Student:
        """The base as it is, with K of its own or another. Raises OptionError for a K that cannot be."""
        own, experts = configured_top_k(model.config), min(pool.experts for pool in model.store.pools)
        if top_k is not None and not 1 <= top_k <= experts:
            raise OptionError("a token cannot use so many experts", where="--k", expected=f"1 to {experts}", got=top_k)
        rules = rules_of(model)
        model.use_top_k(top_k)
        return Student(model, rules, top_k or own)

    def add_heads(
        self,
        layers: Sequence[int] | None = None,
        hidden: int = HIDDEN,
        seed: int = 0,
        next_token: bool = False,
        next_scale: float | None = None,
    ) -> None:
        """Heads with the warm start. layers: of the decoder, the owners; None: every MoE layer that another follows.
        next_token: they also see the token that the route is for; next_scale: as an adapter says it."""
        owners = owners_of(layers, [block.layer for block in self.model.blocks])
        embed = self.model.model.get_input_embeddings()
        if next_scale is None:
            next_scale = embedding_scale(embed, int(self.model.config.vocab_size)) if next_token else 0.0
        self.heads = Heads(owners, gates_of(self.model), hidden, seed, embed, next_scale)

    def add_lora(self, settings: LoraSettings, seed: int = 0) -> None:
        self.lora, self.lora_settings = lora.attach(self.model.model, settings, seed), settings

    def add_roster(self, options: RosterOptions) -> None:
        """Routes along rosters from now on. Raises OptionError where they do not fit."""
        assert self.heads is None, "heads and rosters both want to choose"
        check(options, self.rules, min(pool.experts for pool in self.model.store.pools))
        self.roster = options

    def head_parameters(self) -> dict[str, nn.Parameter]:
        """By the names of the published adapters: layers.N.fc1.weight, with N the owner's decoder layer."""
        if self.heads is None:
            return {}
        layers = [block.layer for block in self.model.blocks]
        return {
            f"layers.{layers[owner]}.{name}.weight": parameter
            for owner in self.heads.owners
            for name, parameter in self.heads[owner].named_parameters()
        }

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """Within, the base computes alone, with its own K: no LoRA; routes are the gate's outside of `routing`."""
        for update in self.lora.values():
            update.active = False
        self.model.use_top_k(None)
        roster, self.roster = self.roster, None
        try:
            yield
        finally:
            self.roster = roster
            for update in self.lora.values():
                update.active = True
            self.model.use_top_k(self.top_k)

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        return lora.named_parameters(self.lora)

    def train_only(self, *, heads: bool, lora: bool) -> dict[str, nn.Parameter]:
        """Let these take gradients, and no others."""
        chosen = (self.head_parameters() if heads else {}) | (self.lora_parameters() if lora else {})
        for parameter in (*self.head_parameters().values(), *self.lora_parameters().values()):
            parameter.requires_grad_(False)
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        return chosen

    @contextmanager
    def routing(self, batch: Batch) -> Iterator[StudentRoutes | None]:
        """Within, forward passes over this batch take the student's routes."""
        if self.roster is not None:
            with self.model.follow(RosterRoutes(self.roster, self.rules, len(batch.ids_BT))):
                yield None
            return
        if self.heads is None:
            yield None
            return
        routes = StudentRoutes(self.heads, self.rules, self.top_k, batch, self.model.passes)
        with self.model.follow(routes):
            yield routes

    def loss(self, batch: Batch, row_loss: Callable[[Tensor, slice], Tensor]) -> tuple[Tensor, StudentRoutes | None]:
        """The sum of `row_loss(logits [n, V], rows) -> [n]` over the rows that predict an answer's token, flat in order
        of sequence and position; and the routes of the pass."""
        with self.routing(batch) as routes:
            hidden_BTD = self.model.hidden_states(batch.ids_BT)
        hidden_ND = hidden_BTD[:, :-1][batch.answers_BT[:, 1:]]
        return self.model.head_loss(hidden_ND, lambda logits, rows: row_loss(logits, rows).sum()), routes

    @torch.no_grad()
    def token_losses(self, windows: Windows, sequences: int = 8) -> np.ndarray:
        """Negative log-likelihood in nats of every token after the first of each window: float32 [W, T - 1]."""
        rows = []
        for first in range(0, len(windows), sequences):
            batch = windows.rows(np.arange(first, min(first + sequences, len(windows))))
            wanted_N = targets(batch)
            kept: list[Tensor] = []

            def keep(logits: Tensor, rows: slice, wanted_N: Tensor = wanted_N, kept: list[Tensor] = kept) -> Tensor:
                kept.append(F.cross_entropy(logits, wanted_N[rows], reduction="none"))
                return kept[-1]

            self.loss(batch, keep)
            rows.append(torch.cat(kept).view(len(batch.ids_BT), -1))
        return torch.cat(rows).numpy()


@torch.no_grad()
def embedding_scale(embed: Embed, vocabulary: int) -> float:
    """`adapter.heads.scale_for` of some thousand tokens' embeddings."""
    return scale_for(embed(torch.linspace(0, vocabulary - 1, min(vocabulary, SCALE_TOKENS)).long()))


def targets(batch: Batch) -> Tensor:
    """The tokens that are learned, in the order of `Student.loss`'s rows."""
    return batch.ids_BT[:, 1:][batch.answers_BT[:, 1:]]


def owners_of(layers: Sequence[int] | None, moe_layers: Sequence[int]) -> list[int]:
    """Numbers among the MoE layers of these decoder layers. Raises OptionError where no MoE layer follows one."""
    able = list(moe_layers[:-1])
    wrong = [layer for layer in layers or () if layer not in able]
    if wrong or not able or (layers is not None and not layers):
        expected = f"MoE layers that another follows: {able[0]} to {able[-1]}" if able else "two MoE layers"
        raise OptionError("no such owners of heads", where="--owners", expected=expected, got=wrong or layers)
    return [able.index(layer) for layer in (able if layers is None else sorted(set(layers)))]
