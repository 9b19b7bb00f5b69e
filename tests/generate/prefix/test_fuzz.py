"""Random conversations with shared beginnings, edits, retries, restarts, damaged and lost files, in too little memory.

Paged models are compared with a fresh computation, bit for bit. Others are compared with the caches that were kept:
what transformers computes depends in the last bits on how a prompt was cut, so rows and states themselves are compared.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.generate.prefix.segments import SUFFIX
from stoker.generate.prefix.tree import BLOCK_TOKENS
from stoker.runtime import snapshot
from tests.generate.prefix.talk import Talk, some_ids
from tests.runtime.conftest import Packer

CONTEXT = 448


class Prompts:
    """A tree of conversations: the next prompt goes on from, edits, or repeats an earlier one."""

    def __init__(self, source: random.Random) -> None:
        self.source, self.known = source, [some_ids(source, 90)]

    def next(self) -> tuple[list[int], list[int]]:
        """(prompt, tokens that are answered)."""
        source = self.source
        base = list(source.choice(self.known[-6:]))
        kind = source.random()
        if kind < 0.2:  # an edit somewhere, the rest stays
            at = source.randrange(len(base))
            base[at : at + 1] = some_ids(source, source.choice((1, 1, 5)))
        elif kind < 0.4:  # back to an earlier point
            base = base[: source.randrange(1, len(base) + 1)]
        elif kind < 0.5:  # something new
            base = []
        prompt = (base + some_ids(source, source.choice((1, 3, 40, 64, 90))))[: CONTEXT - 20]
        decoded = some_ids(source, source.choice((0, 1, 12)))
        self.known.append(prompt + decoded)
        return prompt, decoded


def disturb(source: random.Random, directory: Path) -> None:
    """What can happen to a file while no server runs."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        return
    file, kind = source.choice(files), source.random()
    if kind < 0.3:
        file.unlink()
    elif kind < 0.6:
        os.truncate(file, source.randrange(file.stat().st_size))
    else:
        raw = bytearray(file.read_bytes())
        raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
        file.write_bytes(raw)


def restarts(talk: Talk, source: random.Random) -> bool:
    """Sometimes begin again, after some files were damaged."""
    if source.random() > 0.15:
        return False
    talk.cache.close()
    assert talk.directory is not None
    for _ in range(source.choice((0, 1, 3))):
        disturb(source, talk.directory)
    talk.cache = talk._open()
    return True


@pytest.mark.parametrize("seed", range(3))
def test_paged(seed: int, packed: Packer, tmp_path: Path) -> None:
    source = random.Random(seed)
    prompts, hits, reborn, evictions = Prompts(source), 0, 0, 0
    with Talk(packed("qwen3_moe", 8), tmp_path, ctx_size=CONTEXT, size_bytes=3 << 20) as talk:
        pool = talk.runtime.kv
        assert pool is not None
        for _ in range(50):
            prompt, decoded = prompts.next()
            cached, logits = talk.answer(prompt, decoded)
            hits += cached
            keeper, pool.keeper = pool.keeper, None
            # The comparison has a pool of its own, so as not to push out what is kept.
            talk.runtime.kv, own = type(pool)(pool.shape, CONTEXT), pool
            try:
                assert torch.equal(logits, talk.fresh(prompt)), (cached, len(prompt))
            finally:
                talk.runtime.kv.close()
                talk.runtime.kv, pool.keeper = own, keeper
            before = talk.cache.stats()["evictions"]
            if restarts(talk, source):
                reborn, evictions = reborn + 1, evictions + before
        assert hits > 2000 and reborn > 2 and evictions > 0
        talk.cache.close()
        assert pool.free_tokens == CONTEXT, "every block came back"
        talk.cache = talk._open()


class Recorded:
    """Copies of every cache that was kept, by its tokens."""

    def __init__(self, cache: Any) -> None:
        self.kept: list[tuple[list[int], list[Tensor], Tensor]] = []
        keep = cache.keep

        def record(sequence: Any) -> None:
            self.kept.append((list(sequence.ids), self.rows(sequence), snapshot.take_state(sequence.cache)[0]))
            keep(sequence)

        cache.keep = record

    @staticmethod
    def rows(sequence: Any) -> list[Tensor]:
        spans = range(0, sequence.length, BLOCK_TOKENS)
        return [snapshot.take_rows(sequence.cache, at, min(at + BLOCK_TOKENS, sequence.length))[0] for at in spans]

    def explains(self, sequence: Any) -> bool:
        """Whether each row and the state are those of some sequence that began with the same tokens."""
        ids = sequence.ids
        for at in range(0, len(ids), BLOCK_TOKENS):
            end = min(at + BLOCK_TOKENS, len(ids))
            found = snapshot.take_rows(sequence.cache, at, end)[0]
            if not any(torch.equal(found, rows) for rows in self._rows(ids, at, end)):
                return False
        states = [state for kept, _, state in self.kept if kept == ids]
        return any(torch.equal(snapshot.take_state(sequence.cache)[0], state) for state in states)

    def _rows(self, ids: list[int], at: int, end: int) -> Iterator[Tensor]:
        """Those of a block [at, end) by sequences that had exactly these tokens in it."""
        for kept, rows, _ in self.kept:
            if kept[:end] == ids[:end] and min(len(kept), at + BLOCK_TOKENS) == end:
                yield rows[at // BLOCK_TOKENS]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss", "lfm2_moe"])
def test_states(name: str, packed: Packer, tmp_path: Path) -> None:
    source = random.Random(5)
    prompts, taken, reborn = Prompts(source), 0, 0
    with Talk(packed(name, 8), tmp_path, ctx_size=CONTEXT, size_bytes=3 << 20, ram_bytes=500_000) as talk:
        recorded = Recorded(talk.cache)
        for _ in range(16):
            prompt, decoded = prompts.next()
            sequence: Any = talk.runtime.new_sequence()
            if talk.cache.match(sequence, prompt):
                taken += 1
                assert sequence.ids == prompt[: sequence.length] and recorded.explains(sequence)
            sequence.close()
            talk.answer(prompt, decoded)
            assert talk.cache.stats()["ram_bytes"] <= 500_000
            if restarts(talk, source):
                reborn += 1
                kept, recorded = recorded.kept, Recorded(talk.cache)
                recorded.kept = kept
        assert taken >= 4 and reborn >= 1
