"""The door to low-rank pairs: y += B (A x), what an adapter adds beside a matrix that it leaves alone. Knows no model.

Checks shapes and dtypes, passes addresses. Sums are f32. A token's result depends bit for bit on its own rows of x and
y, never on what else is in the call, here or inside an attention block (`attention.py`).
"""

import torch
from torch import Tensor

from stoker.native import _kernels
from stoker.native.kernels import Matrix


class LowRank:
    """A [R, inputs] and B [outputs, R]; holds their tensors alive.

    Both are bf16 or f32 matrices without a bias; their activation_bits do not matter, x and A x are never rounded.
    ValueError for what does not fit.
    """

    def __init__(self, a: Matrix, b: Matrix) -> None:
        self.rank, self.inputs, self.outputs = a.rows, a.cols, b.rows
        self._held = (a, b)
        self.native = _kernels.make_low_rank(a.native, b.native)

    def add(self, x_TD: Tensor, y_TO: Tensor) -> None:
        """y += B (A x) in place. x: f32 [T, inputs], y: f32 [T, outputs], contiguous; ValueError for others."""
        tokens = x_TD.shape[0]
        for name, tensor, width in (("x", x_TD, self.inputs), ("y", y_TO, self.outputs)):
            fits = tensor.shape == (tokens, width) and tensor.dtype is torch.float32
            if not fits or not tensor.is_contiguous() or not tensor.is_cpu:
                raise ValueError(
                    f"{name}: expected contiguous cpu f32 [{tokens}, {width}], got {tensor.device.type} "
                    f"{tensor.dtype} {list(tensor.shape)}, {tensor.stride()}"
                )
        _kernels.low_rank_add(self.native, x_TD.data_ptr(), tokens, y_TO.data_ptr())
