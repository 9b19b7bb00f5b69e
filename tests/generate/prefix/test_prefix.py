"""What a prompt gets from earlier ones is bit for bit what they computed: every architecture, memory and disk."""

import random
from pathlib import Path

import pytest
import torch

from stoker.generate.prefix import open_prefix_cache, why_not
from stoker.generate.prefix.cache import STATE_MARGIN_TOKENS
from stoker.runtime.model import Options, load
from tests.generate.prefix.talk import PAGED, ROWS, STATES, Talk, some_ids
from tests.runtime.conftest import Packer

TURN = random.Random(7)
FIRST, ANSWER, SECOND = some_ids(TURN, 300), some_ids(TURN, 10), some_ids(TURN, 30)


@pytest.mark.parametrize("name", PAGED)
def test_paged_models_take_up_the_longest_common_prefix(name: str, packed: Packer, tmp_path: Path) -> None:
    """In memory, after a restart, after an edit in the middle: the logits of a fresh computation, to the token."""
    with Talk(packed(name, 8), tmp_path) as talk:
        assert talk.answer(FIRST, ANSWER)[0] == 0
        turn = FIRST + ANSWER + SECOND
        edited = [*turn[:150], turn[150] ^ 1, *turn[151:]]
        fresh, fresh_edited = talk.fresh(turn), talk.fresh(edited)
        assert not torch.equal(fresh, fresh_edited)
        for restart in (False, True):
            if restart:
                talk.reopen()
            cached, logits = talk.answer(turn)
            assert cached == (339 if restart else 310) and torch.equal(logits, fresh)
            cached, logits = talk.answer(edited)
            assert cached == (339 if restart else 150) and torch.equal(logits, fresh_edited)
        stats = talk.cache.stats()
        assert stats["disk_reads"] > 0 and stats["discarded"] == 0


@pytest.mark.parametrize("name", ROWS + STATES)
def test_other_models_are_taken_up_where_they_were_left(name: str, packed: Packer, tmp_path: Path) -> None:
    """The same numbers as a sequence that just went on, which transformers computes in the same pieces."""
    early = len(FIRST) - STATE_MARGIN_TOKENS
    with Talk(packed(name, 8), tmp_path) as talk:
        sequence = talk.runtime.new_sequence()
        for part in [FIRST[:early], FIRST[early:]] if name in STATES else [FIRST]:
            talk.runtime.prefill(sequence, part)
        for token in ANSWER:
            talk.runtime.decode([sequence], [token])
        went_on = talk.runtime.prefill(sequence, SECOND[:-8] if name in STATES else SECOND)
        if name in STATES:
            went_on = talk.runtime.prefill(sequence, SECOND[-8:])
        assert talk.answer(FIRST, ANSWER)[0] == 0
        cached, logits = talk.answer(FIRST + ANSWER + SECOND)
        assert cached == 310 and torch.equal(logits, went_on)
        talk.reopen()
        cached, logits = talk.answer(FIRST + ANSWER + SECOND)
        if name in STATES:
            assert cached == 332 and torch.equal(logits, went_on), "the state before the end of the prompt"
        else:
            assert cached == 339
        other = FIRST[:early] + some_ids(random.Random(1), 20)
        cached, logits = talk.answer(other)
        assert cached == early, "an answer that the template leaves out is no loss"
        if name in STATES:
            assert torch.equal(logits, talk.fresh(FIRST[:early], other[early:-8], other[-8:]))


@pytest.mark.parametrize("name", STATES)
def test_an_edit_before_every_state_starts_afresh(name: str, packed: Packer) -> None:
    with Talk(packed(name, 8)) as talk:
        talk.answer(FIRST)
        edited = [FIRST[0] ^ 1, *FIRST[1:]]
        cached, logits = talk.answer(edited)
        assert cached == 0 and torch.equal(logits, talk.fresh(edited[:-8], edited[-8:]))


def test_a_retry_finds_all_but_the_last_token(packed: Packer) -> None:
    with Talk(packed("qwen3_moe", 8)) as talk:
        fresh = talk.fresh(FIRST)
        talk.answer(FIRST)
        cached, logits = talk.answer(FIRST)
        assert cached == len(FIRST) - 1 and torch.equal(logits, fresh)
        assert talk.answer(FIRST[:1])[0] == 0


def test_memory_is_that_of_the_pool_and_what_nobody_uses_makes_room(packed: Packer) -> None:
    """Conversations of seven times the pool: never an error, the latest are there, all of the pool comes back."""
    source = random.Random(3)
    with Talk(packed("qwen3_moe", 8), ctx_size=512) as talk:
        pool = talk.runtime.kv
        assert pool is not None
        prompts = [some_ids(source, 200) for _ in range(18)]
        for prompt in prompts:
            talk.answer(prompt, prompt[:20])
        stats = talk.cache.stats()
        assert stats["evictions"] > 30 and stats["ram_bytes"] <= pool.blocks * pool.shape.block_bytes
        assert talk.answer(prompts[-1])[0] == 199 and talk.answer(prompts[0])[0] == 0
        assert talk.cache.make_room(512) and pool.free_tokens == 512
        assert talk.cache.stats()["ram_blocks"] == 0
        assert not talk.cache.make_room(513)


def test_a_prompt_as_long_as_the_pool_still_fits(packed: Packer) -> None:
    """The blocks that it shares with what is kept count once, also where it writes in the middle of one."""
    ids = some_ids(random.Random(4), 512)
    with Talk(packed("qwen3_moe", 8), ctx_size=512) as talk:
        other = ids[:300] + ids[:212]
        fresh, fresh_other = talk.fresh(ids), talk.fresh(other)
        talk.answer(ids[:500])
        cached, logits = talk.answer(other)
        assert cached == 300 and torch.equal(logits, fresh_other)
        cached, logits = talk.answer(ids)
        assert cached == 300 and torch.equal(logits, fresh)


def test_evicted_blocks_come_back_from_disk(packed: Packer, tmp_path: Path) -> None:
    source = random.Random(5)
    with Talk(packed("qwen3_moe", 8), tmp_path, ctx_size=512) as talk:
        prompts = [some_ids(source, 250) for _ in range(6)]
        fresh = [talk.fresh(prompt) for prompt in prompts]
        for prompt in prompts:
            talk.answer(prompt)
        for prompt, expected in zip(prompts, fresh, strict=True):
            cached, logits = talk.answer(prompt)
            assert cached == 249 and torch.equal(logits, expected)
        assert talk.cache.stats()["disk_hit_tokens"] > 500


def test_a_kept_sequence_goes_on_without_changing_what_was_kept(packed: Packer) -> None:
    with Talk(packed("qwen3_moe", 8)) as talk:
        sequence = talk.runtime.new_sequence()
        talk.runtime.prefill(sequence, FIRST[:100])
        talk.cache.keep(sequence)
        talk.runtime.prefill(sequence, SECOND)  # writes in the block that is kept
        cached, logits = talk.answer(FIRST)
        assert cached == 100 and torch.equal(logits, talk.fresh(FIRST))
        sequence.close()


def test_what_depends_on_another_model_or_arithmetic_is_never_used(packed: Packer, tmp_path: Path) -> None:
    turn = FIRST + SECOND
    with Talk(packed("qwen3_moe", 8), tmp_path) as talk:
        talk.answer(FIRST)
    for store, options in (
        (packed("qwen3_moe", 4), Options(memory="8GiB", ctx_size=1024)),
        (packed("qwen3_moe", 8), Options(memory="8GiB", ctx_size=1024, activation_bits=8)),
        (packed("olmoe", 8), Options(memory="8GiB", ctx_size=1024)),
    ):
        with Talk(store, tmp_path, runtime=load(store, options)) as talk:
            cached, logits = talk.answer(turn)
            assert cached == 0 and torch.equal(logits, talk.fresh(turn))
            assert talk.cache.stats()["discarded"] == 0
    with Talk(packed("qwen3_moe", 8), tmp_path) as talk:
        assert talk.answer(turn)[0] == len(FIRST), "the others' files did no harm"


def test_models_without_memory_for_prefixes_say_so(packed: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils

    with load(packed("qwen3_5_moe", 8), Options(memory="8GiB", ctx_size=256)) as runtime:
        assert "no memory for kept prefixes" in (why_not(runtime) or "")
        assert open_prefix_cache(runtime) is None
    with load(packed("qwen3_5_moe", 8), Options(memory="8GiB", ctx_size=256, prefix_ram=None)) as runtime:
        assert why_not(runtime) is None and runtime.budget.prefix_bytes > 0

        class Unheard(cache_utils.LinearAttentionLayer):
            pass

        monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "linear_attention", Unheard)
        assert "Unheard" in (why_not(runtime) or "")


def test_copies_keep_to_their_bytes(packed: Packer, tmp_path: Path) -> None:
    """Whatever is kept and in flight to the disk, tensors take no more than was allowed."""
    source, limit = random.Random(6), 400_000
    with Talk(packed("deepseek_v3", 8), tmp_path, ram_bytes=limit) as talk:
        for _ in range(6):
            talk.answer(some_ids(source, 150))
            assert 0 < talk.cache.stats()["ram_bytes"] <= limit
        assert talk.cache.stats()["evictions"] > 0
    with Talk(packed("deepseek_v3", 8), ram_bytes=1000) as talk:
        talk.answer(FIRST)
        assert talk.answer(FIRST)[0] == 0 and talk.cache.stats()["ram_bytes"] == 0
