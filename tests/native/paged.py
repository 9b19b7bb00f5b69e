"""Shared by the attention tests: f32 matrices in tile16, a paged cache full of NaN, runs of a native layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tile16 import aligned, to_tiles
from torch import Tensor

from stoker.native.attention import KV_BLOCK_TOKENS, Adapted, Attention, kv_block_bytes
from stoker.native.kernels import Matrix
from stoker.quant.formats import MatrixSpec, WeightFormat


def matrix(linear: torch.nn.Linear) -> Matrix:
    w = linear.weight.detach().float().contiguous().numpy()
    bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
    return Matrix(MatrixSpec(*w.shape, WeightFormat("f32")), aligned(to_tiles(w)), None, None, bias)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Cache:
    """Blocks that begin as NaN, so that reading a key or value that was never written spoils the result.

    The table gives each sequence its blocks in a shuffled order.
    """

    def __init__(
        self, n_layers: int, n_kv_heads: int, head_dim: int, n_seqs: int, max_tokens: int, seed: int = 0
    ) -> None:
        per_seq = -(-max_tokens // KV_BLOCK_TOKENS)
        n_blocks = n_seqs * per_seq + 1
        nbytes = n_blocks * kv_block_bytes(n_layers, n_kv_heads, head_dim)
        self.memory = aligned(np.full(nbytes // 2, 0x7E00, dtype=np.uint16))
        order = np.random.default_rng(seed).permutation(n_blocks)[: n_seqs * per_seq]
        self.table = torch.from_numpy(order.astype(np.int32).reshape(n_seqs, per_seq).copy())
        self.address = self.memory.data_ptr()


class Layer:
    """A transformers attention module as a native block, with its own cache."""

    def __init__(self, module: Any, rotary: Any, *, n_seqs: int = 1, max_tokens: int = 512, **options: Any) -> None:
        config = module.config
        self.rotary, self.width = rotary, config.hidden_size
        self.n_heads, self.n_kv, self.head_dim = config.num_attention_heads, config.num_key_value_heads, module.head_dim
        cos, _ = rotary(torch.zeros(1, 1, self.width), torch.zeros(1, 1, dtype=torch.long))
        self.both_halves = cos.shape[-1] * 2 == self.head_dim and options.pop("half_tables", False)
        self.n_layers = 3
        self.block = Attention(
            *(matrix(getattr(module, f"{name}_proj")) for name in "qkvo"),
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv,
            head_dim=self.head_dim,
            rotary_dim=cos.shape[-1] * (2 if self.both_halves else 1),
            layer=1,
            n_layers=self.n_layers,
            scale=module.scaling,
            **options,
        )
        self.n_seqs, self.max_tokens = n_seqs, max_tokens
        self.cache = self.fresh_cache()

    def fresh_cache(self, seed: int = 0) -> Cache:
        return Cache(self.n_layers, self.n_kv, self.head_dim, self.n_seqs, self.max_tokens, seed)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (t[0].contiguous() for t in self.rotary(torch.zeros(1, 1, self.width), positions[None]))
        if self.both_halves:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return cos, sin

    def __call__(
        self,
        x_TD: Tensor,
        seqs: Sequence[int],
        positions: Sequence[int],
        starts: Sequence[int] | None = None,
        adapted: Adapted | None = None,
    ) -> Tensor:
        """One step. The rotary position of a token is its distance from the start of its sequence."""
        starts = [0] * self.n_seqs if starts is None else list(starts)
        turns = torch.tensor([p - starts[s] for s, p in zip(seqs, positions, strict=True)])
        seq, pos, start = (torch.tensor(list(v), dtype=torch.int32) for v in (seqs, positions, starts))
        out = torch.full((len(positions), self.block.out_width), torch.nan)
        self.block.forward(
            x_TD.contiguous(), *self.tables(turns), self.cache.address, self.cache.table, seq, pos, start, out, adapted
        )
        return out


def causal_mask(n_tokens: int, window: int | None = None) -> Tensor:
    """Additive [1, 1, T, T]."""
    distance = torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)[None, :]
    seen = (distance >= 0) & (distance < (window or n_tokens))
    return torch.zeros(n_tokens, n_tokens).masked_fill(~seen, -torch.inf)[None, None]


def eager(module: Any, rotary: Any, x_TD: Tensor, window: int | None = None) -> Tensor:
    """The module's own answer for one sequence that starts at position 0."""
    n_tokens = x_TD.shape[0]
    tables = rotary(x_TD[None], torch.arange(n_tokens)[None])
    with torch.no_grad():
        return module(x_TD[None], position_embeddings=tables, attention_mask=causal_mask(n_tokens, window))[0][0]
