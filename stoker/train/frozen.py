"""Frozen matrices with a gradient to their input: what stands where the base model's linears stood while training.

Two forms of the same function: dequantised once and kept, or left quantised, where the forward pass uses the serving
kernels and the backward pass dequantises a block of rows at a time. Knows no store and no experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.native.kernels import Matrix, gather_rows, matmul

BLOCK_ELEMENTS = 16 << 20  # of a dequantised block: 64 MiB


def dequantised(matrix: Matrix, first: int = 0, last: int | None = None) -> Tensor:
    """Rows [first, last) of the matrix as float32."""
    return gather_rows(matrix, torch.arange(first, matrix.rows if last is None else last))


class _QuantProduct(torch.autograd.Function):
    """x [T, C] float32 -> [T, R]; the gradient goes to x alone."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, matrix: Matrix) -> Tensor:
        ctx.matrix = matrix
        return matmul(matrix, x_TC.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_TR,), matrix = grads, ctx.matrix
        rows = max(1, BLOCK_ELEMENTS // matrix.cols)
        grad_TC = grad_TR.new_zeros(len(grad_TR), matrix.cols)
        for first in range(0, matrix.rows, rows):
            last = min(first + rows, matrix.rows)
            grad_TC.addmm_(grad_TR[:, first:last], dequantised(matrix, first, last))
        return grad_TC, None


class FrozenLinear(nn.Module):
    """y = W x + b for a frozen W [out, in]: x float32 [..., in] -> [..., out]. keep: hold W as float32."""

    def __init__(self, matrix: Matrix, keep: bool) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.cols, matrix.rows
        self.weight_RC = dequantised(matrix) if keep else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight_RC is not None:
            return F.linear(x, self.weight_RC, self.matrix.row_bias)
        flat_TC = x.reshape(-1, self.in_features)
        return _QuantProduct.apply(flat_TC, self.matrix).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kept = "kept as float32" if self.weight_RC is not None else self.matrix.spec.format.label()
        return f"in={self.in_features}, out={self.out_features}, {kept}"
