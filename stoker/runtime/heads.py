"""A prerouter's heads in the native kernels: each is one call, and all their weights lie in one arena.

Same formulas as `adapter/heads.py`, which is the reference. Decides formats and places; the arithmetic is native.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.adapter.heads import Head
from stoker.native.io import Arena
from stoker.native.kernels import Matrix
from stoker.native.prerouter import PrerouterHead
from stoker.quant.formats import PART_ALIGNMENT, MatrixSpec, WeightFormat, align
from stoker.quant.reference import quantize
from stoker.routing.select import LayerRule, select
from stoker.runtime.linear import is_bf16

_PAGE = 4096


class NativeHeads:
    """`routing.prerouter.Bank` of an adapter's heads."""

    def __init__(self, heads: Mapping[int, Head]) -> None:
        arena, start = Arena(max(heads_bytes(heads), _PAGE)), 0  # huge pages: weights are read once a token
        self._heads: dict[int, PrerouterHead] = {}
        for owner, head in sorted(heads.items()):
            form = _Form.of(head)
            self._heads[owner] = form.place(head, arena.tensor(start, form.nbytes))
            start += form.nbytes
        self.owners = tuple(self._heads)
        self.next_scale = next((head.next_scale for head in heads.values()), 0.0)

    @property
    def sees_next(self) -> bool:
        return self.next_scale != 0.0

    def logits(
        self, owner: int, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor, ahead_TD: Tensor | None = None
    ) -> Tensor:
        seen_TX = self._seen(hidden_TD, ahead_TD)
        return self._heads[owner].logits(seen_TX, used_TK.contiguous(), before_TK.contiguous())

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
        """In the same native call where the rule is plain softmax."""
        if not rule.plain:
            return select(self.logits(owner, hidden_TD, used_TK, before_TK, ahead_TD), rule, top_k)
        seen_TX = self._seen(hidden_TD, ahead_TD)
        return self._heads[owner].route(seen_TX, used_TK.contiguous(), before_TK.contiguous(), top_k, rule.renormalise)

    def _seen(self, hidden_TD: Tensor, ahead_TD: Tensor | None) -> Tensor:
        if not self.sees_next:
            return hidden_TD.contiguous()
        assert ahead_TD is not None, "these heads see the next token"
        return torch.cat([hidden_TD, ahead_TD * self.next_scale], 1)


def heads_bytes(heads: Mapping[int, Head]) -> int:
    """What they hold in memory, for the ledger."""
    return align(sum(_Form.of(head).nbytes for head in heads.values()), _PAGE)


@dataclass(frozen=True)
class _Form:
    """How a head is kept: [fc1 ; linear_init] on the hidden state (and the next token) as one matrix [H + E, D or 2D],
    fc2 [E, H], and their one-hot columns as the rows of a table [2E, H + E]. bf16 where the weights are bf16 values,
    else f32."""

    dense: MatrixSpec
    out: MatrixSpec
    table_dtype: torch.dtype

    @classmethod
    def of(cls, head: Head) -> _Form:
        short = is_bf16(head.fc1) and is_bf16(head.linear_init)
        dense = MatrixSpec(head.hidden + head.experts, head.dense, WeightFormat("bf16" if short else "f32"))
        out = MatrixSpec(head.experts, head.hidden, WeightFormat("bf16" if is_bf16(head.fc2) else "f32"))
        return cls(dense, out, torch.bfloat16 if short else torch.float32)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of dense, out and table."""
        table = 2 * self.out.rows * self.dense.rows * self.table_dtype.itemsize
        return self.dense.codes_bytes, self.out.codes_bytes, table

    @property
    def nbytes(self) -> int:
        return sum(align(size, PART_ALIGNMENT) for size in self.sizes)

    def place(self, head: Head, memory: Tensor) -> PrerouterHead:
        """The head with its weights in `memory`, uint8 [nbytes]."""
        dense, out, table = memory.split([align(size, PART_ALIGNMENT) for size in self.sizes])
        joined = torch.cat([head.fc1, head.linear_init])
        table_RC = table[: self.sizes[2]].view(self.table_dtype).view(2 * head.experts, -1)
        table_RC.copy_(joined[:, head.dense :].T)
        return PrerouterHead(
            _matrix(self.dense, joined[:, : head.dense], dense), _matrix(self.out, head.fc2, out), table_RC
        )


def _matrix(spec: MatrixSpec, weight: Tensor, memory: Tensor) -> Matrix:
    """`weight` in `memory`, as a matrix that rounds no activations."""
    codes = memory[: spec.codes_bytes]
    codes.copy_(quantize(weight.to(torch.float32), spec.format).codes.view(torch.uint8).flatten())
    return Matrix(spec, codes, None, None, activation_bits=16)
