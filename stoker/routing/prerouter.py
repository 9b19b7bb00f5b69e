"""The prerouter: a layer's experts for the next token are chosen one token early, by trained heads, so that reading
them overlaps with the rest of the step.

The head of an owner layer sees what the layer saw at token t and gives the next MoE layer's route at t + 1 (Edge0,
arXiv 2609.18063; DESIGN section 7). Prompt tokens use the gates, answer tokens the predictions; which token is which
depends on the request alone, so neither chunks nor batches nor a recomputation change a route. Owns predictions and
their state; the heads' arithmetic is handed in, reads are residency's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.routing.rule import LayerInfo, RouteState, RoutingRule, Rows, Span
from stoker.routing.select import LayerRule, select


class Bank(Protocol):
    """The heads, by owner (a decoder layer). A row's route depends on that row alone."""

    @property
    def owners(self) -> Sequence[int]: ...

    def route(
        self, owner: int, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor, rule: LayerRule, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Experts int64 and weights float32 [T, top_k] of the next MoE layer for each token's successor, by `rule`; -1
        in `before`: no predecessor."""


@dataclass
class Predictions(RouteState):
    """One sequence: how far it is, and the routes of its next token.

    gated: how many of its leading tokens the gates routed. used: per owner, the experts int64 [1, K] of the last token.
    ready: per consumer, experts and weights [1, K] for token `length`; either is empty where it is not known.
    """

    length: int = 0
    gated: int = 0
    used: list[Tensor] = field(default_factory=list)
    ready: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def adopt(self, length: int) -> None:
        self.length = self.gated = length

    def shareable(self, length: int) -> int:
        return min(self.gated, length)

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.length, self.gated = length, min(self.gated, length)
            self.used, self.ready = [], []


@dataclass
class _Seen:
    """What an owner saw of the rows in `rows`: those whose successor is an answer token, or may become one."""

    rows: list[int]
    hidden: Tensor
    used: Tensor  # of all rows of the step
    before: Tensor
    route: tuple[Tensor, Tensor] | None = None  # the predictions for their successors, when they are computed


class Prerouter(RoutingRule):
    """Routes of `bank`'s heads with `top_k` experts a token (None: the model's own number).

    early: every head is evaluated right behind its layer, so that reads for the next token start while this one is
    computed; else all of them after the step. `about`: of the adapter.
    """

    name: ClassVar[str] = "prerouter"
    recompute_tokens: int | None = 2  # the last prompt token's features name the experts of the one before

    def __init__(
        self, bank: Bank, *, top_k: int | None = None, early: bool = True, about: dict[str, Any] | None = None
    ) -> None:
        self.bank, self.top_k, self.early, self._about = bank, top_k, early, about or {}
        self.fallbacks = self.predicted = 0
        self._layers: list[LayerInfo] = []
        self._owner_of: list[int | None] = []  # by MoE layer: its place among the owners
        self._consumer_of: list[int | None] = []  # by MoE layer: the place of the owner before it
        self._rows: Rows | None = None
        self._seen: list[_Seen | None] = []

    # ---- the model ---------------------------------------------------------------------------------------------------

    def attach(self, layers: Sequence[LayerInfo]) -> None:
        self._layers = list(layers)
        own = layers[0].top_k
        self.top_k = self.top_k or own
        if not 1 <= self.top_k <= min(layer.experts for layer in layers):
            raise OptionError("K is out of range", where="the adapter", got=self.top_k)
        self.wants_logits = self.top_k != own
        place = {owner: at for at, owner in enumerate(self.bank.owners)}
        self._owner_of = [place.get(layer.layer) for layer in layers]
        self._consumer_of = [None, *self._owner_of[:-1]]
        if missing := set(place) - {layer.layer for layer in layers[:-1]}:
            raise OptionError("no MoE layer follows these owners", where="the adapter", got=sorted(missing))
        for layer, consumes in zip(layers, self._consumer_of, strict=True):
            if consumes is not None or self.wants_logits:
                layer.rule  # noqa: B018 (an unknown rule is told now, not in the first step)

    def new_state(self) -> Predictions:
        return Predictions()

    def reusable(self, state: Any, tokens: int) -> int:
        """Answer tokens were routed by predictions; as part of a prompt they are not."""
        return max(0, min(tokens - 1, state.gated))

    # ---- a step ------------------------------------------------------------------------------------------------------

    def needs_gate(self, layer: int, rows: Rows) -> bool:
        """Not where every row has a prediction."""
        if self._consumer_of[layer] is None:
            return True
        return not rows.spans or any(
            span.state is None or span.answer_row > span.first or not span.state.ready for span in rows.spans
        )

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if rows is not self._rows:
            self._rows, self._seen = rows, [None] * len(self.bank.owners)
        consumes, owns = self._consumer_of[layer], self._owner_of[layer]
        index_TK, weights_TK = self._route(layer, consumes, rows, logits_TE, index_TK, weights_TK)
        if owns is not None:
            self._see(layer, owns, rows, hidden_TD, index_TK)
        return index_TK, weights_TK

    def look_ahead(self, layer: int, rows: Rows, tokens: int) -> list[int] | None:
        """A route that is known was staged long ago: there is nothing to guess."""
        return None if self.needs_gate(layer, rows) else []

    def coming(self, layer: int) -> list[int]:
        consumes = self._consumer_of[layer]
        seen = None if consumes is None or not self._seen else self._seen[consumes]
        if seen is None or seen.route is None or self._rows is None:
            return []
        if len(seen.rows) == 1 and len(self._rows.spans) == 1:
            return seen.route[0][0].tolist()
        last = [seen.rows.index(span.last - 1) for span in self._rows.spans if span.last - 1 in seen.rows]
        return list(dict.fromkeys(seen.route[0][last].T.flatten().tolist()))

    def after_step(self, rows: Rows) -> None:
        if rows is not self._rows:
            return
        for at, seen in enumerate(self._seen):
            if seen is not None and seen.route is None:
                self._predict(self._owner_of.index(at), at, seen)
        for span in rows.spans:
            if isinstance(span.state, Predictions):
                self._commit(span)

    def _commit(self, span: Span) -> None:
        """The sequence has grown by the span."""
        state, last = span.state, span.last - 1
        state.length = span.position + span.last - span.first
        if span.position <= state.gated:
            state.gated = max(state.gated, min(span.answer_from, state.length))
        state.used, state.ready = [], []
        for seen in self._seen:
            if seen is None:
                return
            state.used.append(_row(seen.used, last))
            if last in seen.rows:
                assert seen.route is not None
                row = seen.rows.index(last)
                state.ready.append((_row(seen.route[0], row), _row(seen.route[1], row)))

    # ---- routes ------------------------------------------------------------------------------------------------------

    def _route(
        self,
        layer: int,
        consumes: int | None,
        rows: Rows,
        logits_TE: Tensor | None,
        index_TK: Tensor,
        weights_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        spans = rows.spans
        if consumes is not None and len(spans) == 1 and (known := _single(spans[0])) is not None:
            self.predicted += 1
            return known.ready[consumes]
        if logits_TE is not None:
            index_TK, weights_TK = select(logits_TE.float(), self._layers[layer].rule, self.top_k)
        if consumes is None:
            return index_TK, weights_TK
        if index_TK.shape[1]:
            index_TK, weights_TK = index_TK.to(torch.int64).clone(), weights_TK.to(torch.float32).clone()
        else:  # no gate was asked: every row gets a prediction
            shape = (len(index_TK), self.top_k or 0)
            index_TK, weights_TK = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        for span in spans:
            if isinstance(span.state, Predictions) and span.answer_row < span.last:
                self._replace(span, consumes, index_TK, weights_TK)
        return index_TK, weights_TK

    def _replace(self, span: Span, consumes: int, index_TK: Tensor, weights_TK: Tensor) -> None:
        """Put predictions where the answer tokens of a span stand. The first of the span has its own from the step
        before; the others from their predecessors in this one."""
        first = span.answer_row
        self.predicted += span.last - first
        if first == span.first:
            if span.state.ready:
                index_TK[first], weights_TK[first] = (part[0] for part in span.state.ready[consumes])
            else:
                self.fallbacks += 1
                self.predicted -= 1
            first += 1
        if first == span.last:
            return
        seen = self._seen[consumes]
        assert seen is not None, "the owner ran before its consumer"
        if seen.route is None:
            self._predict(self._owner_of.index(consumes), consumes, seen)
        assert seen.route is not None
        at = seen.rows.index(first - 1)
        until = at + span.last - first
        index_TK[first : span.last], weights_TK[first : span.last] = (part[at:until] for part in seen.route)

    # ---- predictions -------------------------------------------------------------------------------------------------

    def _see(self, layer: int, owns: int, rows: Rows, hidden_TD: Tensor, index_TK: Tensor) -> None:
        """Keep what a head needs of this layer, and evaluate it where that is not to wait."""
        if len(index_TK) == 1 and len(rows.spans) == 1 and (known := _single(rows.spans[0])) is not None:
            self._seen[owns] = seen = _Seen([0], hidden_TD, index_TK, known.used[owns])
            if self.early:
                self._predict(layer, owns, seen)
            return
        wanted: list[int] = []
        before_TK = torch.cat([torch.full_like(index_TK[:1], -1), index_TK[:-1]])
        for span in rows.spans:
            if not isinstance(span.state, Predictions):
                continue
            before_TK[span.first] = span.state.used[owns] if span.state.used else -1
            length = span.position + span.last - span.first
            if length >= span.answer_from:
                wanted += range(max(span.first, span.answer_row - 1), span.last)
        if len(wanted) < len(index_TK):
            hidden_TD, before = hidden_TD[wanted], before_TK[wanted]
        else:
            before = before_TK
        self._seen[owns] = seen = _Seen(wanted, hidden_TD, index_TK, before)
        if self.early and wanted:
            self._predict(layer, owns, seen)

    def _predict(self, layer: int, owns: int, seen: _Seen) -> None:
        used = seen.used if len(seen.rows) == len(seen.used) else seen.used[seen.rows]
        assert self.top_k is not None
        rule = self._layers[layer + 1].rule
        seen.route = self.bank.route(self.bank.owners[owns], seen.hidden, used, seen.before, rule, self.top_k)

    # ---- told --------------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        return {"routing": self.name, "top_k": self.top_k, "heads": len(self.bank.owners), "adapter": self._about}

    def counters(self) -> dict[str, int]:
        """Routes (a token in a layer) that heads chose, and answers' routes for which there was no prediction."""
        return {"prerouter_routes": self.predicted, "prerouter_fallbacks": self.fallbacks}


def _single(span: Span) -> Predictions | None:
    """The predictions of a span that is one answer token: by far the most common step."""
    state = span.state
    if span.last - span.first == 1 and span.answer_row == span.first and isinstance(state, Predictions):
        return state if state.ready else None
    return None


def _row(part_TK: Tensor, row: int) -> Tensor:
    """[1, K]; what has one row is not cut: that costs a microsecond, a hundred times a token."""
    return part_TK if len(part_TK) == 1 else part_TK[row : row + 1]
