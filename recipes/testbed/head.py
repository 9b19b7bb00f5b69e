"""Cross-entropy of a tied output head, in chunks: the logits of a batch never stand in memory together.

The gradient is computed with the loss, in the same pass. Products in bfloat16, softmax in float32.
"""

import torch
from torch import Tensor

CHUNK_TOKENS = 512


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        tokens = len(targets_N)
        inputs_ND, weights_VD = hidden_ND.detach().to(dtype), head_VD.detach().to(dtype)
        grad_hidden_ND = torch.empty_like(inputs_ND)
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for low in range(0, tokens, CHUNK_TOKENS):
            chunk_CD, wanted_C = inputs_ND[low : low + CHUNK_TOKENS], targets_N[low : low + CHUNK_TOKENS, None]
            logits_CV = (chunk_CD @ weights_VD.t()).float()
            grad_CV = logits_CV.softmax(-1)
            total -= grad_CV.gather(1, wanted_C).clamp_min(1e-37).log().sum()
            grad_CV.scatter_add_(1, wanted_C, torch.full_like(wanted_C, -1, dtype=torch.float32))
            small_CV = grad_CV.to(dtype)
            torch.mm(small_CV, weights_VD, out=grad_hidden_ND[low : low + CHUNK_TOKENS])
            grad_head_VD += small_CV.t() @ chunk_CD
        ctx.save_for_backward(grad_hidden_ND, grad_head_VD)
        ctx.tokens, ctx.dtype_in = tokens, hidden_ND.dtype
        return total / tokens

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        grad_hidden_ND, grad_head_VD = ctx.saved_tensors
        scale = grad / ctx.tokens
        return grad_hidden_ND.to(ctx.dtype_in) * scale, grad_head_VD * scale, None, None


def cross_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean negative log-likelihood, in nats, of `targets_N` under softmax(hidden @ head.T)."""
    return _ChunkedCrossEntropy.apply(hidden_ND, head_VD, targets_N, dtype)
