"""The prefix cache of one model: fills a new sequence with what earlier ones computed, and remembers finished ones.

Decides what is kept, what goes and when; bytes are moved by places.py, files are disk.py's. All calls but `stats` come
from one thread, the engine's. What it gives is bit for bit what was computed; what it cannot give is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import StokerError
from stoker.generate.prefix.disk import Directory, give_back
from stoker.generate.prefix.segments import Draft, Segment, checksum
from stoker.generate.prefix.tree import BLOCK_TOKENS, Node, Tree, after, key_of, tokens_of

if TYPE_CHECKING:
    from stoker.generate.prefix.places import Places

SEGMENT_BYTES = 16 << 20
READERS = 2
WRITE_TIMEOUT_S = 10.0  # a disk that takes longer for one segment has no say in who gets memory
# A chat template ends a prompt with a few tokens that the next turn's rendering does not repeat (it may leave out the
# reasoning); a state kept this many tokens before the end is still in front of them.
STATE_MARGIN_TOKENS = 8
STATE_STEP_TOKENS = 2048  # and one so often on the way, for prompts that are edited in the middle


@dataclass(frozen=True)
class Piece:
    """A block's place on disk."""

    segment: Segment
    index: int

    @property
    def gone(self) -> bool:
        return self.segment.gone


@dataclass
class Counts:
    """Since the start; the ram figures are what is held now."""

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    disk_hit_tokens: int = 0
    disk_reads: int = 0
    disk_read_bytes: int = 0
    evictions: int = 0
    ram_blocks: int = 0
    ram_bytes: int = 0


class PrefixCache:
    """`match` before a prompt is computed, `keep` at good moments and at the end, `close` before the runtime's."""

    def __init__(self, places: Places, fingerprint: bytes, directory: Directory | None = None) -> None:
        self._places, self._fingerprint, self._directory = places, fingerprint, directory
        self._tree = Tree(fingerprint)
        self._finished: deque[tuple[list[Node], list[Any], Segment | None]] = deque()  # filled by the writing thread
        self._landed: list[Node] = []
        self._segments: set[Segment] = set()
        self._swept = 0
        self._counts = Counts()
        self._closed = False
        self._readers = ThreadPoolExecutor(READERS, "stoker-prefix-reader") if directory is not None else None
        if directory is not None:
            for segment in directory.segments(fingerprint):
                self._learn(segment)
            for node in list(self._tree.by_digest.values()):
                self._drop_if_covered(node)

    # ---- what the engine calls ---------------------------------------------------------------------------------------

    def match(self, sequence: Any, ids: Sequence[int], leave: int = 1) -> int:
        """Fill an empty sequence with the longest kept prefix of `ids`, all but the last `leave` at most; tokens
        filled."""
        assert sequence.length == 0
        self._collect()
        self._counts.lookups += 1
        self._counts.lookup_tokens += len(ids)
        key = key_of(ids[:-leave])
        path = self._tree.walk(key)
        find = self._match_state if self._places.stateful else self._match_rows
        filled = find(sequence, ids, path, key)
        self._tree.pinned.clear()
        self._counts.hits += filled > 0
        self._counts.hit_tokens += filled
        return filled

    def keep_blocks(self, sequence: Any) -> None:
        """Remember the full blocks of a sequence that goes on: others may begin alike before it ends."""
        if not self._places.stateful:
            self._collect()
            path = self._hold_rows(sequence, _shareable(sequence) // BLOCK_TOKENS * BLOCK_TOKENS)
            self._touch(path)
            self._write(path)

    def keep(self, sequence: Any) -> None:
        """Remember every token of the sequence, which may go on or be closed; where routes depend on more than the
        text, every token that has a prompt's."""
        self._collect()
        path = self._hold_rows(sequence, _shareable(sequence))
        if self._places.stateful and path and path[-1].end == sequence.length:
            state = self._tree.child(path[-1], b"")
            if self._hold(sequence, state, path):
                path.append(state)
            else:
                self._tree.prune(state)
        for node in path:
            for beside in list(node.parent.children.values()) if node.parent is not None else ():
                self._drop_if_covered(beside)
        path = [node for node in path if node.slot is not None]
        self._touch(path)
        self._write(path)

    def pause(self, done: int, total: int) -> int:
        """Where a prefill of `total` tokens, `done` of which are there, should call `keep` on its way; or `total`."""
        step, early = (done // STATE_STEP_TOKENS + 1) * STATE_STEP_TOKENS, total - STATE_MARGIN_TOKENS
        return min(step, early) if self._places.stateful and done < early else total

    def make_room(self, tokens: int) -> bool:
        """Give up kept blocks until the KV pool has so many free tokens; whether it has."""
        self._collect()
        pool = getattr(self._places, "pool", None)
        if pool is None:
            return True
        self.reclaim(-(-tokens // BLOCK_TOKENS))
        return bool(pool.free_tokens >= tokens)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now; disk figures are of the directory, over all models."""
        disk = self._directory
        return vars(self._counts) | {
            "disk_bytes": 0 if disk is None else disk.total_bytes,
            "disk_writes": 0 if disk is None else disk.counts.writes,
            "disk_written_bytes": 0 if disk is None else disk.counts.written_bytes,
            "disk_evictions": 0 if disk is None else disk.counts.evictions,
            "disk_pending": 0 if disk is None else disk.pending,
            "discarded": 0 if disk is None else disk.counts.discarded,
        }

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was kept is on disk; whether it is."""
        there = self._directory is None or self._directory.settle(timeout_s)
        self._collect()
        return there

    def close(self) -> None:
        """Write what is queued, give back every block. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._directory is not None:
            self._directory.settle(10.0)
            self._directory.abandon(self._fingerprint)
            give_back(self._directory)
        if self._readers is not None:
            self._readers.shutdown()
        self._collect()
        for node in list(self._tree.in_memory):
            self._unplace(node)

    # ---- the KV pool's keeper ----------------------------------------------------------------------------------------

    def reclaim(self, blocks: int) -> None:
        """See `runtime.kv.Keeper`."""
        pool = self._places.pool  # type: ignore[attr-defined]
        self._evict(lambda: pool.free_tokens >= blocks * BLOCK_TOKENS)

    def release(self, block: int) -> None:
        """See `runtime.kv.Keeper`."""
        for node in list(self._tree.in_memory):
            if node.slot == block and node not in self._tree.pinned:
                self._unplace(node)
                self._tree.prune(node)
                return

    def _evict(self, enough: Callable[[], bool]) -> None:
        """Drop blocks that nobody uses, least recently used first, leaves before their parents."""
        while not enough():
            before = self._counts.evictions
            for node in list(self._tree.in_memory):
                if enough():
                    return
                used = node in self._tree.pinned or any(child.slot is not None for child in node.children.values())
                if not used and self._places.idle(node.slot):
                    self._counts.evictions += 1
                    self._unplace(node)
                    self._tree.prune(node)
            # What is being written cannot go before it is. Asked before looking at what was written: an order that ends
            # in between is seen there.
            pending = 0 if self._directory is None else self._directory.pending
            if self._finished:
                self._land()
            elif pending:
                assert self._directory is not None
                if not self._directory.settle(WRITE_TIMEOUT_S, orders=pending - 1) and not self._finished:
                    return
            elif self._counts.evictions == before:
                return

    # ---- match -------------------------------------------------------------------------------------------------------

    def _match_rows(self, sequence: Any, ids: Sequence[int], path: list[Node], key: bytes) -> int:
        """Any number of tokens can be taken up: full blocks, then the beginning of one more."""
        end = path[-1].end if path else 0
        partial, shared = self._tree.longest(path[-1] if path else self._tree.root, after(key, end))
        nodes = [*path, partial] if partial is not None and shared else path
        there = nodes[: self._bring(nodes)]
        if not there:
            return 0
        tokens = end + shared if len(there) > len(path) else there[-1].end
        self._places.fill(sequence, list(ids[:tokens]), there, None)
        self._touch(there)
        return tokens

    def _match_state(self, sequence: Any, ids: Sequence[int], path: list[Node], key: bytes) -> int:
        """Only where a state was kept can a sequence be taken up; the longest that can be read."""
        for state in list(self._tree.states(path, key)):
            assert state.parent is not None
            nodes = [*path[: state.parent.start // BLOCK_TOKENS], state.parent, state]
            if self._bring(nodes) == len(nodes):
                self._places.fill(sequence, list(ids[: state.end]), nodes[:-1], state)
                self._touch(nodes)
                return state.end
        return 0

    def _bring(self, nodes: Sequence[Node]) -> int:
        """Read into memory what is only on disk; how many of the first are in memory then. Leaves `nodes` pinned."""
        self._tree.pinned = set(nodes)
        reads: list[tuple[Node, Any, Future[str | None]]] = []
        for node in nodes:
            if node.slot is None:
                slot = self._blank(node)
                if slot is None:
                    break
                assert self._readers is not None
                reads.append((node, slot, self._readers.submit(self._read, node.piece, slot)))
        lost = [(node, problem) for node, slot, outcome in reads if (problem := self._arrived(node, slot, outcome))]
        for node, problem in lost:
            self._lose(node, problem)
        return next((i for i, node in enumerate(nodes) if node.slot is None), len(nodes))

    def _arrived(self, node: Node, slot: Any, outcome: Future[str | None]) -> str | None:
        """Give a block its place when it was read; what is wrong with it, or None."""
        problem = outcome.result()
        if problem is not None:
            self._places.drop(slot)
            return problem
        self._place(node, slot)
        self._counts.disk_hit_tokens += node.tokens
        self._counts.disk_reads += 1
        self._counts.disk_read_bytes += self._places.nbytes(slot)
        return None

    def _blank(self, node: Node) -> Any | None:
        if _on_no_disk(node):
            return None
        nbytes = node.piece.segment.parts[node.piece.index].nbytes
        self._evict(lambda: not self._places.lacks(nbytes))
        return self._places.blank(nbytes)

    def _read(self, piece: Piece, slot: Any) -> str | None:
        """What is wrong with a block on disk, or None. Runs on a reading thread."""
        part = piece.segment.parts[piece.index]
        try:
            self._places.read(slot, piece.segment.path, part.offset)
        except StokerError as problem:
            return "it cannot be read: " + problem.what
        return None if checksum(self._places.view(slot)) == part.checksum else "the checksum of a block is wrong"

    def _lose(self, node: Node, problem: str) -> None:
        """A block could not be read: its file is of no use."""
        if node.piece is not None and self._directory is not None:
            segment = node.piece.segment
            self._directory.discard(segment, problem)
            self._forget_segment(segment)

    # ---- keep --------------------------------------------------------------------------------------------------------

    def _hold_rows(self, sequence: Any, tokens: int) -> list[Node]:
        """The blocks of a sequence's first tokens, each with a place in memory, as far as there is room."""
        key, width = key_of(sequence.ids[:tokens]), BLOCK_TOKENS * len(key_of([0]))
        path: list[Node] = []
        node = self._tree.root
        for at in range(0, len(key), width):
            part = key[at : at + width]
            if tokens_of(part) < BLOCK_TOKENS and not self._places.stateful:
                longer, shared = self._tree.longest(node, part)
                if longer is not None and shared == tokens_of(part):
                    break  # what is left is the beginning of a block that is kept
            node = self._tree.child(node, part)
            if not self._hold(sequence, node, path):
                self._tree.prune(node)
                break
            path.append(node)
        return path

    def _hold(self, sequence: Any, node: Node, path: list[Node]) -> bool:
        """Give a block of a sequence its place in memory; False where there is no room for it."""
        if node.slot is None:
            nbytes = self._places.size(sequence, node)
            self._tree.pinned = {*path, node}
            self._evict(lambda: not self._places.lacks(nbytes))
            self._tree.pinned.clear()
            if self._places.lacks(nbytes):
                return False
            slot, node.meta = self._places.hold(sequence, node)
            self._place(node, slot)
        return True

    def _drop_if_covered(self, node: Node) -> None:
        """Forget a partial block that a longer one has made useless, in memory and on disk."""
        if node.queued or not self._tree.covered(node):
            return
        if node.piece is not None and self._directory is not None:
            segment = node.piece.segment
            if len(segment.parts) == 1:
                self._directory.discard(segment, None)
                self._segments.discard(segment)
            node.piece = None
        if node.slot is not None:
            self._unplace(node)
        self._tree.prune(node)

    def _place(self, node: Node, slot: Any) -> None:
        self._tree.place(node, slot)
        self._counts.ram_blocks += 1
        self._counts.ram_bytes += self._places.nbytes(slot)

    def _unplace(self, node: Node) -> None:
        slot = self._tree.unplace(node)
        self._counts.ram_blocks -= 1
        self._counts.ram_bytes -= self._places.nbytes(slot)
        self._places.drop(slot)

    def _touch(self, path: Sequence[Node]) -> None:
        self._tree.touch(path)
        if self._directory is not None:
            segments = dict.fromkeys(node.piece.segment for node in reversed(path) if node.piece is not None)
            self._directory.touch(list(segments))

    def _write(self, path: Sequence[Node]) -> None:
        """Queue what is in memory alone, in files of consecutive blocks; a partial block and its state apart."""
        run: list[Node] = []
        nbytes = 0
        for node in path if self._directory is not None else ():
            wanted = not node.queued and _on_no_disk(node)
            apart = node.tokens < BLOCK_TOKENS and bool(run) and run[-1].tokens == BLOCK_TOKENS
            if run and (not wanted or apart or nbytes >= SEGMENT_BYTES):
                self._order(run)
                run, nbytes = [], 0
            if wanted:
                run.append(node)
                nbytes += self._places.nbytes(node.slot)
        if run:
            self._order(run)

    def _order(self, nodes: list[Node]) -> None:
        assert self._directory is not None and nodes[0].parent is not None
        blocks = [(node.key, node.meta, self._places.view(node.slot)) for node in nodes]
        pins = [self._places.pin(node.slot) for node in nodes]
        draft = Draft(self._fingerprint, nodes[0].parent.digest, nodes[0].start, blocks)
        for node in nodes:
            node.queued = True
        if not self._directory.write(draft, lambda segment: self._finished.append((nodes, pins, segment))):
            self._finished.append((nodes, pins, None))

    # ---- the disk's news ---------------------------------------------------------------------------------------------

    def _land(self) -> None:
        """Let go of what was written."""
        while self._finished:
            nodes, pins, segment = self._finished.popleft()
            for pin in pins:
                self._places.drop(pin)
            for node in nodes:
                node.queued = False
            if segment is not None:
                self._adopt(segment, nodes)
            self._landed += nodes

    def _collect(self) -> None:
        """Take note of what was written and of files that are gone; between calls only, for blocks vanish."""
        self._land()
        landed, self._landed = self._landed, []
        for node in reversed(landed):
            self._drop_if_covered(node)
            self._tree.prune(node)
        evictions = 0 if self._directory is None else self._directory.counts.evictions
        if evictions != self._swept:
            self._swept = evictions
            for segment in [one for one in self._segments if one.gone]:
                self._forget_segment(segment)

    def _adopt(self, segment: Segment, nodes: list[Node]) -> None:
        segment.nodes = nodes
        for index, node in enumerate(nodes):
            node.piece = Piece(segment, index)
        self._segments.add(segment)

    def _forget_segment(self, segment: Segment) -> None:
        self._segments.discard(segment)
        for node in reversed(segment.nodes):
            if node.piece is not None and node.piece.segment is segment:
                node.piece = None
                self._tree.prune(node)

    def _learn(self, segment: Segment) -> None:
        """Put a file that an earlier process wrote into the tree, or remove it where it cannot be of use."""
        assert self._directory is not None
        node = self._tree.by_digest.get(segment.parent)
        if node is None or node.end != segment.start:
            self._directory.discard(segment, None)  # what comes before it is gone
            return
        for part in segment.parts:
            expected = self._places.expected_bytes(tokens_of(part.key))
            if tokens_of(part.key) > BLOCK_TOKENS or (expected is not None and part.nbytes != expected):
                self._directory.discard(segment, "a block has the wrong size")
                return
        nodes = []
        for part in segment.parts:
            node = self._tree.child(node, part.key)
            node.meta = part.meta
            nodes.append(node)
        self._adopt(segment, nodes)


def _shareable(sequence: Any) -> int:
    length = int(sequence.length)
    return length if sequence.routing is None else int(sequence.routing.shareable(length))


def _on_no_disk(node: Node) -> bool:
    return node.piece is None or node.piece.gone
