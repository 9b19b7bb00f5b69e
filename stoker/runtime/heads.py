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
from stoker.native import attention, kernels
from stoker.routing.select import LayerRule, one_by_one, select
from stoker.runtime.linear import is_bf16, plain_matrix


class NativeHeads:
    """`routing.prerouter.Bank` of an adapter's heads."""

    def __init__(self, heads: Mapping[int, Head]) -> None:
        self._heads = {owner: _NativeHead(heads[owner]) for owner in sorted(heads)}
        self.owners = tuple(self._heads)

    def logits(self, owner: int, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor) -> Tensor:
        return self._heads[owner].logits(hidden_TD, used_TK, before_TK)

    def choose(self, logits_TE: Tensor, rule: LayerRule, top_k: int) -> tuple[Tensor, Tensor]:
        """By one native call where the rule is plain softmax."""
        if rule.score == "softmax" and rule.correction is None and rule.groups == 1 and rule.scaling == 1.0:
            weights_TK, index_TK = attention.topk_softmax(logits_TE, top_k, rule.renormalise)
            return index_TK, weights_TK
        return select(logits_TE, rule, top_k)


def heads_bytes(heads: Mapping[int, Head]) -> int:
    """What they hold in memory, for the ledger."""
    return sum(
        tensor.numel() * (2 if is_bf16(tensor) else 4)
        for head in heads.values()
        for tensor in (head.fc1, head.fc2, head.linear_init)
    )


class _NativeHead:
    """W = [fc1 ; linear_init] on the hidden state as one matrix [H + E, D]; their one-hot columns as a table of rows
    [2E + 1, H + E], the last of zeros for "no predecessor"."""

    def __init__(self, head: Head) -> None:
        width, self.experts, self.hidden = head.width, head.experts, head.hidden
        joined = torch.cat([head.fc1, head.linear_init])
        self._dense = plain_matrix(joined[:, :width].contiguous())
        self._out = plain_matrix(head.fc2)
        table = joined[:, width:].T.contiguous()
        self._table = torch.cat([table, torch.zeros_like(table[:1])])

    def logits(self, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor) -> Tensor:
        both_TC = kernels.matmul(self._dense, hidden_TD.contiguous())
        rows_TR = torch.cat([used_TK, torch.where(before_TK < 0, self.experts, before_TK) + self.experts], 1)
        picked_TRC = self._table[rows_TR].float()
        both_TC += picked_TRC.cumsum(1)[:, -1]  # cumsum adds in one order whatever T is; sum does not
        inner_TH = F.gelu(one_by_one(both_TC[:, : self.hidden])).contiguous()
        return kernels.matmul(self._out, inner_TH) + both_TC[:, self.hidden :]
