"""Modules that stand where nn.Linear and nn.Embedding stood, computing on quantised matrices.

They own the Matrix (and so keep its bytes alive) and know nothing of where the bytes came from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.native.kernels import Matrix, gather_rows, matmul
from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.quant.reference import quantize


def plain_matrix(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """A matrix that rounds nothing: bf16 where its weights are bf16 values (half the bytes to read), else f32."""
    spec = plain_spec(weight)
    parts = quantize(weight.to(torch.float32), spec.format)
    return Matrix(spec, *parts, row_bias=bias, activation_bits=16)


def plain_spec(weight: Tensor) -> MatrixSpec:
    """Of its plain_matrix."""
    return MatrixSpec(weight.shape[0], weight.shape[1], WeightFormat("bf16" if is_bf16(weight) else "f32"))


def is_bf16(weight: Tensor) -> bool:
    """Whether every value is one of bfloat16's."""
    return weight.dtype == torch.bfloat16 or torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)


class QuantLinear(nn.Module):
    """y = W x + b for a quantised W [out, in]; x float32 [..., in] -> float32 [..., out]."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.cols, matrix.rows

    def forward(self, x: Tensor) -> Tensor:
        flat_TC = x.reshape(-1, self.in_features)
        if not flat_TC.is_contiguous():
            flat_TC = flat_TC.contiguous()
        return matmul(self.matrix, flat_TC).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, {self.matrix.spec.format.label()}"


class QuantEmbedding(nn.Module):
    """Rows of a quantised table [V, D]: ids int64 [...] -> float32 [..., D]."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.rows, matrix.cols

    def forward(self, ids: Tensor) -> Tensor:
        flat_T = ids.reshape(-1).to(torch.int64).contiguous()
        return gather_rows(self.matrix, flat_T).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.matrix.spec.format.label()}"
