"""What is known of earlier token sequences: a tree of blocks, where each says where its keys and values are.

Owns ids, digests and the order of use. Knows neither memory nor disk: a slot and a piece are whatever others put there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

BLOCK_TOKENS = 64
DIGEST_BYTES = 16
_WIDTH = array("i").itemsize  # bytes of one token in a key


def key_of(ids: Sequence[int]) -> bytes:
    """Token ids as a key: four bytes each."""
    return array("i", ids).tobytes()


def tokens_of(key: bytes) -> int:
    return len(key) // _WIDTH


def child_digest(parent: bytes, key: bytes) -> bytes:
    """The name of a block: it stands for its own tokens and for all before them (a hash chain)."""
    return hashlib.blake2b(parent + key, digest_size=DIGEST_BYTES).digest()


class Node:
    """A block of at most 64 tokens after those of its parents; with no token of its own: a state after its parent's.

    slot: where it is in memory; piece: where it is on disk (until it says `gone`); None: it is not there. meta: what is
    needed to read its bytes.
    """

    __slots__ = ("children", "digest", "end", "key", "meta", "parent", "piece", "queued", "slot", "start")

    def __init__(self, parent: Node | None, key: bytes, digest: bytes) -> None:
        self.parent, self.key, self.digest = parent, key, digest
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + tokens_of(key)
        self.children: dict[bytes, Node] = {}
        self.slot: Any = None
        self.piece: Any = None
        self.queued = False  # on its way to the disk
        self.meta = ""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def is_state(self) -> bool:
        return not self.key and self.parent is not None

    @property
    def present(self) -> bool:
        return self.slot is not None or (self.piece is not None and not self.piece.gone)

    @property
    def state(self) -> Node | None:
        """The state that was kept after this block."""
        return self.children.get(b"")


class Tree:
    """All blocks of one model. in_memory: those with a slot, least recently used first, children before parents."""

    def __init__(self, root_digest: bytes) -> None:
        self.root = Node(None, b"", root_digest)
        self.by_digest: dict[bytes, Node] = {root_digest: self.root}
        self.in_memory: OrderedDict[Node, None] = OrderedDict()
        self.pinned: set[Node] = set()  # in use by the call in progress: these stay where they are

    def child(self, parent: Node, key: bytes) -> Node:
        """The child with this key, made where there is none."""
        found = parent.children.get(key)
        if found is None:
            found = parent.children[key] = Node(parent, key, child_digest(parent.digest, key))
            self.by_digest[found.digest] = found
        return found

    def walk(self, key: bytes) -> list[Node]:
        """The full blocks that begin `key`, as far as they are present."""
        path, node, width = [], self.root, BLOCK_TOKENS * _WIDTH
        for at in range(0, len(key) - width + 1, width):
            found = node.children.get(key[at : at + width])
            if found is None or not found.present:
                break
            path.append(found)
            node = found
        return path

    def longest(self, parent: Node, key: bytes) -> tuple[Node | None, int]:
        """The child of `parent` that shares most leading tokens with `key`, and how many; memory before disk."""
        best, most = None, 0
        for child in parent.children.values():
            if child.present and child.key:
                shared = common_tokens(child.key, key)
                if shared > most or (shared == most > 0 and best is not None and best.slot is None):
                    best, most = child, shared
        return best, most

    def states(self, path: list[Node], key: bytes) -> Iterator[Node]:
        """States after tokens that begin `key` (whose full blocks are `path`), longest first."""
        for depth in range(len(path), -1, -1):
            last = path[depth - 1] if depth else self.root
            rest = after(key, depth * BLOCK_TOKENS)
            partial = [
                child.state
                for child in last.children.values()
                if child.key and child.tokens < BLOCK_TOKENS and child.present and rest.startswith(child.key)
                and child.state is not None and child.state.present
            ]  # fmt: skip
            yield from sorted(partial, key=lambda node: -node.end)
            if depth and last.state is not None and last.state.present:
                yield last.state

    def place(self, node: Node, slot: Any) -> None:
        """Give a block its place in memory."""
        node.slot = slot
        self.in_memory[node] = None

    def unplace(self, node: Node) -> Any:
        """Take its place in memory away; returns it."""
        slot, node.slot = node.slot, None
        del self.in_memory[node]
        return slot

    def touch(self, path: Sequence[Node]) -> None:
        """Used just now: parents count as used after their children, so that these go first."""
        for node in reversed(path):
            if node.slot is not None:
                self.in_memory.move_to_end(node)

    def prune(self, node: Node) -> None:
        """Remove blocks that are nowhere and lead nowhere, from this one upwards."""
        while node.parent is not None and not (node.present or node.children or node.queued or node in self.pinned):
            if node.parent.children.get(node.key) is node:
                del node.parent.children[node.key], self.by_digest[node.digest]
            node = node.parent

    def covered(self, node: Node) -> bool:
        """Whether a partial block holds nothing that one beside it does not hold."""
        if node.parent is None or node.is_state or node.children:
            return False
        beside = node.parent.children.values()
        return any(one is not node and one.present and one.key.startswith(node.key) for one in beside)


def after(key: bytes, tokens: int) -> bytes:
    """The key without its first tokens."""
    return key[tokens * _WIDTH :]


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two keys share."""
    length = min(len(a), len(b)) // _WIDTH
    if a[: length * _WIDTH] == b[: length * _WIDTH]:
        return length
    mine, theirs = memoryview(a)[: length * _WIDTH].cast("i"), memoryview(b)[: length * _WIDTH].cast("i")
    return next(i for i in range(length) if mine[i] != theirs[i])
