"""Causal attention for training on CPUs, registered with transformers under ATTENTION_FUNCTION.

Works on one sequence, one key head and BLOCK_TOKENS queries at a time, so that scores stay in a core's cache, and skips
keys that lie in a block's future. Takes no mask and no cache: training batches are full windows. torch.compile sees one
opaque operation.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_FUNCTION = "testbed_blocks"
BLOCK_TOKENS = 128


def block_attention(
    module: nn.Module,
    query_BHTC: Tensor,
    key_BGTC: Tensor,
    value_BGTC: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """The contract of transformers' registry: H query heads, G key heads, C columns a head; [B, T, H, C] out."""
    assert attention_mask is None, "this attention is causal over full windows; it takes no mask"
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else value_BGTC.dtype
    out_BHTC, _ = _forward(query_BHTC.to(dtype), key_BGTC.to(dtype), value_BGTC.to(dtype), scaling)
    return out_BHTC.transpose(1, 2), None


AttentionInterface.register(ATTENTION_FUNCTION, block_attention)


@torch.library.custom_op("testbed::attention", mutates_args=())
def _forward(query_BHTC: Tensor, key_BGTC: Tensor, value_BGTC: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Result [B, H, T, C], and the attention probabilities of all blocks, flat, in the order of `_blocks`."""
    out_BHTC = torch.empty_like(query_BHTC, memory_format=torch.contiguous_format)
    probabilities = query_BHTC.new_empty(_stored(query_BHTC))
    at = 0
    for batch, group, heads, low, high, later in _blocks(query_BHTC, key_BGTC):
        query_RC = query_BHTC[batch, heads, low:high].reshape(-1, query_BHTC.shape[-1])
        scores_RT = (query_RC * scaling) @ key_BGTC[batch, group, :high].t()
        per_head = scores_RT.view(-1, high - low, high)
        per_head[:, :, low:].masked_fill_(later[: high - low, : high - low], -torch.inf)
        chances_RT = probabilities[at : at + scores_RT.numel()].view_as(scores_RT)
        at += scores_RT.numel()
        torch.softmax(scores_RT, -1, out=chances_RT)
        mixed_RC = chances_RT @ value_BGTC[batch, group, :high]
        out_BHTC[batch, heads, low:high] = mixed_RC.view(-1, high - low, mixed_RC.shape[-1])
    return out_BHTC, probabilities


@_forward.register_fake
def _(query_BHTC: Tensor, key_BGTC: Tensor, value_BGTC: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query_BHTC, memory_format=torch.contiguous_format)
    return out, query_BHTC.new_empty(_stored(query_BHTC))


@torch.library.custom_op("testbed::attention_backward", mutates_args=())
def _backward(
    grad_BHTC: Tensor,
    query_BHTC: Tensor,
    key_BGTC: Tensor,
    value_BGTC: Tensor,
    probabilities: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    width = query_BHTC.shape[-1]
    grad_query_BHTC = torch.empty_like(query_BHTC, memory_format=torch.contiguous_format)
    grad_key_BGTC = torch.zeros_like(key_BGTC, dtype=torch.float32, memory_format=torch.contiguous_format)
    grad_value_BGTC = torch.zeros_like(grad_key_BGTC)
    at = 0
    for batch, group, heads, low, high, _ in _blocks(query_BHTC, key_BGTC):
        query_RC = query_BHTC[batch, heads, low:high].reshape(-1, width)
        grad_RC = grad_BHTC[batch, heads, low:high].reshape(-1, width)
        chances_RT = probabilities[at : at + len(query_RC) * high].view(len(query_RC), high)
        at += chances_RT.numel()
        grad_value_BGTC[batch, group, :high] += chances_RT.t() @ grad_RC
        pulls_RT = grad_RC @ value_BGTC[batch, group, :high].t()
        grad_scores_RT = torch.ops.aten._softmax_backward_data(pulls_RT, chances_RT, -1, chances_RT.dtype)
        grad_query_RC = (grad_scores_RT @ key_BGTC[batch, group, :high]).mul_(scaling)
        grad_query_BHTC[batch, heads, low:high] = grad_query_RC.view(-1, high - low, width)
        grad_key_BGTC[batch, group, :high] += grad_scores_RT.t() @ (query_RC * scaling)
    return grad_query_BHTC, grad_key_BGTC.to(key_BGTC.dtype), grad_value_BGTC.to(value_BGTC.dtype)


@_backward.register_fake
def _(grad_BHTC, query_BHTC, key_BGTC, value_BGTC, probabilities, scaling):  # type: ignore[no-untyped-def]
    return tuple(
        torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query_BHTC, key_BGTC, value_BGTC)
    )


def _blocks(query_BHTC: Tensor, key_BGTC: Tensor) -> Iterator[tuple[int, int, slice, int, int, Tensor]]:
    """(sequence, key head, its query heads, first query, end of queries and keys, what lies later in the block)."""
    batch, heads, tokens, _ = query_BHTC.shape
    groups = key_BGTC.shape[1]
    each = heads // groups
    later = torch.ones(BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.bool).triu(1)
    for one in range(batch):
        for group in range(groups):
            for low in range(0, tokens, BLOCK_TOKENS):
                high = min(low + BLOCK_TOKENS, tokens)
                yield one, group, slice(group * each, (group + 1) * each), low, high, later


def _stored(query_BHTC: Tensor) -> int:
    """How many probabilities the blocks of all heads hold."""
    batch, heads, tokens, _ = query_BHTC.shape
    ends = [min(low + BLOCK_TOKENS, tokens) for low in range(0, tokens, BLOCK_TOKENS)]
    return batch * heads * sum((end - low) * end for low, end in zip(range(0, tokens, BLOCK_TOKENS), ends, strict=True))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, ctx.scaling = inputs
    ctx.save_for_backward(query, key, value, output[1])


def _differentiate(ctx, grad_BHTC, _):  # type: ignore[no-untyped-def]
    return *_backward(grad_BHTC, *ctx.saved_tensors, ctx.scaling), None


_forward.register_autograd(_differentiate, setup_context=_save)
