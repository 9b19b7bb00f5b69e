"""The paged KV cache: blocks of 64 tokens that hold all layers, and the sequences that own them.

Layout of a block and its address are fixed by the attention kernel (native/kernels/attention.h). Owns block ids, how
many hold each, and lengths; contents are moved whole, never looked at. A block that two hold is never written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from stoker.errors import OptionError
from stoker.native.io import Arena, read_file_into
from stoker.routing.rule import RouteState

if TYPE_CHECKING:
    from torch import Tensor

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


class Keeper(Protocol):
    """Who holds blocks that no sequence needs, and gives them up when the pool runs out."""

    def reclaim(self, blocks: int) -> None:
        """Give up blocks that nobody else holds until the pool has so many free, or there are no more."""

    def release(self, block: int) -> None:
        """Give up this block, which others hold too."""


class KVPool:
    """Blocks for `tokens` tokens in one arena. A block has as many holders as `take` and `share` made; none: free."""

    def __init__(self, shape: KVShape, tokens: int) -> None:
        self.shape = shape
        self.blocks = -(-tokens // BLOCK_TOKENS)
        self.keeper: Keeper | None = None
        self._arena = Arena(self.blocks * shape.block_bytes)
        self._free = list(range(self.blocks - 1, -1, -1))
        self._holders = [0] * self.blocks

    @property
    def base(self) -> int:
        return self._arena.address

    @property
    def free_tokens(self) -> int:
        return len(self._free) * BLOCK_TOKENS

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self) -> int:
        """A free block, held once. Raises OptionError when there is none and the keeper gives none up."""
        if not self._free and self.keeper is not None:
            self.keeper.reclaim(1)
        if not self._free:
            raise OptionError(
                "the context is full",
                expected=f"at most {self.blocks * BLOCK_TOKENS} tokens over all sequences",
                remedy="give a larger --ctx-size, or shorten the conversation",
            )
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more holder of a block that is held; returns it."""
        assert self._holders[block] > 0, "a free block cannot be shared"
        self._holders[block] += 1
        return block

    def give(self, blocks: list[int]) -> None:
        """One holder less of each; what nobody holds is free."""
        for block in blocks:
            assert self._holders[block] > 0, "a free block was given back"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def private(self, block: int) -> int:
        """A block with the same contents that the caller alone holds, in exchange for this one (often the same)."""
        if self._holders[block] > 1 and not self._free and self.keeper is not None:
            self.keeper.reclaim(1)
            if not self._free:
                self.keeper.release(block)
        if self._holders[block] == 1:
            return block
        own = self.take()
        self.contents(own).copy_(self.contents(block))
        self.give([block])
        return own

    def contents(self, block: int) -> Tensor:
        """uint8 [block_bytes] that shares the block's memory."""
        return self._arena.tensor(block * self.shape.block_bytes, self.shape.block_bytes)

    def read(self, block: int, file: str | os.PathLike[str], offset: int) -> None:
        """Fill a block from a file, past the page cache. Raises ReadError. May be called from any thread."""
        assert self._holders[block] == 1, "a block that others see is never written"
        read_file_into(file, offset, self.shape.block_bytes, self.base + block * self.shape.block_bytes)

    def close(self) -> None:
        self._arena.close()


@dataclass
class PagedSequence:
    """One sequence: the token ids whose K and V are in its blocks, some of which others may hold too.

    routing: what a routing rule keeps for it. prompt_tokens: how many of its tokens are or will be prompt; None: what
    comes by prefill is.
    """

    pool: KVPool
    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    routing: RouteState | None = None
    prompt_tokens: int | None = None
    adapter: str | None = None  # whose LoRA its tokens take

    @property
    def length(self) -> int:
        return len(self.ids)

    def reserve(self, new_tokens: int) -> None:
        """Own enough blocks to write `new_tokens` more; the one that they begin in, alone."""
        last, filled = divmod(self.length, BLOCK_TOKENS)
        if filled and new_tokens:
            self.blocks[last] = self.pool.private(self.blocks[last])
        while len(self.blocks) * BLOCK_TOKENS < self.length + new_tokens:
            self.blocks.append(self.pool.take())

    def append(self, ids: list[int]) -> None:
        self.ids.extend(ids)

    def adopt(self, blocks: list[int], ids: list[int]) -> None:
        """Begin with blocks that others hold too: an empty sequence, whose `ids` lie in `blocks`."""
        assert not self.blocks and -(-len(ids) // BLOCK_TOKENS) == len(blocks)
        self.blocks = [self.pool.share(block) for block in blocks]
        self.ids = list(ids)
        if self.routing is not None:
            self.routing.adopt(len(ids))

    def truncate(self, length: int) -> int:
        """Forget every token past `length`; returns the length kept (here always `length`)."""
        if self.routing is not None and length < self.length:
            self.routing.truncate(length)
        del self.ids[length:]
        keep = -(-length // BLOCK_TOKENS)
        self.pool.give(self.blocks[keep:])
        del self.blocks[keep:]
        return self.length

    def close(self) -> None:
        self.truncate(0)
