"""The door to native attention, norms and routing: checks shapes and dtypes, passes addresses. Knows no model.

An attention block is one call: projections, head norms, rotation, cache append, attention, output projection. A token's
result depends bit for bit on its own row and on the keys and values before it, never on what else is in the call.
Keys and values are IEEE half in pages of 64 tokens (native/kernels/kv.h): block b, layer l lies at
`kv_base + (b * n_layers + l) * 2 * n_kv_heads * 64 * head_dim * 2` bytes: keys [n_kv, head_dim, 64], then values
[n_kv, 64, head_dim].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.errors import OptionError, StokerError
from stoker.native import _kernels
from stoker.native.kernels import Matrix
from stoker.native.low_rank import LowRank

KV_BLOCK_TOKENS = 64
_OK, _HALF_OVERFLOW, _BAD_SEQUENCE, _BAD_POSITION, _BAD_BLOCK = range(5)  # AttentionStatus
_NO_NORM, _HEAD_NORM, _WHOLE_NORM = range(3)  # QkNorm
_f32, _i32 = torch.float32, torch.int32


def kv_block_bytes(n_layers: int, n_kv_heads: int, head_dim: int) -> int:
    """Bytes of one cache block: 64 tokens, all layers, keys and values in half precision."""
    return n_layers * 2 * n_kv_heads * KV_BLOCK_TOKENS * head_dim * 2


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, *, unit_offset: bool = False, out: Tensor | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (times 1 + weight with unit_offset). f32 in, f32 out.

    x: any number of leading axes, contiguous. out: the same shape, may be x. ValueError for other dtypes or layouts.
    """
    width = weight_D.shape[0]
    if x_TD.shape[-1] != width:
        raise ValueError(f"rms_norm: x has rows of {x_TD.shape[-1]}, the weight has {width}")
    check_f32("x", x_TD)
    check_f32("weight", weight_D)
    if out is None:
        out = torch.empty_like(x_TD)
    else:
        check_f32("out", out)
        if out.shape != x_TD.shape:
            raise ValueError(f"rms_norm: out is {list(out.shape)}, x is {list(x_TD.shape)}")
    _kernels.rms_norm(
        x_TD.data_ptr(), weight_D.data_ptr(), x_TD.numel() // width, width, eps, unit_offset, out.data_ptr()
    )
    return out


def topk_softmax(logits_TE: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over E in f32, the k most likely experts, divided by their sum if `renormalise`.

    logits: f32 [T, E], 1 <= k <= E. Returns weights f32 [T, k] and experts int64 [T, k], by descending probability;
    ties: the lower expert first. A NaN logit gives a row of NaN weights.
    """
    n_tokens, n_experts = logits_TE.shape
    if not 1 <= k <= n_experts:
        raise ValueError(f"topk_softmax: k must be 1 to {n_experts}, got {k}")
    check_f32("logits", logits_TE)
    weights = torch.empty(n_tokens, k)
    experts = torch.empty(n_tokens, k, dtype=torch.int64)
    _kernels.topk_softmax(
        logits_TE.data_ptr(), n_tokens, n_experts, k, renormalise, weights.data_ptr(), experts.data_ptr()
    )
    return weights, experts


class Pairs(NamedTuple):
    """What an adapter adds to a block: q, k and v to the projections of its input, o to that of the heads' outputs."""

    q: LowRank | None = None
    k: LowRank | None = None
    v: LowRank | None = None
    o: LowRank | None = None


class Attention:
    """One layer's attention block over a paged cache that `n_layers` layers share; holds its tensors alive.

    q, k, v, o: Matrix; q has n_heads * head_dim rows (with output_gate twice that: [n_heads, query | gate]), o as many
    columns (n_heads * head_dim always).
    q_norm, k_norm: f32 weights of RMS norms before the rotation: [head_dim], each head alone (Qwen3), or the width of
    the projection, all heads together (OLMoE). `eps` and `unit_offset` (1 + weight) apply to them.
    rotary_dim: the leading components of each head that turn, in the rotate_half convention; 0: none.
    scale: of the scores; None: head_dim ** -0.5.
    output_gate: the heads' outputs are multiplied by sigmoid(gate) (Qwen3-Next).
    window: how many positions a token sees, its own included; None: all.
    sinks: f32 [n_heads], a logit without a value that joins each head's softmax (gpt-oss).
    """

    def __init__(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        o: Matrix,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        layer: int,
        n_layers: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        unit_offset: bool = False,
        scale: float | None = None,
        output_gate: bool = False,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if window is not None and window < 1:
            raise OptionError("a window must hold at least the token itself", expected="None, or 1 or more", got=window)
        norm = _norm_mode(q_norm, k_norm, head_dim, n_heads, n_kv_heads)
        if sinks is not None:
            check_f32("sinks", sinks, (n_heads,))
        self.rotary_dim, self.width, self.out_width = rotary_dim, q.cols, o.rows
        self.projections = (q.rows, k.rows, v.rows)
        self.mixed_width = n_heads * head_dim
        self._held = (q, k, v, o, q_norm, k_norm, sinks)
        self.native = _kernels.make_attention(
            q.native,
            k.native,
            v.native,
            o.native,
            n_heads,
            n_kv_heads,
            head_dim,
            rotary_dim,
            layer,
            n_layers,
            head_dim**-0.5 if scale is None else scale,
            norm,
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            eps,
            unit_offset,
            output_gate,
            window or 0,
            0 if sinks is None else sinks.data_ptr(),
        )

    def scratch_bytes(self, n_tokens: int) -> int:
        """Working memory for a step of `n_tokens`, shared by all layers, encoded activations not included.

        kernels.scratch_bytes() is what is held now, with everything.
        """
        return self.native.scratch_bytes(n_tokens)

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
        out_TD: Tensor,
        adapted: "Adapted | None" = None,
    ) -> None:
        """Append the keys and values of T tokens to the cache and write the block's output to `out` (not x).

        x: f32 [T, D]. cos, sin: f32 [T, rotary_dim]. block_table: int32 [B, M], block numbers by position // 64;
        entries past a sequence's last position are not read. seq_of_token, pos_of_token: int32 [T], distinct pairs.
        start_of_seq: int32 [B], the first position that a sequence's tokens see. A sequence's earlier positions are in
        the cache or in this call. The tensors that layers share are checked once a step: pass the same objects to every
        layer, and do not resize them in between.
        adapted: which tokens take which pairs; made for this block.
        Raises ValueError (shapes, dtypes), IndexError (a sequence, position or block out of range; nothing was
        computed), StokerError (a finite key or value beyond half precision; out and the cache hold infinities).
        """
        step = step_of(cos_TR, sin_TR, kv_base, block_table, seq_of_token, pos_of_token, start_of_seq)
        self.check_step(step, x_TD)
        if out_TD.shape != (step.n_tokens, self.out_width) or out_TD.dtype is not _f32 or not out_TD.is_contiguous():
            check_f32("out", out_TD, (step.n_tokens, self.out_width))
        pairs = None if adapted is None else adapted.native
        check_status(self.native.forward(step.native, x_TD.data_ptr(), out_TD.data_ptr(), pairs))

    def check_step(self, step: "Step", x_TD: Tensor) -> None:
        """ValueError unless x and the rotation fit this block."""
        if step.rotary_dim != self.rotary_dim:
            raise ValueError(f"cos: expected {self.rotary_dim} columns, got {step.rotary_dim}")
        if x_TD.shape != (step.n_tokens, self.width) or x_TD.dtype is not _f32 or not x_TD.is_contiguous():
            check_f32("x", x_TD, (step.n_tokens, self.width))


class Adapted:
    """The pairs of a step's tokens in one block: (first, last, pairs) for tokens [first, last), no token twice.

    `last` may lie past the step. Holds the pairs alive. ValueError for pairs that do not fit the block.
    """

    def __init__(self, block: Attention, rows: Sequence[tuple[int, int, Pairs]]) -> None:
        self._held = (block, tuple(rows))
        self.native = _kernels.Adapted()
        shapes = [(block.width, height) for height in block.projections] + [(block.mixed_width, block.out_width)]
        end = 0
        for first, last, pairs in sorted(rows, key=lambda row: row[:2]):
            for name, pair, shape in zip(pairs._fields, pairs, shapes, strict=True):
                if pair is not None and (pair.inputs, pair.outputs) != shape:
                    raise ValueError(
                        f"{name}: expected {shape[0]} in, {shape[1]} out, got {pair.inputs}, {pair.outputs}"
                    )
            if first < end:
                raise ValueError(f"adapted: row {first} is before 0 or in two ranges")
            end = last
            self.native.append(first, last, *(None if pair is None else pair.native for pair in pairs))


class Step:
    """The tensors that all layers of a step share, checked, and their addresses."""

    def __init__(
        self, cos: Tensor, sin: Tensor, kv_base: int, table: Tensor, seq: Tensor, pos: Tensor, start: Tensor
    ) -> None:
        n_tokens = seq.shape[0]
        self.n_tokens, self.rotary_dim = n_tokens, cos.shape[-1]
        check_f32("cos", cos, (n_tokens, self.rotary_dim))
        check_f32("sin", sin, (n_tokens, self.rotary_dim))
        _check("block_table", table, _i32, (start.shape[0], table.shape[-1]))
        _check("seq_of_token", seq, _i32, (n_tokens,))
        _check("pos_of_token", pos, _i32, (n_tokens,))
        _check("start_of_seq", start, _i32, (start.shape[0],))
        if kv_base == 0 or kv_base % 64 != 0:
            raise ValueError(f"kv_base: expected an address that is a multiple of 64, got {kv_base}")
        self.cos, self.sin, self.kv_base, self.table, self.seq, self.pos, self.start = (
            cos,
            sin,
            kv_base,
            table,
            seq,
            pos,
            start,
        )
        self.native = _kernels.AttentionStep(
            n_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            kv_base,
            start.shape[0],
            table.shape[1],
            table.data_ptr(),
            seq.data_ptr(),
            pos.data_ptr(),
            start.data_ptr(),
        )


_last_step: list[Step] = []


def step_of(cos: Tensor, sin: Tensor, kv_base: int, table: Tensor, seq: Tensor, pos: Tensor, start: Tensor) -> Step:
    """The checked form of what a step's layers share: made anew only when one of the objects is another one."""
    if _last_step:
        step = _last_step[0]
        if (
            cos is step.cos
            and pos is step.pos
            and sin is step.sin
            and kv_base == step.kv_base
            and table is step.table
            and seq is step.seq
            and start is step.start
        ):
            return step
    _last_step[:] = [Step(cos, sin, kv_base, table, seq, pos, start)]
    return _last_step[0]


def check_status(status: int) -> None:
    """Raises what Attention.forward documents unless the native call went well."""
    if status != _OK:
        _raise(status)


def _norm_mode(q_norm: Tensor | None, k_norm: Tensor | None, head_dim: int, n_heads: int, n_kv_heads: int) -> int:
    if q_norm is None and k_norm is None:
        return _NO_NORM
    if q_norm is None or k_norm is None:
        raise ValueError("q_norm and k_norm are given together or not at all")
    if q_norm.shape == (head_dim,) and k_norm.shape == (head_dim,):
        mode = _HEAD_NORM
    elif q_norm.shape == (n_heads * head_dim,) and k_norm.shape == (n_kv_heads * head_dim,):
        mode = _WHOLE_NORM
    else:
        raise ValueError(
            f"q_norm, k_norm: expected [{head_dim}] each, or [{n_heads * head_dim}] and [{n_kv_heads * head_dim}], "
            f"got {list(q_norm.shape)} and {list(k_norm.shape)}"
        )
    check_f32("q_norm", q_norm)
    check_f32("k_norm", k_norm)
    return mode


def _raise(status: int) -> None:
    if status == _HALF_OVERFLOW:
        raise StokerError(
            "a key or value is too large for the half-precision cache",
            where="attention",
            expected="at most 65504",
            remedy="check the checkpoint's attention weights; this model needs a wider cache",
        )
    what = {
        _BAD_SEQUENCE: "seq_of_token names a sequence that has no row in block_table",
        _BAD_POSITION: "pos_of_token lies before its sequence's start or past its block table",
        _BAD_BLOCK: "block_table has a negative entry at a position that is needed",
    }
    raise IndexError(what[status])


def check_f32(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> None:
    _check(name, tensor, _f32, shape)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    fits = shape is None or tensor.shape == shape
    if not fits or tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        wanted = f"contiguous cpu {dtype}" + ("" if shape is None else f" {list(shape)}")
        raise ValueError(
            f"{name}: expected {wanted}, got {tensor.device.type} {tensor.dtype} {list(tensor.shape)} "
            f"strides {tensor.stride()}"
        )
