"""The paged KV cache: blocks of 64 tokens that hold all layers, and the sequences that own them.

Layout of a block and its address are fixed by the attention kernel (native/kernels/attention.h). Owns block ids and
lengths; never looks at contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.errors import OptionError
from stoker.native.io import Arena

BLOCK_TOKENS = 64
KV_BYTES = 2  # IEEE half


@dataclass(frozen=True)
class KVShape:
    """Axes of the cache: attention layers, KV heads, head width."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * KV_BYTES

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.token_bytes

    def bytes_for(self, tokens: int) -> int:
        return -(-tokens // BLOCK_TOKENS) * self.block_bytes


class KVPool:
    """Blocks for `tokens` tokens in one arena; allocation is a free list."""

    def __init__(self, shape: KVShape, tokens: int) -> None:
        self.shape = shape
        self.blocks = -(-tokens // BLOCK_TOKENS)
        self._arena = Arena(self.blocks * shape.block_bytes)
        self._free = list(range(self.blocks - 1, -1, -1))

    @property
    def base(self) -> int:
        return self._arena.address

    @property
    def free_tokens(self) -> int:
        return len(self._free) * BLOCK_TOKENS

    def take(self) -> int:
        if not self._free:
            raise OptionError(
                "the context is full",
                expected=f"at most {self.blocks * BLOCK_TOKENS} tokens over all sequences",
                remedy="give a larger --ctx-size, or shorten the conversation",
            )
        return self._free.pop()

    def give(self, blocks: list[int]) -> None:
        self._free.extend(blocks)

    def close(self) -> None:
        self._arena.close()


@dataclass
class PagedSequence:
    """One sequence: the token ids whose K and V are in its blocks."""

    pool: KVPool
    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids)

    def reserve(self, new_tokens: int) -> None:
        """Own enough blocks for `new_tokens` more."""
        while len(self.blocks) * BLOCK_TOKENS < self.length + new_tokens:
            self.blocks.append(self.pool.take())

    def append(self, ids: list[int]) -> None:
        self.ids.extend(ids)

    def truncate(self, length: int) -> int:
        """Forget every token past `length`; returns the length kept (here always `length`)."""
        del self.ids[length:]
        keep = -(-length // BLOCK_TOKENS)
        self.pool.give(self.blocks[keep:])
        del self.blocks[keep:]
        return self.length

    def close(self) -> None:
        self.truncate(0)
