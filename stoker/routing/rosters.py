"""Serving with rosters: the rule of roster.py between the gates and the experts, one state a sequence and layer.

State changes when a step is done, so a step that failed is tried again on what it found. After a step in which a roster
was pinned, all pinned rosters are handed to residency in one go; from then on decoding those sequences reads nothing.
A prompt is always computed whole (nothing comes from the prefix cache): its tokens' choices are what the roster is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import is_not
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.native.roster import PinnedRoster, PinnedStep
from stoker.routing.meters import Meters
from stoker.routing.roster import Roster
from stoker.routing.roster_options import LEAST_PREFIX_TOKENS, RosterOptions
from stoker.routing.rule import LayerInfo, RouteState, RoutingRule, Rows, Span
from stoker.routing.select import ranks, weigh


class RosterState(RouteState):
    """The rosters of one sequence, by MoE layer. `pending` is what the step under way makes of them, but for layers
    that the rule's PinnedStep has routed; pinned: whether all are."""

    def __init__(self, rule: RosterRule) -> None:
        self._rule = rule
        self.prompt_tokens = self.total_tokens = 0  # 0: nobody said
        self.idle = False  # cut to nothing: its sequence is over, or begins anew
        self._begin(0)

    def _begin(self, tokens: int) -> None:
        self.began = tokens
        self.rosters = self._rule.fresh(tokens)
        self.pending: dict[int, Roster] = {}
        self.pin_at: int | None = None
        self._refresh()

    def _refresh(self) -> None:
        self.pinned = all(roster.pinned for roster in self.rosters)
        self._natives: list[PinnedRoster | None] | None = None

    def expect(self, prompt_tokens: int, total_tokens: int) -> None:
        self.prompt_tokens, self.total_tokens = prompt_tokens, total_tokens

    def truncate(self, length: int) -> None:
        """What was counted cannot be taken back: a sequence that is cut explores anew from where it was cut."""
        if length < self.tokens:
            self._begin(length)
            self.idle = length == 0
            self._rule.rosters_changed = True

    @property
    def tokens(self) -> int:
        return self.rosters[0].tokens

    def natives(self) -> list[PinnedRoster | None]:
        """The rosters, by layer, that native calls can follow: pinned ones where the layer's own rule is plain."""
        if self._natives is None:
            pairs = zip(self.rosters, self._rule.plain, strict=True)
            self._natives = [roster.native() if roster.pinned and is_plain else None for roster, is_plain in pairs]
        return self._natives

    def next_roster(self, layer: int, span: Span) -> Roster:
        """A copy of the layer's roster, to go through the span's tokens."""
        self.idle = False
        if self.pin_at is None:
            self._place(span)
        roster = self.pending[layer] = self.rosters[layer].copy()
        if roster.pin_at is None or roster.pins == 0:
            roster.pin_at = self.pin_at
        return roster

    def _place(self, span: Span) -> None:
        """Where the prefix ends. What nobody said is known when the answer begins."""
        prefix = self._rule.options.pin_after
        if self.total_tokens or prefix.tokens is not None:
            place = prefix.place(self.prompt_tokens, self.total_tokens)
            self.pin_at = place and max(place, self.began + LEAST_PREFIX_TOKENS if self.began else 0)
        elif span.answer_row < span.last and (prefix.prompt or prefix.share is not None):
            self.pin_at = max(LEAST_PREFIX_TOKENS, span.answer_from)

    def commit(self, step: PinnedStep | None, row: int) -> bool:
        """Keep what the step made; whether a roster was pinned or given up in it. row: this sequence's in `step`."""
        changed = False
        if step is not None:
            for layer, score_range, held, missed in step.finish(row, self.tokens):
                free_TK = step.free_LTK[layer, row : row + 1]
                scores = partial(step.scores, layer, row)
                changed |= self.rosters[layer].note_token(score_range, held, missed, free_TK, scores)
                self.pending.pop(layer, None)
        for layer, roster in self.pending.items():
            before = self.rosters[layer]
            changed |= roster.pins != before.pins or roster.phase is not before.phase
            self.rosters[layer] = roster
        if changed or self.pending:
            self.pending = {}
            self._refresh()
        return changed


class RosterRule(RoutingRule):
    name = "roster"
    wants_logits = True
    recompute_tokens = None

    def __init__(self, options: RosterOptions) -> None:
        self.options = options
        self.meters = Meters()
        self.rosters_changed = False
        self._layers: Sequence[LayerInfo] = ()
        self.plain: list[bool] = []  # by layer: whether native calls can follow its rule
        self._renormalise: list[bool] = []  # by layer, as its rule says
        self._held: list[bool] = []  # by layer: whether every pinned roster found its slots
        self._states: WeakSet[RosterState] = WeakSet()
        self._pins = self._shifts = 0
        self._rows: Rows | None = None  # of the step under way
        self._step: PinnedStep | None = None  # where its tokens are single ones, under rosters of which some are pinned
        self._kept: PinnedStep | None = None  # the last one, for steps of the same rosters

    def attach(self, layers: Sequence[LayerInfo]) -> None:
        first = layers[0]
        self.options.check_shape(len(layers), min(one.experts for one in layers), first.top_k)
        for info in layers:
            if info.rule.groups > 1:
                raise OptionError(
                    "rosters do not fit a router that chooses groups first",
                    where=f"--routing roster: layer {info.layer}",
                    got=f"{info.rule.groups} groups",
                )
        self._layers, self._held = layers, [False] * len(layers)
        self.plain = [info.rule.plain for info in layers]
        self._renormalise = [info.rule.renormalise for info in layers]

    def new_state(self) -> RosterState:
        state = RosterState(self)
        self._states.add(state)
        return state

    def fresh(self, tokens: int) -> list[Roster]:
        """Rosters that know nothing, of a sequence with so many tokens."""
        rosters = [self.options.new(info.index, info.experts, info.rule.top_k, None) for info in self._layers]
        for roster in rosters:
            roster.tokens = tokens
        return rosters

    def reusable(self, state: Any, tokens: int) -> int:
        """None: the rosters of a new prompt are made of all its tokens."""
        return 0

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE is not None
        if rows is not self._rows:
            self._begin(rows)
        # A token that shows a change of topic is still routed like those before: its state alone changes.
        found = self._step and self._step.route(layer, logits_TE, index_TK, weights_TK)
        if found:
            return found
        rule = self._layers[layer].rule
        logits_TE = logits_TE.float()
        scores_TE = ranks(logits_TE, rule).numpy()
        used_TK = index_TK.to(torch.int64, copy=True)
        for span in rows.spans:
            if span.state is not None:
                roster = span.state.next_roster(layer, span)
                used_TK[span.first : span.last] = torch.from_numpy(roster.route(scores_TE[span.first : span.last]))
        return self._weighed(logits_TE, index_TK, weights_TK, used_TK, rule)

    def _begin(self, rows: Rows) -> None:
        """A step, perhaps instead of one that failed: nothing of that counts but in the meters."""
        self._take_meters()
        self._rows, self._step = rows, None
        for span in rows.spans:
            if span.state is not None:
                span.state.pending = {}
        rosters = _pinned_singles(rows.spans)
        if rosters is None:
            return
        kept = self._kept
        if kept is None or len(kept.rosters_TL) != len(rosters) or any(map(is_not, kept.rosters_TL, rosters)):
            kept = self._kept = PinnedStep(rosters, self._renormalise)
        kept.begin()
        self._step = kept

    def _take_meters(self) -> None:
        if self._step is not None:
            self.meters.add(self._step.take_meters(), self._layers[0].rule.top_k)

    def _weighed(
        self, logits_TE: Tensor, index_TK: Tensor, weights_TK: Tensor, used_TK: Tensor, rule: Any
    ) -> tuple[Tensor, Tensor]:
        """Tokens that keep their experts keep the gate's own weights, bit for bit; the others' come from the logits."""
        changed_T = (index_TK.sort(-1).values != used_TK.sort(-1).values).any(-1)
        self.meters.note(logits_TE.softmax(-1), index_TK.to(torch.int64), used_TK)
        if not bool(changed_T.any()):
            return index_TK, weights_TK
        new_TK = torch.where(changed_T[:, None], used_TK, index_TK.to(torch.int64))
        ours_TK = weigh(logits_TE, used_TK, rule).to(weights_TK.dtype)
        return new_TK, torch.where(changed_T[:, None], ours_TK, weights_TK)

    def look_ahead(self, layer: int, rows: Rows, tokens: int) -> list[int] | None:
        """Pinned rosters are what can be asked for; with one that is not, the gate may guess."""
        states = [span.state for span in rows.spans]
        if not states or any(state is None or not state.rosters[layer].pinned for state in states):
            return None
        return list(dict.fromkeys(expert for state in states for expert in state.rosters[layer].members()))

    def holds(self, layer: int, rows: Rows) -> bool:
        if self._step is not None and rows is self._rows and self._step.covers(layer):
            return self._held[layer]
        return self._held[layer] and all(
            span.state is not None and span.state.rosters[layer].pinned for span in rows.spans
        )

    def after_step(self, rows: Rows) -> None:
        self._take_meters()
        step = self._step if rows is self._rows else None
        self._rows = self._step = None
        for row, span in enumerate(rows.spans):
            if span.state is not None:
                before = span.state.pinned
                self.rosters_changed |= span.state.commit(step, row)
                self._pins += span.state.pinned and not before
                self._shifts += before and not span.state.pinned
        if self.rosters_changed:
            self.rosters_changed = False
            self._hold()

    def _hold(self) -> None:
        """Give residency the pinned rosters of all sequences: the experts that most sequences share first."""
        for info in self._layers:
            pinned = [state.rosters[info.index] for state in self._states if state.rosters[info.index].pinned]
            shared = Counter(expert for roster in pinned for expert in roster.members())
            uses = Counter({e: int(sum(roster.count_E[e] for roster in pinned)) for e in shared})
            held = info.hold(sorted(shared, key=lambda expert: (-shared[expert], -uses[expert], expert)))
            self._held[info.index] = held == len(shared)
        self._layers[0].settle()

    def room(self) -> int | None:
        """Pinned rosters count where they do not overlap; a sequence that has none yet may need m experts a layer."""
        short = [info for info in self._layers if info.slots < info.experts]
        if not short:
            return None
        running = [state for state in self._states if not state.idle]
        spare = []
        for info in short:
            size = self.options.size(info.index)
            unpinned = sum(not state.rosters[info.index].pinned for state in running)
            spare.append((info.slots - len(self.union(info.index))) // size - unpinned)
        return max(0, min(spare))

    def union(self, layer: int) -> set[int]:
        """The experts of a layer that some sequence's pinned roster holds."""
        states = [state for state in self._states if not state.idle and state.rosters[layer].pinned]
        return {expert for state in states for expert in state.rosters[layer].members()}

    def about(self) -> dict[str, Any]:
        return {"routing": self.name, "roster": self.options.as_dict()}

    def figures(self) -> dict[str, float]:
        return self.meters.figures()

    def counters(self) -> dict[str, int]:
        return {
            "roster_pins": self._pins,
            "roster_shifts": self._shifts,
            "routed_choices": self.meters.choices,
            "swapped_choices": self.meters.choices - self.meters.kept,
        }


def _pinned_singles(spans: Sequence[Span]) -> list[list[PinnedRoster | None]] | None:
    """Each sequence's rosters for native calls, where each has one token and some pinned roster; else None."""
    found = []
    for span in spans:
        if span.state is None or span.last - span.first != 1:
            return None
        found.append(span.state.natives())
    return found if found and all(map(any, found)) else None
