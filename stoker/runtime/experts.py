"""The experts function that transformers' MoE classes call, computing on experts in slots.

One `StreamedExperts` per MoE layer: it groups the step's (token, expert) pairs by expert, asks residency for the slots,
computes each expert as it arrives, and adds the weighted results in a fixed order. It never chooses experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from stoker.errors import CheckpointError
from stoker.native import kernels
from stoker.routing.rule import RoutingRule
from stoker.runtime.skeleton import EXPERTS_IMPLEMENTATION
from stoker.runtime.step import StepContext
from stoker.runtime.uses import LayerUses

if TYPE_CHECKING:
    from stoker.residency import Residency

# Where answers need more experts than there are slots, the device would wait between two layers' reads: of those of the
# next one twice `prefetch` are sent ahead, and as many as `prefetch` more for every two answers.
WIDE_AHEAD, WIDE_AHEAD_TOKENS = 2, 2
STREAM_GROUP = 8  # experts computed in one native call where as many are there: a call costs two wake-ups

Path = Literal["auto", "exact", "staged", "hot", "whole_layer"]


class Scratch:
    """A float32 buffer [rows, D] that the layers take turns in; grows once, to the largest step."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 1)

    def take(self, rows: int, width: int) -> Tensor:
        if self._buffer.shape[0] < rows or self._buffer.shape[1] != width:
            self._buffer = torch.empty(rows, width)
        return self._buffer[:rows]


@dataclass(frozen=True)
class Pairs:
    """The step's (token, choice) pairs sorted by expert. experts[x] owns rows row_start[x]..row_start[x+1]."""

    experts: list[int]
    row_start: Tensor  # int32 [X + 1]
    token_of_row: Tensor  # int32 [P]
    out_row: Tensor  # int32 [P]: token * K + choice

    @staticmethod
    def of(index_TK: Tensor) -> Pairs:
        tokens, choices = index_TK.shape
        if tokens == 1:  # the choices of one token are distinct: nothing to sort
            return Pairs(index_TK.tolist()[0], *_single_token_rows(choices))
        flat, order = index_TK.reshape(-1).sort(stable=True)
        experts, counts = flat.unique_consecutive(return_counts=True)
        row_start = torch.zeros(len(counts) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=row_start[1:])
        out_row = order.to(torch.int32)
        return Pairs(experts.tolist(), row_start, out_row.div(choices, rounding_mode="floor"), out_row)

    def rows(self, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """row_start, token_of_row, out_row of the experts at `positions` alone."""
        bounds = self.row_start.tolist()
        spans = [(bounds[p], bounds[p + 1]) for p in positions]
        lengths = [last - first for first, last in spans]
        start = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        first, last = spans[0][0], spans[-1][1]
        if last - first == sum(lengths) and list(positions) == sorted(positions):  # neighbours: no copy
            return start, self.token_of_row[first:last], self.out_row[first:last]
        token = torch.cat([self.token_of_row[first:last] for first, last in spans])
        out = torch.cat([self.out_row[first:last] for first, last in spans])
        return start, token, out


@lru_cache
def _single_token_rows(choices: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(choices + 1, dtype=torch.int32)
    return rows, torch.zeros(choices, dtype=torch.int32), rows[:choices]


def _latest_first(index_TK: Tensor) -> list[int]:
    """The experts of the step by their last use, most recent first."""
    return list(dict.fromkeys(index_TK.flip(0).flatten().tolist()))


def _strongest_first(index_TK: Tensor) -> list[int]:
    """The experts of some tokens, every token's first choice before any second one."""
    return list(dict.fromkeys(index_TK.T.flatten().tolist()))


def _combined(out_PD: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
    """The weighted sum of each token's experts [T, D], added to the residual where there is one."""
    out_TD = torch.empty_like(hidden_TD)
    kernels.combine(out_PD, weights_TK.to(torch.float32).contiguous(), out_TD)
    return out_TD if residual_TD is None else residual_TD + out_TD


class StreamedExperts:
    """The routed experts of one MoE layer: hidden [T, D], route [T, K] -> [T, D]."""

    def __init__(
        self,
        *,
        layer: int,
        pool: int,
        pool_experts: int,
        kernel: kernels.Experts,
        residency: Residency,
        path: Path,
        step: StepContext,
        scratch: Scratch,
        prefetch: int = 0,
        recorder: Any = None,
    ) -> None:
        self.layer, self.pool, self.pool_experts = layer, pool, pool_experts
        self.kernel, self.residency, self.path = kernel, residency, path
        self.step, self.scratch, self.prefetch, self.recorder = step, scratch, prefetch, recorder
        self.uses = LayerUses(layer, pool_experts)
        self.next: StreamedExperts | None = None
        self.router: nn.Module | None = None  # this layer's own gate, used by the previous layer to look ahead
        self.index = 0  # among the MoE layers
        self.rule: RoutingRule | None = None  # may change the gate's routes
        self.foresees = False  # the rule may know this layer's next step
        self.waits = False  # that is to be read as soon as it is known and there is room
        self.logits: Tensor | None = None  # [T, E] of the gate, left by what stands around it if the rule wants them

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._forward(hidden_TD, index_TK, weights_TK, None)

    def add_to(self, residual_TD: Tensor, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """residual + forward(...), in one native call where a single token finds all its experts in memory."""
        return self._forward(hidden_TD, index_TK, weights_TK, residual_TD)

    def _forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None) -> Tensor:
        self.step.check_wanted()
        hidden_TD = hidden_TD.contiguous()
        if self.step.passing:
            self.logits = None
            return self._pass_by(hidden_TD, index_TK, weights_TK, residual_TD)
        if self.rule is not None:
            logits_TE, self.logits = self.logits, None
            self.waits = self.foresees
            index_TK, weights_TK = self.rule.route(
                self.index, self.step.rows, hidden_TD, logits_TE, index_TK, weights_TK
            )
            weights_TK = weights_TK.to(torch.float32).contiguous()  # as the native call for one token wants them
        pairs = Pairs.of(index_TK)
        if len(index_TK) == 1:
            self.uses.single(pairs.experts)
        else:
            self.uses.step(index_TK)
        tally = self.residency.tally
        hits, misses, stall_ns = tally.hits, tally.misses, tally.stall_ns
        out_TD = self._run(pairs, hidden_TD, index_TK, weights_TK, residual_TD)
        if self.recorder is not None:
            hits, misses, wait_ns = tally.hits - hits, tally.misses - misses, tally.stall_ns - stall_ns
            self.recorder.layer(self.step.index, self.pool, self.layer, index_TK, weights_TK, hits, misses, wait_ns)
        return out_TD

    def _pass_by(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None) -> Tensor:
        """The gate's own route without a trace: nothing is counted, no rule is asked, nothing stays in memory."""
        pairs = Pairs.of(index_TK)
        out_PD = self.scratch.take(index_TK.numel(), hidden_TD.shape[1])
        for positions, addresses in self.residency.peek_groups(self.pool, pairs.experts, group=STREAM_GROUP):
            self._compute(pairs, positions, addresses, hidden_TD, out_PD)
        return _combined(out_PD, weights_TK, hidden_TD, residual_TD)

    def _run(
        self, pairs: Pairs, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None
    ) -> Tensor:
        if self._streams(len(pairs.experts)):
            out_PD = self.scratch.take(index_TK.numel(), hidden_TD.shape[1])
            self._whole_layer(pairs, index_TK, hidden_TD, out_PD)
            return _combined(out_PD, weights_TK, hidden_TD, residual_TD)
        with self.residency.acquire(self.pool, pairs.experts) as lease:
            if self.step.phase == "decode":
                self._read_ahead(hidden_TD)
            if self.foresees:
                self.stage_coming()
            if residual_TD is not None and lease.all_present and len(index_TK) == 1:
                return self.kernel.forward_token(lease.addresses, hidden_TD, weights_TK, residual_TD)
            out_PD = self.scratch.take(index_TK.numel(), hidden_TD.shape[1])
            for positions, addresses in lease.arrivals():
                self._compute(pairs, positions, addresses, hidden_TD, out_PD)
        return _combined(out_PD, weights_TK, hidden_TD, residual_TD)

    def _streams(self, needed: int) -> bool:
        if self.path == "auto":
            return needed > self.residency.slots(self.pool)
        return self.path == "whole_layer"

    def _read_ahead(self, hidden_TD: Tensor) -> None:
        """Submitted behind this layer's demand reads: the device works on while the last of them is computed."""
        following, guesses = self.next, self.prefetch and self.path in ("auto", "hot")
        if guesses and self._may_read():
            self.residency.cancel_prefetches(self.pool)  # what was guessed, has not started, and is not wanted
        if following is None:
            return
        if self.path == "staged":
            self.residency.stage(following.pool, following.look_ahead(hidden_TD))
        elif guesses and following._may_read():
            likely = following.look_ahead(hidden_TD)
            if likely:
                self.residency.prefetch(following.pool, likely, limit=self.prefetch)

    def _may_read(self) -> bool:
        """Whether this step may need experts of this layer that are not in memory."""
        if self.residency.complete(self.pool):
            return False
        return self.rule is None or not self.rule.holds(self.index, self.step.rows)

    def stage_coming(self) -> None:
        """Read what the rule knows of this layer's next step, behind all demand. `self.waits` stays where it knows
        nothing yet, or not all of it found a place: those of this step may have to go first."""
        assert self.rule is not None
        experts = self.rule.coming(self.index)
        if experts:
            self.waits = self.stage(experts)

    def stage(self, experts: list[int]) -> bool:
        """Read experts that this layer will need, behind all demand; whether some of them found no place."""
        if self.path in ("exact", "whole_layer"):
            return False
        if self.path == "staged":
            self.residency.stage(self.pool, experts)
        elif not self.residency.complete(self.pool):
            self.residency.prefetch(self.pool, experts)
            return bool(self.residency.absent(self.pool, experts))
        return False

    def _whole_layer(self, pairs: Pairs, index_TK: Tensor, hidden_TD: Tensor, out_PD: Tensor) -> None:
        """More experts than slots. What running answers ask for shapes the decode set; a step of prompts alone only
        fills slots that are free, with the experts that decode will probably want: those used last."""
        answers = self.step.decode_tokens
        groups = self.residency.stream_groups(
            self.pool,
            pairs.experts,
            group=STREAM_GROUP,
            read_ahead=self._ahead(hidden_TD),
            keep=() if answers else _latest_first(index_TK),
            demand=_strongest_first(index_TK[:answers]) if answers else (),
        )
        for positions, addresses in groups:
            self._compute(pairs, positions, addresses, hidden_TD, out_PD)

    def _ahead(self, hidden_TD: Tensor) -> tuple[int, list[int]] | None:
        """What to read behind this layer's experts for the next one: all guesses for a prompt, which needs most experts
        anyway, or where nothing stays between steps; for answers alone only as many of the likelier ones as
        bridge the time between two layers' reads."""
        following = self.next
        if following is None:
            return None
        if self.step.phase == "prefill" or self.path == "whole_layer":
            return following.pool, following.look_ahead(hidden_TD)
        if not self.prefetch:
            return None
        likely = following.look_ahead(hidden_TD)
        limit = WIDE_AHEAD * self.prefetch + self.prefetch * len(hidden_TD) // WIDE_AHEAD_TOKENS
        return following.pool, self.residency.absent(following.pool, likely)[:limit]

    def _compute(
        self, pairs: Pairs, positions: Sequence[int], addresses: Sequence[int], hidden_TD: Tensor, out_PD: Tensor
    ) -> None:
        slots = torch.tensor(addresses, dtype=torch.int64)
        if list(positions) == list(range(len(pairs.experts))):
            row_start, token, out = pairs.row_start, pairs.token_of_row, pairs.out_row
        else:
            row_start, token, out = pairs.rows(positions)
        self.kernel.forward(slots, row_start, token, out, hidden_TD, out_PD)

    def look_ahead(self, hidden_TD: Tensor) -> list[int]:
        """The experts this layer would choose for the previous layer's hidden state: a guess, only to read ahead.

        Most likely first: what most tokens agree on, then by rank.
        """
        if self.rule is not None:
            known = self.rule.look_ahead(self.index, self.step.rows, len(hidden_TD))
            if known is not None:
                return known
        if self.router is None:
            return []
        index_TK = self.router(hidden_TD)[-1]
        return [expert for expert, _ in Counter(index_TK.T.flatten().tolist()).most_common()]


def _experts_function(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    streamed: StreamedExperts = module.streamed
    return streamed.forward(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _experts_function)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "silu": lambda gate, up, alpha, limit: F.silu(gate) * up,
    "gelu": lambda gate, up, alpha, limit: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up, alpha, limit: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up, alpha, limit: F.relu(gate) * up,
    "swiglu_oai": lambda gate, up, alpha, limit: (
        gate.clamp(max=limit) * torch.sigmoid(alpha * gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)
    ),
}


def activation_of(module: Any, path: str) -> tuple[str, float, float]:
    """(name, alpha, limit) of the native activation that computes the same as the module's own gating.

    Found by computing both on the same values, so a class with its own gating is either matched or refused.
    """
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        raise CheckpointError(
            "experts of this form are not supported",
            where=f"{path} ({type(module).__name__})",
            expected="gated experts without a norm of their own: down(act(gate(x)) * up(x))",
        )
    alpha, limit = float(getattr(module, "alpha", 1.702)), float(getattr(module, "limit", 7.0))
    gate, up = torch.linspace(-9, 9, 64).repeat(2, 1), torch.linspace(8, -8, 64).repeat(2, 1)
    joined = torch.cat([gate, up], -1) if module.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    wanted = module._apply_gate(joined)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(function(gate, up, alpha, limit), wanted, atol=1e-5, rtol=1e-5):
            return name, alpha, limit
    raise CheckpointError(
        "the experts' activation is not supported",
        where=f"{path} ({type(module).__name__})",
        expected=", ".join(ACTIVATIONS),
        got=getattr(getattr(module, "config", None), "hidden_act", "unknown"),
    )
