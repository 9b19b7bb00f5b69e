"""A step of parts of several sequences: rows in the order asked, equal to single steps, undone when it fails."""

import random

import pytest
import torch

from stoker.errors import OptionError
from stoker.runtime.depth import FOR_MANY
from stoker.runtime.model import FEW_TOKENS, Options, load
from stoker.runtime.sequence import CacheSequence, cache_state_bytes
from stoker.runtime.step import Part
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer
from tests.runtime.tiny import VOCABULARY

PROMPT = list(range(3, 80))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_parts_of_a_step_equal_steps_of_their_own(name: str, packed: Packer) -> None:
    options = Options(memory="8GiB", ctx_size=128, kv_tokens=512, prefill_chunk=32, threads=1)
    with load(packed(name, 4), options) as runtime:
        alone = runtime.new_sequence()
        wanted = [runtime.prefill(alone, PROMPT), runtime.decode([alone], [9])[0], runtime.decode([alone], [4])[0]]
        company = runtime.new_sequence()
        other = [runtime.prefill(company, [5, 6])] + [runtime.decode([company], [7])[0] for _ in range(4)]
        first, second = runtime.new_sequence(), runtime.new_sequence()
        assert torch.equal(runtime.advance([Part(second, [5, 6])])[0], other[0])
        for index, begin in enumerate((0, 32, 64)):
            rows = runtime.advance(
                [Part(first, PROMPT[begin : begin + 32], wants_logits=begin == 64), Part(second, [7], decode=True)]
            )
            assert len(rows) == 1 + (begin == 64)
            assert torch.equal(rows[-1], other[1 + index])
        assert torch.equal(rows[0], wanted[0]), "rows come in the order of the parts, though answers are computed first"
        rows = runtime.advance([Part(second, [7], decode=True), Part(first, [9, 4])])
        assert torch.equal(rows[0], other[4])
        if runtime.kv is not None:
            assert torch.equal(rows[1], wanted[2])
        none = runtime.advance([Part(first, [1], wants_logits=False)])
        assert none.shape == (0, runtime.vocab_size) and first.length == len(PROMPT) + 3


def test_a_step_that_fails_leaves_every_sequence_as_it_was(packed: Packer) -> None:
    options = Options(memory="8GiB", ctx_size=128, kv_tokens=512, threads=1)
    with load(packed("qwen3_moe", 4), options) as runtime:
        first, second = runtime.new_sequence(), runtime.new_sequence()
        runtime.prefill(first, PROMPT)
        with pytest.raises(OptionError, match="vocabulary"):
            runtime.advance([Part(first, [5], decode=True), Part(second, [10**6])])
        assert (first.length, second.length) == (len(PROMPT), 0)
        again = runtime.advance([Part(first, [5], decode=True)])
        fresh = runtime.new_sequence()
        runtime.prefill(fresh, PROMPT)
        assert torch.equal(again, runtime.decode([fresh], [5]))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "lfm2_moe"])
def test_the_states_of_hybrid_models_are_priced(name: str, packed: Packer) -> None:
    """The price is what a sequence's cache holds beside keys and values; `parallel` multiplies it in the ledger."""
    with load(packed(name, 4), Options(memory="8GiB", ctx_size=64, threads=1)) as runtime:
        sequence = runtime.new_sequence()
        assert isinstance(sequence, CacheSequence)
        runtime.prefill(sequence, PROMPT[:20])
        held = sum(
            state.numel() * state.element_size()
            for layer in sequence.cache.layers
            for kind in ("conv_states", "recurrent_states")
            for state in getattr(layer, kind, {}).values()
            if state is not None
        )
        priced, one = cache_state_bytes(runtime.config), runtime.ledger()["kv_bytes"]
    assert 0 < held <= priced <= 1.25 * held
    with load(packed(name, 4), Options(memory="8GiB", ctx_size=64, threads=1, parallel=5)) as runtime:
        assert runtime.ledger()["kv_bytes"] == one + 4 * priced


def test_a_cache_below_one_context_is_refused() -> None:
    with pytest.raises(OptionError, match="longest sequence"):
        Options(ctx_size=4096, kv_tokens=2048)
    with pytest.raises(OptionError, match="at least one sequence"):
        Options(parallel=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe"])
def test_no_composition_of_a_step_changes_a_bit(name: str, packed: Packer) -> None:
    """Random parts of six sequences, answers beside prompts, with and without room for the experts: every row of logits
    is the one that its sequence gives alone, a token at a time."""
    source, length = random.Random(0), 150
    texts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(6)]
    slots = (3,) * len(open_store(packed(name, 4)).pools)
    options = Options(memory="8GiB", ctx_size=192, kv_tokens=1920, prefill_chunk=32, threads=1, slots=slots)
    with load(packed(name, 4), options) as runtime:
        wanted = []
        for text in texts:
            alone = runtime.new_sequence()
            wanted.append([runtime.advance([Part(alone, [token], decode=True)])[0].clone() for token in text])
            alone.close()
        for _ in range(3):
            sequences = [runtime.new_sequence() for _ in texts]
            while open_ones := [i for i, sequence in enumerate(sequences) if sequence.length < length]:
                chosen = source.sample(open_ones, source.randint(1, len(open_ones)))
                answers = [i for i in chosen if source.random() < 0.6]
                parts = [Part(sequences[i], [texts[i][sequences[i].length]], decode=True) for i in answers]
                for i in (one for one in chosen if one not in answers):
                    first = sequences[i].length
                    parts.append(Part(sequences[i], texts[i][first : first + source.randint(1, 32)]))
                rows = runtime.advance(parts)
                for part, row in zip(parts, rows, strict=True):
                    index = next(i for i, sequence in enumerate(sequences) if sequence is part.sequence)
                    assert torch.equal(row, wanted[index][part.sequence.length - 1])
            for sequence in sequences:
                sequence.close()


def test_reads_in_flight_follow_the_step(packed: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured for one answer alone, at least four for several; a depth that is named is kept."""
    for depth, many in ((None, FOR_MANY), (2, 2)):
        options = Options(memory="8GiB", ctx_size=128, kv_tokens=512, threads=1, parallel=4, depth=depth)
        with load(packed("qwen3_moe", 4), options) as runtime:
            told: list[int] = []
            monkeypatch.setattr(runtime.queue, "allow", told.append)
            first, second = runtime.new_sequence(), runtime.new_sequence()
            runtime.prefill(first, [5, 6])
            runtime.prefill(second, [7])
            runtime.decode([first, second], [8, 9])
            assert told == [runtime.depth, runtime.depth, runtime.queue.depth] and runtime.queue.depth >= many
            assert depth is None or runtime.queue.depth == depth


def test_small_steps_leave_torch_one_thread(packed: Packer) -> None:
    before, seen = torch.get_num_threads(), []
    with load(packed("qwen3_moe", 4), Options(memory="8GiB", ctx_size=256, threads=2)) as runtime:
        runtime.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, list(range(3, 3 + FEW_TOKENS + 1)))
        runtime.decode([sequence], [5])
        assert seen == [2, 1] and torch.get_num_threads() == 2
    torch.set_num_threads(before)
