"""The prerouter: a layer's experts for the next token are chosen one token early, by trained heads, so that reading
them overlaps with the rest of the step.

The head of an owner layer sees what the layer saw at token t and gives the next MoE layer's route at t + 1 (Edge0,
arXiv 2609.18063; DESIGN section 7). Prompt tokens use the gates, answer tokens the predictions; which token is which
depends on the request alone, so neither chunks nor batches nor a recomputation change a route. Heads may also see the
token at t + 1: their routes are all known when its step begins, none of them before. Owns predictions and their state;
the heads' arithmetic is handed in, reads are residency's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.routing.rule import LayerInfo, RouteState, RoutingRule, Rows, Span
from stoker.routing.select import LayerRule, select


class Bank(Protocol):
    """The heads, by owner (a decoder layer). A row's route depends on that row alone."""

    @property
    def owners(self) -> Sequence[int]: ...

    @property
    def sees_next(self) -> bool:
        """Whether a head wants the embedding of the token that the route is for."""

    def route(
        self,
        owner: int,
        hidden_TD: Tensor,
        used_TK: Tensor,
        before_TK: Tensor,
        rule: LayerRule,
        top_k: int,
        ahead_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Experts int64 and weights float32 [T, top_k] of the next MoE layer for each token's successor, by `rule`; -1
        in `before`: no predecessor. ahead: the successors' embeddings, where heads see them."""


class Seen(NamedTuple):
    """What an owner saw of some tokens: hidden [T, D], their experts and those of the tokens before them [T, K]."""

    hidden: Tensor
    used: Tensor
    before: Tensor

    def row(self, row: int) -> Seen:
        """One token's part, a copy: a view would keep a whole prompt's hidden states in memory until the next step."""
        return Seen(*(part[row : row + 1].clone() for part in self))


@dataclass
class Predictions(RouteState):
    """One sequence: how far it is, and the routes of its next token.

    gated: how many of its leading tokens the gates routed. used: per owner, the experts int64 [1, K] of the last token.
    ready: per consumer, experts and weights [1, K] for token `length`; either is empty where it is not known.
    kept: per owner, what it saw of the last token, for heads that see the next one too: `ready` follows from both.
    """

    length: int = 0
    gated: int = 0
    used: list[Tensor] = field(default_factory=list)
    ready: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: list[Seen] = field(default_factory=list)

    def adopt(self, length: int) -> None:
        self.length = self.gated = length

    def shareable(self, length: int) -> int:
        return min(self.gated, length)

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.length, self.gated = length, min(self.gated, length)
            self.used, self.ready, self.kept = [], [], []


@dataclass
class _Owned:
    """What an owner saw of the rows in `rows`: those whose successor is an answer token, or may become one."""

    rows: list[int]
    seen: Seen
    used: Tensor  # of all rows of the step
    last: list[Seen] = field(default_factory=list)  # of each span's last row, for heads that will see its successor
    route: tuple[Tensor, Tensor] | None = None  # the predictions for their successors, when they are computed


class Prerouter(RoutingRule):
    """Routes of `bank`'s heads with `top_k` experts a token (None: the model's own number).

    early: every head is evaluated right behind its layer, so that reads for the next token start while this one is
    computed; else all of them after the step. Heads that see the next token: before its step. `about`: of the adapter.
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
        self._seen: list[_Owned | None] = []
        self.wants_tokens = bank.sees_next
        self._foretold: dict[int, list[int]] = {}  # by MoE layer: what `before_step` knew of this step

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

    def before_step(self, rows: Rows) -> Iterator[tuple[int, list[int]]]:
        """Where heads see the next token: it is here now, so they are evaluated, and each one's reads may begin."""
        if not self.wants_tokens:
            return
        asked: list[tuple[Span, Predictions]] = []
        for span in rows.spans:
            if isinstance(span.state, Predictions):
                span.state.ready = []
                if span.state.kept and span.answer_row == span.first:
                    asked.append((span, span.state))
        self._foretold = {}
        if asked:
            yield from self._foretell(asked, rows)

    def _foretell(self, asked: Sequence[tuple[Span, Predictions]], rows: Rows) -> Iterator[tuple[int, list[int]]]:
        """Make the first tokens' routes ready, all sequences in one call a head; by MoE layer, the experts of them."""
        assert rows.embedded is not None
        firsts = [span.first for span, _ in asked]
        ahead_BD = rows.embedded if len(firsts) == len(rows.embedded) else rows.embedded[firsts]
        for layer, at in enumerate(self._consumer_of):
            if at is None:
                continue
            seen = [state.kept[at] for _, state in asked]
            together = seen[0] if len(seen) == 1 else Seen(*(torch.cat(parts) for parts in zip(*seen, strict=True)))
            index_BK, weights_BK = self._asked(at, together, ahead_BD)
            for row, (_, state) in enumerate(asked):  # owners follow each other as their consumers do
                state.ready.append((_row(index_BK, row), _row(weights_BK, row)))
            self._foretold[layer] = experts = list(dict.fromkeys(index_BK.T.flatten().tolist()))
            yield layer, experts

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
            self._see(owns, rows, hidden_TD, index_TK)
        return index_TK, weights_TK

    def look_ahead(self, layer: int, rows: Rows, tokens: int) -> list[int] | None:
        """A route that is known was staged before the step: there is nothing to guess."""
        return None if self.needs_gate(layer, rows) else self._foretold.get(layer, [])

    def coming(self, layer: int) -> list[int]:
        consumes = self._consumer_of[layer]
        owned = None if consumes is None or not self._seen else self._seen[consumes]
        if owned is None or owned.route is None or self._rows is None:
            return []
        if len(owned.rows) == 1 and len(self._rows.spans) == 1:
            return owned.route[0][0].tolist()
        last = [owned.rows.index(span.last - 1) for span in self._rows.spans if span.last - 1 in owned.rows]
        return list(dict.fromkeys(owned.route[0][last].T.flatten().tolist()))

    def after_step(self, rows: Rows) -> None:
        if rows is not self._rows:
            return
        for at, owned in enumerate(self._seen):
            if owned is not None and owned.route is None and not self.wants_tokens:
                self._predict(at, owned)
        for place, span in enumerate(rows.spans):
            if isinstance(span.state, Predictions):
                self._commit(place, span)

    def _commit(self, place: int, span: Span) -> None:
        """The sequence has grown by the span."""
        state, last = span.state, span.last - 1
        state.length = span.position + span.last - span.first
        if span.position <= state.gated:
            state.gated = max(state.gated, min(span.answer_from, state.length))
        state.used, state.ready, state.kept = [], [], []
        for owned in self._seen:
            if owned is None:
                return
            state.used.append(_row(owned.used, last))
            if self.wants_tokens:
                state.kept.append(owned.last[place])
            elif last in owned.rows:
                assert owned.route is not None
                row = owned.rows.index(last)
                state.ready.append((_row(owned.route[0], row), _row(owned.route[1], row)))

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
        owned = self._seen[consumes]
        assert owned is not None, "the owner ran before its consumer"
        if owned.route is None:
            self._predict(consumes, owned)
        assert owned.route is not None
        at = owned.rows.index(first - 1)
        until = at + span.last - first
        index_TK[first : span.last], weights_TK[first : span.last] = (part[at:until] for part in owned.route)

    # ---- predictions -------------------------------------------------------------------------------------------------

    def _see(self, owns: int, rows: Rows, hidden_TD: Tensor, index_TK: Tensor) -> None:
        """Keep what a head needs of this layer, and evaluate it where that is not to wait."""
        early = self.early and not self.wants_tokens
        if len(index_TK) == 1 and len(rows.spans) == 1 and (known := _single(rows.spans[0])) is not None:
            seen = Seen(hidden_TD, index_TK, known.used[owns])
            self._seen[owns] = owned = _Owned([0], seen, index_TK, [seen])
            if early:
                self._predict(owns, owned)
            return
        wanted: list[int] = []
        before_TK = torch.cat([torch.full_like(index_TK[:1], -1), index_TK[:-1]])
        for span in rows.spans:
            if not isinstance(span.state, Predictions):
                continue
            before_TK[span.first] = span.state.used[owns] if span.state.used else -1
            length = span.position + span.last - span.first
            if length >= span.answer_from:  # the successor of the last row is not in this step
                wanted += range(max(span.first, span.answer_row - 1), span.last - self.wants_tokens)
        every = Seen(hidden_TD, index_TK, before_TK)
        last = [every.row(span.last - 1) for span in rows.spans] if self.wants_tokens else []
        seen = every if len(wanted) == len(index_TK) else Seen(*(part[wanted] for part in every))
        self._seen[owns] = owned = _Owned(wanted, seen, index_TK, last)
        if early and wanted:
            self._predict(owns, owned)

    def _predict(self, owns: int, owned: _Owned) -> None:
        """The routes of the successors of an owner's rows; where heads see them, they are in this step."""
        embedded = self._rows.embedded if self._rows is not None and self.wants_tokens else None
        ahead_TD = None if embedded is None else embedded[[row + 1 for row in owned.rows]]
        owned.route = self._asked(owns, owned.seen, ahead_TD)

    def _asked(self, owns: int, seen: Seen, ahead_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.top_k is not None
        rule = self._layers[self._owner_of.index(owns) + 1].rule
        return self.bank.route(self.bank.owners[owns], *seen, rule, self.top_k, ahead_TD)

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
