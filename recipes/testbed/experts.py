"""A grouped experts function for training on CPUs, registered with transformers under EXPERTS_FUNCTION.

Pairs (token, chosen expert) are sorted by expert; each expert's rows are filled up to a multiple of ROW_STEP with zero
rows, because matrix products of ever new heights are compiled ever anew; then three products an expert. Computes in the
dtype of autocast, or in that of the weights. Data-dependent parts are opaque to torch.compile, the rest it may fuse.

N tokens, K chosen, E experts, R rows: enough for all N * K pairs and the filling.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_FUNCTION = "testbed_grouped"
ROW_STEP = 32


def grouped_experts(module: nn.Module, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The contract of transformers' registry: [N, D] in, [N, D] out in the dtype of `hidden_ND`. SiLU-gated experts."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else module.down_proj.dtype
    pair_R, row_NK, ends_E = _order(experts_NK, module.num_experts)
    chosen = experts_NK.shape[1]
    input_RD = _spread(hidden_ND.to(dtype), pair_R // chosen, row_NK)
    weights_R1 = _spread(weights_NK.float().reshape(-1, 1), pair_R, row_NK.reshape(-1, 1))
    gate_RF, up_RF = _product(input_RD, module.gate_up_proj.to(dtype), ends_E).chunk(2, -1)
    weighted_RF = (F.silu(gate_RF.float()) * up_RF.float() * weights_R1).to(dtype)
    output_RD = _product(weighted_RF, module.down_proj.to(dtype), ends_E)
    return _collect(output_RD, pair_R // chosen, row_NK).to(hidden_ND.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, grouped_experts)


def _rows(pairs: int, n_experts: int) -> int:
    return -(-(pairs + n_experts * (ROW_STEP - 1)) // ROW_STEP) * ROW_STEP


@torch.library.custom_op("testbed::order", mutates_args=())
def _order(experts_NK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pair of each row [R] (N * K for filling), row of each pair [N, K], end of each expert's rows [E]."""
    flat_P = experts_NK.reshape(-1)
    order_P = flat_P.argsort(stable=True)
    count_E = torch.bincount(flat_P, minlength=n_experts)
    ends_E = ((count_E + ROW_STEP - 1) // ROW_STEP * ROW_STEP).cumsum(0)
    shift_E = ends_E.roll(1).index_fill(0, torch.zeros(1, dtype=torch.long), 0) - (count_E.cumsum(0) - count_E)
    row_P = torch.arange(len(flat_P)) + shift_E[flat_P[order_P]]
    pair_R = torch.full((_rows(len(flat_P), n_experts),), len(flat_P))
    pair_R[row_P] = order_P
    row_NK = torch.empty_like(flat_P)
    row_NK[order_P] = row_P
    return pair_R, row_NK.view_as(experts_NK), ends_E


@_order.register_fake
def _(experts_NK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(experts_NK.numel(), n_experts)
    return experts_NK.new_empty(rows), torch.empty_like(experts_NK), experts_NK.new_empty(n_experts)


@torch.library.custom_op("testbed::spread", mutates_args=())
def _spread(values_ND: Tensor, source_R: Tensor, row_NK: Tensor) -> Tensor:
    """values[source], zeros where the source lies past the end: [R, D]."""
    padded = torch.cat((values_ND, values_ND.new_zeros(1, values_ND.shape[1])))
    return padded.index_select(0, source_R)


@_spread.register_fake
def _(values_ND: Tensor, source_R: Tensor, row_NK: Tensor) -> Tensor:
    return values_ND.new_empty(len(source_R), values_ND.shape[1])


@torch.library.custom_op("testbed::collect", mutates_args=())
def _collect(values_RD: Tensor, source_R: Tensor, row_NK: Tensor) -> Tensor:
    """The sum over each token's rows, in the order of its choices: [N, D]. Each is the gradient of the other."""
    return F.embedding_bag(row_NK, values_RD, mode="sum")  # 25 times faster than indexing and summing


@_collect.register_fake
def _(values_RD: Tensor, source_R: Tensor, row_NK: Tensor) -> Tensor:
    return values_RD.new_empty(len(row_NK), values_RD.shape[1])


def _keep_rows(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[1], inputs[2])


_spread.register_autograd(
    lambda ctx, grad_RD: (_collect(grad_RD, *ctx.saved_tensors), None, None), setup_context=_keep_rows
)
_collect.register_autograd(
    lambda ctx, grad_ND: (_spread(grad_ND.contiguous(), *ctx.saved_tensors), None, None), setup_context=_keep_rows
)


@torch.library.custom_op("testbed::product", mutates_args=())
def _product(input_RD: Tensor, weights_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of expert e times its [O, D]: [R, O]. Rows past the last end stay zero."""
    output_RO = input_RD.new_zeros(len(input_RD), weights_EOD.shape[1])
    for expert, low, high in _spans(ends_E):
        torch.mm(input_RD[low:high], weights_EOD[expert].t(), out=output_RO[low:high])
    return output_RO


@_product.register_fake
def _(input_RD: Tensor, weights_EOD: Tensor, ends_E: Tensor) -> Tensor:
    return input_RD.new_empty(len(input_RD), weights_EOD.shape[1])


@torch.library.custom_op("testbed::product_backward", mutates_args=())
def _product_backward(grad_RO: Tensor, input_RD: Tensor, weights_EOD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    grad_input_RD, grad_weights_EOD = torch.zeros_like(input_RD), torch.zeros_like(weights_EOD)
    for expert, low, high in _spans(ends_E):
        torch.mm(grad_RO[low:high], weights_EOD[expert], out=grad_input_RD[low:high])
        torch.mm(grad_RO[low:high].t(), input_RD[low:high], out=grad_weights_EOD[expert])
    return grad_input_RD, grad_weights_EOD


@_product_backward.register_fake
def _(grad_RO: Tensor, input_RD: Tensor, weights_EOD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input_RD), torch.empty_like(weights_EOD)


def _spans(ends_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first, end) of the rows of each expert that has any."""
    ends = ends_E.tolist()
    return [(expert, low, high) for expert, (low, high) in enumerate(zip([0, *ends], ends, strict=False)) if high > low]


def _keep_product(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


_product.register_autograd(
    lambda ctx, grad_RO: (*_product_backward(grad_RO.contiguous(), *ctx.saved_tensors), None),
    setup_context=_keep_product,
)
