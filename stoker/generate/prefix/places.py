"""Where kept blocks lie in memory: in the KV pool for models with paged KV, else in tensors of a bounded size.

Both move whole blocks between a sequence, memory and a file; neither knows the tree's order or what is worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.errors import OptionError
from stoker.generate.prefix.tree import BLOCK_TOKENS, Node
from stoker.runtime import snapshot


class Places(Protocol):
    """A slot is opaque: a block of the pool, or a tensor."""

    stateful: bool  # a sequence can be taken up only where its state was kept

    def lacks(self, nbytes: int) -> bool:
        """Whether `blank` or `hold` of so many bytes would exceed what may be kept."""

    def size(self, sequence: Any, node: Node) -> int:
        """Bytes of memory that holding this block of a sequence takes beyond what the sequence itself takes."""

    def hold(self, sequence: Any, node: Node) -> tuple[Any, str]:
        """A slot with this block of the sequence (its state for a state), and what is needed to read it again."""

    def blank(self, nbytes: int) -> Any | None:
        """A slot to read into; None where there is no room."""

    def read(self, slot: Any, file: Path, offset: int) -> None:
        """Fill a blank slot. Any thread. Raises ReadError."""

    def view(self, slot: Any) -> memoryview: ...

    def nbytes(self, slot: Any) -> int: ...

    def pin(self, slot: Any) -> Any:
        """Keep the bytes as they are until `drop` of what is returned."""

    def drop(self, slot: Any) -> None: ...

    def idle(self, slot: Any) -> bool:
        """Whether dropping it would give memory back."""

    def expected_bytes(self, tokens: int) -> int | None:
        """What a block of so many tokens takes; None where only its meta tells."""

    def fill(self, sequence: Any, ids: list[int], blocks: Sequence[Node], state: Node | None) -> None:
        """Make an empty sequence one of `ids`, which lie in `blocks`."""


class PagedPlaces:
    """The unused part of the KV pool. A kept block is shared with the sequences that use it, never copied."""

    stateful = False

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def lacks(self, nbytes: int) -> bool:
        return nbytes > 0 and self.pool.free_tokens == 0

    def size(self, sequence: Any, node: Node) -> int:
        return 0

    def hold(self, sequence: Any, node: Node) -> tuple[int, str]:
        return self.pool.share(sequence.blocks[node.start // BLOCK_TOKENS]), ""

    def blank(self, nbytes: int) -> int | None:
        try:
            return int(self.pool.take())
        except OptionError:
            return None

    def read(self, slot: int, file: Path, offset: int) -> None:
        self.pool.read(slot, file, offset)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.pool.contents(slot).numpy())

    def nbytes(self, slot: int) -> int:
        return int(self.pool.shape.block_bytes)

    def pin(self, slot: int) -> int:
        return int(self.pool.share(slot))

    def drop(self, slot: int) -> None:
        self.pool.give([slot])

    def idle(self, slot: int) -> bool:
        return bool(self.pool.holders(slot) == 1)

    def expected_bytes(self, tokens: int) -> int | None:
        return int(self.pool.shape.block_bytes)

    def fill(self, sequence: Any, ids: list[int], blocks: Sequence[Node], state: Node | None) -> None:
        sequence.adopt([node.slot for node in blocks], ids)


class TensorPlaces:
    """Copies of transformers' cache in tensors, at most `ram_bytes` of them, pinned ones included."""

    def __init__(self, stateful: bool, ram_bytes: int) -> None:
        self.stateful, self.ram_bytes = stateful, ram_bytes
        self.used_bytes = 0
        self._pins: dict[int, int] = {}  # by id of the tensor: holders beyond the first

    def lacks(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes > self.ram_bytes

    def size(self, sequence: Any, node: Node) -> int:
        if node.is_state:
            return snapshot.state_bytes(sequence.cache)
        return snapshot.rows_bytes(sequence.cache, node.tokens)

    def hold(self, sequence: Any, node: Node) -> tuple[Any, str]:
        if node.is_state:
            data, meta = snapshot.take_state(sequence.cache)
        else:
            data, meta = snapshot.take_rows(sequence.cache, node.start, node.end)
        self.used_bytes += data.numel()
        return data, meta

    def blank(self, nbytes: int) -> Any | None:
        if self.lacks(nbytes):
            return None
        self.used_bytes += nbytes
        return snapshot.blank(nbytes)

    def read(self, slot: Any, file: Path, offset: int) -> None:
        snapshot.read(slot, file, offset)

    def view(self, slot: Any) -> memoryview:
        return memoryview(slot.numpy())

    def nbytes(self, slot: Any) -> int:
        return int(slot.numel())

    def pin(self, slot: Any) -> Any:
        self._pins[id(slot)] = self._pins.get(id(slot), 0) + 1
        return slot

    def drop(self, slot: Any) -> None:
        pins = self._pins.pop(id(slot), 0)
        if pins > 1:
            self._pins[id(slot)] = pins - 1
        elif pins == 0:
            self.used_bytes -= slot.numel()

    def idle(self, slot: Any) -> bool:
        return id(slot) not in self._pins

    def expected_bytes(self, tokens: int) -> int | None:
        return None

    def fill(self, sequence: Any, ids: list[int], blocks: Sequence[Node], state: Node | None) -> None:
        rows = [(node.slot, node.meta, node.tokens) for node in blocks]
        snapshot.restore(sequence.cache, rows, len(ids), None if state is None else (state.slot, state.meta))
        sequence.append(ids)
        if sequence.routing is not None:
            sequence.routing.adopt(len(ids))
