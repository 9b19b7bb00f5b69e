"""The seam of everything that changes routes: what a rule is told and what it may answer.

A rule stands between a layer's gate and its experts. It sees the step's tokens by sequence, keeps its state on the
sequences, and may replace which experts a token uses and with what weights. It knows no residency and no runtime:
what it needs (who is resident, a layer's own rule) comes as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from stoker.routing.select import LayerRule


class RouteState:
    """What a rule keeps for one sequence. Lives on the sequence: made with it, cut with it, gone with it."""

    def expect(self, prompt_tokens: int, total_tokens: int) -> None:
        """Told before the first token where it is known: the length of the prompt, and of prompt and answer at most."""

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens of the sequence remain: forget what the others left here."""

    def adopt(self, length: int) -> None:
        """The sequence begins with `length` tokens of a prompt that another sequence computed."""

    def shareable(self, length: int) -> int:
        """How many of the sequence's `length` tokens have keys and values that a prompt with the same text would."""
        return length


@dataclass(frozen=True)
class Span:
    """Rows [first, last) of a step: consecutive tokens of one sequence, the first at `position` in it.

    answer_from: position of the sequence's first token that is answer, not prompt (none so far: behind the span).
    state: the rule's for this sequence; None where the sequence has nothing to do with the rule: its rows stay as the
    gate routed them.
    """

    first: int
    last: int
    position: int
    answer_from: int
    state: Any = None

    @property
    def answer_row(self) -> int:
        """The first of the span's rows that is answer; `last` where there is none."""
        return min(self.last, max(self.first, self.first + self.answer_from - self.position))


@dataclass(frozen=True)
class Rows:
    """The tokens of a step [T] by sequence; `step` is the number of the step. embedded: the tokens as the model's
    embedding gives them, float32 [T, D], for a rule that `wants_tokens`."""

    step: int
    spans: tuple[Span, ...] = ()
    embedded: Tensor | None = None


@dataclass(frozen=True)
class LayerInfo:
    """One MoE layer, as a rule may know it.

    slots: how many of its experts find place in memory.
    index: its number among the MoE layers; layer: in the decoder; top_k: experts a token uses by the model's own
    configuration; resident() names the experts that are in memory now; record_bytes: what reading one costs. hold()
    keeps experts (best first) in memory until it is called again, as far as the slots allow, and begins to read them;
    settle() waits for what any layer holds.
    """

    index: int
    layer: int
    experts: int
    width: int
    top_k: int
    record_bytes: int
    resident: Callable[[], Collection[int]]
    find_rule: Callable[[], LayerRule]
    slots: int = 0
    hold: Callable[[Sequence[int]], int] = len
    settle: Callable[[], None] = lambda: None

    @cached_property
    def rule(self) -> LayerRule:
        """The gate's own rule. Raises OptionError where it is none that is known."""
        return self.find_rule()


class RoutingRule:
    """Leaves every route as it is. Subclasses override what they change; `layer` is always LayerInfo.index.

    State changes only in `after_step`: a step that failed on its way is tried again and must find what it found.
    """

    name: ClassVar[str] = "gate"
    changes_output: ClassVar[bool] = True
    wants_logits: bool = False
    wants_tokens: bool = False
    asks_residency: bool = False  # routes follow from what is in memory too: only a decode token by token shows them
    recompute_tokens: int | None = 1
    """How many of a prompt's last tokens must be computed to know the state, where the others come from the prefix
    cache; None: all of them, so nothing is taken up."""

    def attach(self, layers: Sequence[LayerInfo]) -> None:
        """Once, before the first step. Raises OptionError where the rule does not fit the model."""

    def new_state(self) -> RouteState | None:
        """For a new sequence."""
        return None

    def room(self) -> int | None:
        """How many more sequences would find the memory that the rule wants for them; None: as many as there are."""
        return None

    def reusable(self, state: Any, tokens: int) -> int:
        """How many of the first `tokens` tokens of a sequence a new prompt that begins with them may keep."""
        return tokens

    def before_step(self, rows: Rows) -> Iterable[tuple[int, list[int]]]:
        """(layer, experts that it will need, likeliest first) of a step that is about to begin, as far as that is
        known. Taken to its end once a try, so it changes nothing that a second try would not change again."""
        return ()

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The experts int64 [T, K'] and weights float [T, K'] that the step's tokens use, from the gate's.

        hidden_TD: the block's input; logits_TE: the gate's, None unless `wants_logits`. Experts of a token are
        distinct. A token's answer must depend on nothing but its own row and its sequence's state.
        """
        return index_TK, weights_TK

    def needs_gate(self, layer: int, rows: Rows) -> bool:
        """Whether `layer`'s gate must be computed in this step; else `route` gets an empty route of the right length
        and no logits."""
        return True

    def coming(self, layer: int) -> list[int]:
        """The experts that `layer` will need in the next step, likeliest first, as far as they are known now: asked
        when the layer has its own for this step, and where they did not all find a place, once more after the step."""
        return []

    def look_ahead(self, layer: int, rows: Rows, tokens: int) -> list[int] | None:
        """The experts of `layer` in this step, likeliest first, asked one layer early, to read ahead. None: let
        the layer's gate guess."""
        return None

    def holds(self, layer: int, rows: Rows) -> bool:
        """Whether all that `layer` can use in this step stays in memory by the rule's doing: nothing to read ahead."""
        return False

    def after_step(self, rows: Rows) -> None:
        """The step is done, and its sequences have grown."""

    def about(self) -> dict[str, Any]:
        """What is told of the mode in results, /v1/models and traces: its name and its settings, as plain data."""
        return {"routing": self.name}

    def counters(self) -> dict[str, int]:
        """Counts since loading, for stats and metrics."""
        return {}

    def figures(self) -> dict[str, float]:
        """Meters since loading: what the mode did to the gates' choices."""
        return {}
