"""The pool of KV blocks as a state machine: sequences, sharing, a keeper, against plain lists of what was written."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.errors import OptionError
from stoker.runtime.kv import BLOCK_TOKENS, KVPool, KVShape, PagedSequence

SHAPE = KVShape(layers=1, kv_heads=1, head_dim=2)  # 8 bytes a token: enough to write the token's own number
CAPACITY = 6


def cell(pool: KVPool, block: int, place: int) -> torch.Tensor:
    return pool.contents(block).view(torch.int64)[place : place + 1]


class Kept:
    """A keeper of the simplest kind: full or partial blocks in the order in which they came."""

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.blocks = pool, list[int]()

    def reclaim(self, blocks: int) -> None:
        for block in list(self.blocks):
            if self.pool.free_tokens >= blocks * BLOCK_TOKENS:
                return
            if self.pool.holders(block) == 1:
                self.blocks.remove(block)
                self.pool.give([block])

    def release(self, block: int) -> None:
        if block in self.blocks:
            self.blocks.remove(block)
            self.pool.give([block])


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(SHAPE, CAPACITY * BLOCK_TOKENS)
        self.keeper = Kept(self.pool)
        self.pool.keeper = self.keeper
        self.sequences: list[PagedSequence] = []
        self.next_id = 1

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.close()
        self.keeper.reclaim(CAPACITY)
        assert self.pool.free_tokens == CAPACITY * BLOCK_TOKENS, "every block came back"
        self.pool.close()

    @rule()
    def begin(self) -> None:
        if len(self.sequences) < 4:
            self.sequences.append(PagedSequence(self.pool))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), tokens=st.integers(1, 100))
    def write(self, which: int, tokens: int) -> None:
        """Reserve, write and append; a full pool refuses and changes nothing that was written."""
        sequence = self.sequences[which % len(self.sequences)]
        try:
            sequence.reserve(tokens)
        except OptionError:
            assert self.pool.free_tokens < tokens + BLOCK_TOKENS
            return
        ids = list(range(self.next_id, self.next_id + tokens))
        self.next_id += tokens
        for place, token in enumerate(ids, sequence.length):
            block = sequence.blocks[place // BLOCK_TOKENS]
            assert self.pool.holders(block) == 1, "a write to a block that another holds"
            cell(self.pool, block, place % BLOCK_TOKENS).fill_(token)
        sequence.append(ids)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), length=st.integers(0, 400))
    def truncate(self, which: int, length: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        assert sequence.truncate(min(length, sequence.length)) == sequence.length

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), length=st.integers(1, 400))
    def adopt(self, which: int, length: int) -> None:
        """A new sequence from the beginning of another, cut anywhere."""
        source = self.sequences[which % len(self.sequences)]
        length = min(length, source.length)
        if length and len(self.sequences) < 4:
            twin = PagedSequence(self.pool)
            twin.adopt(source.blocks[: -(-length // BLOCK_TOKENS)], source.ids[:length])
            self.sequences.append(twin)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3))
    def keep(self, which: int) -> None:
        for block in self.sequences[which % len(self.sequences)].blocks:
            if block not in self.keeper.blocks:
                self.keeper.blocks.append(self.pool.share(block))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        self.sequences.pop(which % len(self.sequences)).close()

    @invariant()
    def contents_are_what_was_written(self) -> None:
        for sequence in self.sequences:
            for place, token in enumerate(sequence.ids):
                assert int(cell(self.pool, sequence.blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS)) == token

    @invariant()
    def blocks_are_counted(self) -> None:
        held = [block for sequence in self.sequences for block in sequence.blocks] + self.keeper.blocks
        for block in range(CAPACITY):
            assert self.pool.holders(block) == held.count(block)
        assert self.pool.free_tokens == (CAPACITY - len(set(held))) * BLOCK_TOKENS


PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPool = PoolMachine.TestCase


def test_what_nobody_holds_cannot_be_given_or_shared() -> None:
    pool = KVPool(SHAPE, 2 * BLOCK_TOKENS)
    block = pool.take()
    pool.give([block])
    with pytest.raises(AssertionError):
        pool.give([block])
    with pytest.raises(AssertionError):
        pool.share(block)
    pool.close()


def test_a_full_pool_says_so() -> None:
    pool = KVPool(SHAPE, BLOCK_TOKENS)
    sequence = PagedSequence(pool)
    with pytest.raises(OptionError, match="the context is full"):
        sequence.reserve(BLOCK_TOKENS + 1)
    pool.close()


def test_the_last_block_of_a_full_pool_can_be_written_though_the_keeper_has_it() -> None:
    """Where there is no room for a copy the keeper lets go, and the sequence writes in place."""
    pool = KVPool(SHAPE, 2 * BLOCK_TOKENS)
    pool.keeper = keeper = Kept(pool)
    sequence = PagedSequence(pool)
    sequence.reserve(100)
    sequence.append(list(range(100)))
    keeper.blocks += [pool.share(block) for block in sequence.blocks]
    sequence.reserve(1)
    assert keeper.blocks == sequence.blocks[:1]
    pool.close()
