"""One layer's routed experts as one differentiable operation: gradient to the input and to the routing weights.

The experts are frozen, so that nothing of them need stay between forward and backward: a bank gives their weights in
both passes, from memory or by reading the store again. Chooses no experts: a route function may replace the gate's.

T tokens, K chosen, P = T * K pairs, D width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stoker.native import kernels
from stoker.runtime.experts import ACTIVATIONS, Pairs
from stoker.store.reader import Pool
from stoker.train.frozen import dequantised
from stoker.train.records import Records, matrices_of

# route(index of the MoE layer, hidden [T, D], the gate's logits [T, E], experts [T, K], weights [T, K]) -> route
Route = Callable[[int, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Expert(NamedTuple):
    """Float32 weights gate and up [F, D], down [D, F]; biases [F], [F], [D] or None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class Gating:
    """act(gate) * up, by the name that `runtime.experts.activation_of` found."""

    name: str
    alpha: float
    limit: float

    def __call__(self, gate_PF: Tensor, up_PF: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](gate_PF, up_PF, self.alpha, self.limit)


class Bank(Protocol):
    """Where the experts of one pool come from."""

    def forward(self, pairs: Pairs, hidden_TD: Tensor, gating: Gating) -> Tensor:
        """Each pair's expert on its token: [P, D], row token * K + choice."""

    def experts(self, which: Sequence[int]) -> Iterator[Expert]:
        """Their weights one after the other; each is valid until the next is asked for."""


class MemoryBank:
    """All experts of a pool, dequantised once: for models that fit the budget so."""

    def __init__(self, pool: Pool, records: Records) -> None:
        everything = records.stream(pool.id, range(pool.experts))
        self._experts = [_dequantise(record, pool) for _, record in everything]

    def experts(self, which: Sequence[int]) -> Iterator[Expert]:
        return (self._experts[expert] for expert in which)

    def forward(self, pairs: Pairs, hidden_TD: Tensor, gating: Gating) -> Tensor:
        bounds = pairs.row_start.tolist()
        input_PD = hidden_TD.index_select(0, pairs.token_of_row)
        output_PD = torch.empty_like(input_PD)
        for at, expert in enumerate(self.experts(pairs.experts)):
            rows = slice(bounds[at], bounds[at + 1])
            inner_PF = gating(*_gate_up(expert, input_PD[rows]))
            _linear(inner_PF, expert.down, expert.down_bias, out=output_PD[rows])
        return torch.empty_like(output_PD).index_copy_(0, pairs.out_row.long(), output_PD)


class StreamBank:
    """Experts read from the store in every pass; the forward pass computes on the records by the serving kernels."""

    def __init__(self, pool: Pool, records: Records) -> None:
        self._pool, self._records = pool, records
        self._kernel: kernels.Experts | None = None

    def experts(self, which: Sequence[int]) -> Iterator[Expert]:
        return (_dequantise(record, self._pool) for _, record in self._records.stream(self._pool.id, which))

    def forward(self, pairs: Pairs, hidden_TD: Tensor, gating: Gating) -> Tensor:
        if self._kernel is None:
            self._kernel = kernels.Experts(
                self._pool.layout, gating.name, alpha=gating.alpha, limit=gating.limit, activation_bits=16
            )
        output_PD = hidden_TD.new_empty(len(pairs.out_row), hidden_TD.shape[1])
        for at, (_, record) in enumerate(self._records.stream(self._pool.id, pairs.experts)):
            address = torch.tensor([record.data_ptr()])
            self._kernel.forward(address, *pairs.rows([at]), hidden_TD, output_PD)
        return output_PD


class LayerExperts:
    """What transformers' experts module of one layer calls: hidden [T, D], route [T, K] -> [T, D].

    index: of the layer among the MoE layers. gate_logits [.., E] are left here by a hook on the gate.
    """

    def __init__(self, index: int, bank: Bank, gating: Gating, passes: Passes) -> None:
        self.index, self.bank, self.gating, self.passes = index, bank, gating, passes
        self.gate_logits: Tensor | None = None

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        logits, self.gate_logits = self.gate_logits, None
        if self.passes.route is not None:
            assert logits is not None, "a layer's gate runs before its experts"
            logits_TE = logits.reshape(len(hidden_TD), -1)
            index_TK, weights_TK = self.passes.route(self.index, hidden_TD, logits_TE, index_TK, weights_TK)
        return _Experts.apply(hidden_TD, weights_TK, index_TK, self)

    def compute(self, hidden_TD: Tensor, weights_TK: Tensor, index_TK: Tensor) -> Tensor:
        output_PD = self.bank.forward(Pairs.of(index_TK), hidden_TD.contiguous(), self.gating)
        return torch.einsum("tkd,tk->td", output_PD.view(*index_TK.shape, -1), weights_TK)

    def differentiate(
        self, hidden_TD: Tensor, weights_TK: Tensor, index_TK: Tensor, grad_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients to the input and to the routing weights. One expert's weights are in memory at a time."""
        pairs = Pairs.of(index_TK)
        bounds, token_P, pair_P = pairs.row_start.tolist(), pairs.token_of_row.long(), pairs.out_row.long()
        grad_PD = hidden_TD.new_empty(len(pair_P), hidden_TD.shape[1])
        grad_weights_P = weights_TK.new_empty(len(pair_P))
        flat_weights_P = weights_TK.reshape(-1)
        for at, expert in enumerate(self.bank.experts(pairs.experts)):
            rows = slice(bounds[at], bounds[at + 1])
            tokens, places = token_P[rows], pair_P[rows]
            grad_input_PD, grad_weights = self._one(expert, hidden_TD[tokens], flat_weights_P[places], grad_TD[tokens])
            grad_PD.index_copy_(0, places, grad_input_PD)
            grad_weights_P.index_copy_(0, places, grad_weights)
        return grad_PD.view(*index_TK.shape, -1).sum(1), grad_weights_P.view_as(weights_TK)

    def _one(self, expert: Expert, input_PD: Tensor, weights_P: Tensor, grad_PD: Tensor) -> tuple[Tensor, Tensor]:
        gate_PF, up_PF = (part.requires_grad_() for part in _gate_up(expert, input_PD))
        with torch.enable_grad():
            inner_PF = self.gating(gate_PF, up_PF)
        grad_inner_PF = grad_PD @ expert.down
        grad_weights_P = (grad_inner_PF * inner_PF.detach()).sum(-1)
        if expert.down_bias is not None:
            grad_weights_P += grad_PD @ expert.down_bias
        grad_inner_PF *= weights_P[:, None]
        grad_gate_PF, grad_up_PF = torch.autograd.grad(inner_PF, (gate_PF, up_PF), grad_inner_PF)
        return (grad_gate_PF @ expert.gate).addmm_(grad_up_PF, expert.up), grad_weights_P


@dataclass
class Passes:
    """What the layers of one model share while it computes.

    route: stands in the place of the gates'. recomputing: a layer is being computed a second time, for its backward
    pass alone (see `model.checkpoint_layers`).
    """

    route: Route | None = None
    recomputing: bool = False


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weights_TK: Tensor, index_TK: Tensor, layer: LayerExperts) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(hidden_TD, weights_TK, index_TK)
        if layer.passes.recomputing:
            # Only sums follow the experts, so no gradient needs their result: the records are not read for it. Should
            # a model multiply it with something, the gradient is not a number and the step refuses it.
            return torch.full_like(hidden_TD, torch.nan)
        return layer.compute(hidden_TD, weights_TK, index_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_TD, weights_TK, index_TK = ctx.saved_tensors
        grad_hidden_TD, grad_weights_TK = ctx.layer.differentiate(
            hidden_TD, weights_TK, index_TK, grads[0].contiguous()
        )
        return grad_hidden_TD, grad_weights_TK, None, None


def _dequantise(record: Tensor, pool: Pool) -> Expert:
    gate, up, down = matrices_of(record, pool.layout)
    biases = (None if m.row_bias is None else m.row_bias.clone() for m in (gate, up, down))
    return Expert(dequantised(gate), dequantised(up), dequantised(down), *biases)


def _gate_up(expert: Expert, input_PD: Tensor) -> tuple[Tensor, Tensor]:
    return _linear(input_PD, expert.gate, expert.gate_bias), _linear(input_PD, expert.up, expert.up_bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
