"""Cache-aware routing: experts that are in memory get a small lead, so that near ties do not cost a read.

s = z + lambda * (running mean range of z) * resident; the J best of z are always used, the others are the best by s;
weights come from z. After "Mixture of Cache-Conditional Experts" (arXiv 2412.00099). Prompts keep their gates' routes:
a prompt reads most experts once anyway. Knows no residency: who is resident is asked of the layer, or, where a sequence
shall not depend on what else ran, of a cache of its own that is only imagined.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import OptionError
from stoker.routing.meters import Meters
from stoker.routing.roster import Floats, Ints, top
from stoker.routing.rule import LayerInfo, RouteState, RoutingRule, Rows
from stoker.routing.select import ranks, weigh


@dataclass(frozen=True)
class CacheAwareOptions:
    """lead: lambda, 0 to 1. always: J. slots: of the imagined cache a layer that makes a sequence's output its own
    (deterministic); 0: the slots that there are. prompts: bias prompt tokens too (to measure on text)."""

    lead: float = 0.1
    always: int = 1
    slots: int = 0
    prompts: bool = False

    def __post_init__(self) -> None:
        for where, good, expected, got in (
            ("--lambda", 0 <= self.lead <= 1, "0 to 1", self.lead),
            ("--keep-best", self.always >= 0, "0 or more", self.always),
            ("--own-slots", self.slots >= 0, "0 or more", self.slots),
        ):
            if not good:
                raise OptionError("out of range", where=where, expected=expected, got=got)

    def as_dict(self) -> dict[str, Any]:
        return {"lambda": self.lead, "keep_best": self.always, "own_slots": self.slots}


class OwnCache:
    """An imagined LRU cache of one layer, whole events at a time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: OrderedDict[int, None] = OrderedDict()
        self.misses = 0

    def use(self, experts: Sequence[int]) -> None:
        self.misses += sum(expert not in self.held for expert in experts)
        for expert in experts:
            self.held[expert] = None
            self.held.move_to_end(expert)
        while len(self.held) > self.slots:
            self.held.popitem(last=False)

    def copy(self) -> OwnCache:
        other = copy(self)
        other.held = self.held.copy()
        return other


@dataclass
class Lane:
    """What cache-aware routing knows of one sequence at one layer."""

    cache: OwnCache | None
    tokens: int = 0
    range_sum: float = 0.0

    def copy(self) -> Lane:
        return Lane(self.cache.copy() if self.cache else None, self.tokens, self.range_sum)

    def route(
        self, scores_TE: NDArray[Any], chosen: int, options: CacheAwareOptions, first: int, resident_E: Any
    ) -> Ints:
        """The experts of the next T tokens, int64 [T, K], best score first; tokens before row `first` keep their own.

        resident_E: bool [E], used where there is no imagined cache.
        """
        scores_TE = scores_TE.astype(np.float64)
        sums_T = np.cumsum(np.concatenate(([self.range_sum], np.ptp(scores_TE, axis=1))))[1:]
        unit_T = sums_T / np.arange(self.tokens + 1, self.tokens + 1 + len(scores_TE))
        taken_TK = top(scores_TE, chosen)
        self.tokens, self.range_sum = self.tokens + len(scores_TE), float(sums_T[-1])
        if self.cache is None:
            taken_TK[first:] = biased(scores_TE[first:], options.lead * unit_T[first:], resident_E, options, chosen)
            return taken_TK
        for row, scores_E in enumerate(scores_TE):
            if row >= first:
                resident_E = np.zeros(len(scores_E), dtype=bool)
                resident_E[list(self.cache.held)] = True
                one = slice(row, row + 1)
                taken_TK[one] = biased(scores_TE[one], options.lead * unit_T[one], resident_E, options, chosen)
            self.cache.use(taken_TK[row].tolist())
        return taken_TK


def biased(
    scores_TE: Floats, lead_T: Floats, resident_E: NDArray[np.bool_], options: CacheAwareOptions, chosen: int
) -> Ints:
    """The rule itself: [T, K] by falling score z."""
    lifted_TE = scores_TE + lead_T[:, None] * resident_E
    if options.always:
        best_TJ = top(scores_TE, min(options.always, chosen))
        np.put_along_axis(lifted_TE, best_TJ, np.inf, axis=1)
    taken_TK = top(lifted_TE, chosen)
    order_TK = np.argsort(-np.take_along_axis(scores_TE, taken_TK, axis=1), axis=1, kind="stable")
    return np.take_along_axis(taken_TK, order_TK, axis=1)


class CacheAwareState(RouteState):
    def __init__(self, rule: CacheAwareRule) -> None:
        self._rule = rule
        self._begin()

    def _begin(self, tokens: int = 0) -> None:
        self.lanes = self._rule.fresh(tokens)
        self.pending: dict[int, Lane] = {}

    def truncate(self, length: int) -> None:
        """An imagined cache cannot be taken back: a sequence that is cut begins with an empty one."""
        if length < self.lanes[0].tokens:
            self._begin(length)

    def commit(self) -> None:
        for layer, lane in self.pending.items():
            self.lanes[layer] = lane
        self.pending = {}


class CacheAwareRule(RoutingRule):
    name = "cache-aware"
    wants_logits = True

    def __init__(self, options: CacheAwareOptions) -> None:
        self.options = options
        self.meters = Meters()
        self.recompute_tokens = None if options.slots else 1
        self.asks_residency = not options.slots
        self._layers: Sequence[LayerInfo] = ()

    def attach(self, layers: Sequence[LayerInfo]) -> None:
        for info in layers:
            if info.rule.groups > 1:
                raise OptionError(
                    "cache-aware routing does not fit a router that chooses groups first",
                    where=f"--routing cache-aware: layer {info.layer}",
                    got=f"{info.rule.groups} groups",
                )
        self._layers = layers

    def new_state(self) -> CacheAwareState:
        return CacheAwareState(self)

    def fresh(self, tokens: int) -> list[Lane]:
        return [Lane(OwnCache(self.options.slots) if self.options.slots else None, tokens) for _ in self._layers]

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE is not None
        info = self._layers[layer]
        logits_TE = logits_TE.float()
        scores_TE = ranks(logits_TE, info.rule).numpy()
        used_TK = index_TK.to(torch.int64, copy=True)
        biased_T = torch.zeros(len(index_TK), dtype=torch.bool)
        resident_E = None if self.options.slots else mask(info.resident(), info.experts)
        for span in rows.spans:
            if span.state is None:
                continue
            lane = span.state.pending[layer] = span.state.lanes[layer].copy()
            first = 0 if self.options.prompts else span.answer_row - span.first
            mine = slice(span.first, span.last)
            taken_TK = lane.route(scores_TE[mine], info.rule.top_k, self.options, first, resident_E)
            used_TK[span.first + first : span.last] = torch.from_numpy(taken_TK[first:])
            biased_T[span.first + first : span.last] = True
        changed_T = biased_T & (index_TK.sort(-1).values != used_TK.sort(-1).values).any(-1)
        if bool(biased_T.any()):
            gate_XK = index_TK[biased_T].to(torch.int64)
            self.meters.note(logits_TE[biased_T].softmax(-1), gate_XK, used_TK[biased_T])
        if not bool(changed_T.any()):
            return index_TK, weights_TK
        ours_TK = weigh(logits_TE, used_TK, info.rule).to(weights_TK.dtype)
        new_TK = torch.where(changed_T[:, None], used_TK, index_TK.to(torch.int64))
        return new_TK, torch.where(changed_T[:, None], ours_TK, weights_TK)

    def after_step(self, rows: Rows) -> None:
        for span in rows.spans:
            if span.state is not None:
                span.state.commit()

    def about(self) -> dict[str, Any]:
        return {"routing": self.name, "cache_aware": self.options.as_dict()}

    def figures(self) -> dict[str, float]:
        return self.meters.figures()

    def counters(self) -> dict[str, int]:
        return {
            "routed_choices": self.meters.choices,
            "swapped_choices": self.meters.choices - self.meters.kept,
        }


def mask(experts: Collection[int], count: int) -> NDArray[np.bool_]:
    found = np.zeros(count, dtype=bool)
    found[list(experts)] = True
    return found
