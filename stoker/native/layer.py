"""The door to the first part of a decoder layer: norm, attention, residual, norm and softmax router in one call.

The same bits as the parts one by one (`attention.py`, `kernels.matmul`). Checks shapes and dtypes, passes addresses.
Knows no model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.native import _kernels
from stoker.native.attention import Adapted, Attention, check_f32, check_status, step_of
from stoker.native.kernels import Matrix


class Norm(NamedTuple):
    """RMS norm: weight f32 [D]; unit_offset multiplies by 1 + weight."""

    weight: Tensor
    eps: float
    unit_offset: bool


class Router(NamedTuple):
    """softmax over E, the top k, divided by their sum if `renormalise`: matrix [E, D]."""

    matrix: Matrix
    top_k: int
    renormalise: bool


class FrontResult(NamedTuple):
    """hidden: x + attention(before(x)), f32 [T, D]; normed: after(hidden). logits f32 [T, E], weights f32 [T, K] and
    experts int64 [T, K] where there is a router, else empty."""

    hidden: Tensor
    normed: Tensor
    logits: Tensor
    weights: Tensor
    experts: Tensor


class LayerFront:
    """One layer's norms, attention and, if given, router; holds their tensors alive. ValueError where D differs."""

    def __init__(self, attention: Attention, before: Norm, after: Norm, router: Router | None) -> None:
        for name, norm in (("before", before), ("after", after)):
            check_f32(name, norm.weight, (attention.width,))
        self._attention, self._held = attention, (before, after, router)
        self._top_k = 0 if router is None else router.top_k
        self._experts = 0 if router is None else router.matrix.rows
        self._native = _kernels.make_front(
            attention.native,
            before.weight.data_ptr(),
            before.eps,
            before.unit_offset,
            after.weight.data_ptr(),
            after.eps,
            after.unit_offset,
            None if router is None else router.matrix.native,
            self._top_k,
            router is not None and router.renormalise,
        )

    def forward(
        self,
        x_TD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        kv_base: int,
        block_table: Tensor,
        seq_of_token: Tensor,
        pos_of_token: Tensor,
        start_of_seq: Tensor,
        adapted: Adapted | None = None,
    ) -> FrontResult:
        """x: f32 [T, D], contiguous, not changed; the others and the errors as in Attention.forward."""
        step = step_of(cos_TR, sin_TR, kv_base, block_table, seq_of_token, pos_of_token, start_of_seq)
        tokens = step.n_tokens
        self._attention.check_step(step, x_TD)
        hidden, normed = torch.empty_like(x_TD), torch.empty_like(x_TD)
        logits, weights = torch.empty(tokens, self._experts), torch.empty(tokens, self._top_k)
        experts = torch.empty(tokens, self._top_k, dtype=torch.int64)
        status = self._native.forward(
            step.native,
            x_TD.data_ptr(),
            hidden.data_ptr(),
            normed.data_ptr(),
            logits.data_ptr(),
            weights.data_ptr(),
            experts.data_ptr(),
            None if adapted is None else adapted.native,
        )
        check_status(status)
        return FrontResult(hidden, normed, logits, weights, experts)
