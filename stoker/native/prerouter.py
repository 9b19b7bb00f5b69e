"""The door to a prerouter's head: what a layer saw of some tokens -> the next layer's logits, or route, in one call.

Checks shapes and dtypes, passes addresses. A row's result is the same function of that row, bit for bit, whatever else
is in the call and however many threads there are. Knows no model.
"""

import torch
from torch import Tensor

from stoker.native import _kernels
from stoker.native.kernels import Matrix

_f32, _i64 = torch.float32, torch.int64


class PrerouterHead:
    """out * gelu(both[:H]) + both[H:], both = dense * hidden + the table's rows; holds its tensors alive.

    dense: Matrix [H + E, D]; out: Matrix [E, H]; table: bfloat16 or float32 [2E, H + E], contiguous: what each expert
    of a token adds, then what each of its predecessor's does. gelu by erf. ValueError where the shapes do not fit.
    """

    def __init__(self, dense: Matrix, out: Matrix, table_RC: Tensor) -> None:
        self.width, self.experts = dense.cols, out.rows
        shape = (2 * out.rows, out.rows + out.cols)
        if table_RC.dtype not in (torch.bfloat16, _f32) or table_RC.shape != shape or not table_RC.is_contiguous():
            raise ValueError(
                f"table: expected contiguous float32 or bfloat16 {list(shape)}, got {table_RC.dtype} "
                f"{list(table_RC.shape)}, {table_RC.stride()}"
            )
        self._held = dense, out, table_RC
        is_bf16 = table_RC.dtype == torch.bfloat16
        self._native = _kernels.make_prerouter_head(dense.native, out.native, table_RC.data_ptr(), is_bf16)

    def logits(self, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor) -> Tensor:
        """float32 [T, E]. hidden: f32 [T, D]; used, before: int64 [T, K], the experts of each token and of its
        predecessor, -1: none; all contiguous. IndexError for an expert outside [-1, E)."""
        self._check(hidden_TD, used_TK, before_TK)
        tokens, k = used_TK.shape
        logits_TE = torch.empty(tokens, self.experts)
        self._native.logits(
            hidden_TD.data_ptr(), used_TK.data_ptr(), before_TK.data_ptr(), tokens, k, logits_TE.data_ptr()
        )
        return logits_TE

    def route(
        self, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor, top_k: int, renormalise: bool
    ) -> tuple[Tensor, Tensor]:
        """The logits' softmax and its `top_k` best, as `attention.topk_softmax` gives them: experts int64 and weights
        float32 [T, top_k]. Arguments and errors as in `logits`."""
        self._check(hidden_TD, used_TK, before_TK)
        if not 1 <= top_k <= self.experts:
            raise ValueError(f"top_k must be 1 to {self.experts}, got {top_k}")
        tokens, k = used_TK.shape
        weights_TK, experts_TK = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=_i64)
        self._native.route(
            hidden_TD.data_ptr(),
            used_TK.data_ptr(),
            before_TK.data_ptr(),
            tokens,
            k,
            top_k,
            renormalise,
            weights_TK.data_ptr(),
            experts_TK.data_ptr(),
        )
        return experts_TK, weights_TK

    def _check(self, hidden_TD: Tensor, used_TK: Tensor, before_TK: Tensor) -> None:
        shape = used_TK.shape
        if (
            len(shape) != 2
            or before_TK.shape != shape
            or hidden_TD.shape != (shape[0], self.width)
            or hidden_TD.dtype is not _f32
            or used_TK.dtype is not _i64
            or before_TK.dtype is not _i64
            or not (hidden_TD.is_contiguous() and used_TK.is_contiguous() and before_TK.is_contiguous())
            or not (hidden_TD.is_cpu and used_TK.is_cpu and before_TK.is_cpu)
        ):
            got = [f"{x.device.type} {x.dtype} {list(x.shape)}, {x.stride()}" for x in (hidden_TD, used_TK, before_TK)]
            raise ValueError(
                f"hidden, used and before: expected contiguous cpu float32 [T, {self.width}] and int64 [T, K] twice, "
                f"got {'; '.join(got)}"
            )
