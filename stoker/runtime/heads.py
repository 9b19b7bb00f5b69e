"""A prerouter's heads in the native kernels: the matrices in bf16, the one-hot parts as rows of a table.

Same formulas as `adapter/heads.py`, which is the reference. A row's result is the same function of that row, bit for
bit, whatever else is in the call: products are the kernels', sums over experts run in one order, gelu is computed
value by value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.adapter.heads import Head
from stoker.native import kernels
from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.quant.reference import quantize
from stoker.routing.select import one_by_one


class NativeHeads:
    """`routing.prerouter.Bank` of an adapter's heads."""

    def __init__(self, heads: Mapping[int, Head]) -> None:
        self._heads = {owner: _NativeHead(heads[owner]) for owner in sorted(heads)}
        self.owners = tuple(self._heads)

    def logits(self, owner: int, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor) -> Tensor:
        return self._heads[owner].logits(hidden_TD, used_TK, before_TK)


def heads_bytes(heads: Mapping[int, Head]) -> int:
    """What they hold in memory, for the ledger."""
    return sum(
        tensor.numel() * (2 if _is_bf16(tensor) else 4)
        for head in heads.values()
        for tensor in (head.fc1, head.fc2, head.linear_init)
    )


class _NativeHead:
    """W = [fc1 ; linear_init] on the hidden state as one matrix [H + E, D]; their one-hot columns as a table of rows
    [2E + 1, H + E], the last of zeros for "no predecessor"."""

    def __init__(self, head: Head) -> None:
        width, self.experts, self.hidden = head.width, head.experts, head.hidden
        joined = torch.cat([head.fc1, head.linear_init])
        self._dense = _matrix(joined[:, :width])
        self._out = _matrix(head.fc2)
        table = joined[:, width:].T.contiguous()
        self._table = torch.cat([table, torch.zeros_like(table[:1])])

    def logits(self, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor) -> Tensor:
        both_TC = kernels.matmul(self._dense, hidden_TD.contiguous())
        rows_TR = torch.cat([used_TK, torch.where(before_TK < 0, self.experts, before_TK) + self.experts], 1)
        picked_TRC = self._table[rows_TR].float()
        both_TC += picked_TRC.cumsum(1)[:, -1]  # cumsum adds in one order whatever T is; sum does not
        inner_TH = F.gelu(one_by_one(both_TC[:, : self.hidden])).contiguous()
        return kernels.matmul(self._out, inner_TH) + both_TC[:, self.hidden :]


def _is_bf16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 or torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)


def _matrix(weight: Tensor) -> kernels.Matrix:
    """bf16 where the weights are bf16 values, else f32; inputs are not rounded."""
    spec = MatrixSpec(weight.shape[0], weight.shape[1], WeightFormat("bf16" if _is_bf16(weight) else "f32"))
    return kernels.Matrix(spec, *quantize(weight.float().contiguous(), spec.format), activation_bits=16)
