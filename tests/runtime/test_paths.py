"""A path, a policy, a budget or a chunk size changes when bytes move, never the numbers."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoker.errors import ReadError
from stoker.runtime import ledger, plan
from stoker.runtime.model import Options, Runtime, load
from tests.runtime.conftest import Packer
from tests.runtime.tiny import VOCABULARY

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen3_5_moe")
PATHS = ("exact", "staged", "hot", "whole_layer", "auto")


def ids_of(tokens: int, seed: int = 11) -> list[int]:
    return torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Grant so many slots a layer: a budget cannot be cut that finely around a test process of 400 MB."""

    def grant(count: int) -> None:
        def planned(budget: int, needs: ledger.Needs, **options: int) -> ledger.Ledger:
            return dataclasses.replace(ledger.plan_memory(budget, needs, **options), slots=(count,) * len(needs.pools))

        monkeypatch.setattr(plan, "plan_memory", planned)

    return grant


def answer(runtime: Runtime, prompt: list[int], forced: list[int]) -> Tensor:
    """Logits after the prompt and after each forced token: [1 + N, V]."""
    sequence = runtime.new_sequence()
    rows = [runtime.prefill(sequence, prompt)]
    rows += [runtime.decode([sequence], [token])[0] for token in forced]
    sequence.close()
    return torch.stack(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_gives_the_same_bits(name: str, packed: Packer, slots: Callable[[int], None]) -> None:
    slots(4)
    store, prompt, forced = packed(name, 4), ids_of(21), ids_of(24, seed=12)
    results = {}
    for path in PATHS:
        with load(store, Options(memory="8GiB", ctx_size=128, path=path)) as runtime:
            results[path] = answer(runtime, prompt, forced)
            stats = runtime.stats()
        assert stats["dropped_experts"] == 0
        if path == "staged":
            assert stats["prefetch_bytes"] > 0, "staged reads ahead"
        if path == "exact":
            assert stats["hits"] == 0, "exact keeps nothing"
    for path in PATHS[1:]:
        assert torch.equal(results[path], results["exact"]), path


@pytest.mark.parametrize("policy", ["lru", "decayed-lfu", "lfru", "s3-fifo", "arc"])
def test_few_slots_and_any_policy_give_the_same_bits(policy: str, packed: Packer, slots: Callable[[int], None]) -> None:
    """With K slots a layer almost every step evicts; the answer is that of a resident model."""
    store, prompt, forced = packed("qwen3_moe", 4), ids_of(5), ids_of(40, seed=13)
    with load(store, Options(memory="8GiB", ctx_size=128)) as runtime:
        runtime.residency.warm()
        resident = answer(runtime, prompt, forced)
    slots(2)
    with load(store, Options(memory="8GiB", ctx_size=128, policy=policy)) as runtime:
        assert runtime.budget.slots == (2, 2, 2)
        streamed = answer(runtime, prompt, forced)
        assert runtime.stats()["evictions"] > 20
    assert torch.equal(streamed, resident)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_any_size_give_the_same_bits(chunk: int, packed: Packer) -> None:
    store, prompt = packed("qwen3_moe", 4), ids_of(50)
    with load(store, Options(memory="8GiB", ctx_size=128, prefill_chunk=128)) as runtime:
        whole = answer(runtime, prompt, [])
    with load(store, Options(memory="8GiB", ctx_size=128, prefill_chunk=chunk)) as runtime:
        assert torch.equal(answer(runtime, prompt, []), whole)


def test_sequences_of_a_batch_do_not_touch_each_other(packed: Packer) -> None:
    """Decoding four sequences together gives each the bits that it has alone."""
    prompts = [ids_of(n, seed=n) for n in (3, 9, 17, 30)]
    with load(packed("qwen3_moe", 4), Options(memory="8GiB", ctx_size=512)) as runtime:
        alone = [answer(runtime, prompt, ids_of(6, seed=20)) for prompt in prompts]
        sequences = [runtime.new_sequence() for _ in prompts]
        rows = [[runtime.prefill(sequence, prompt)] for sequence, prompt in zip(sequences, prompts, strict=True)]
        for token in ids_of(6, seed=20):
            for row, logits in zip(rows, runtime.decode(sequences, [token] * 4), strict=True):
                row.append(logits)
    for row, expected in zip(rows, alone, strict=True):
        assert torch.equal(torch.stack(row), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_can_be_cut_and_continued(name: str, packed: Packer) -> None:
    prompt = ids_of(20)
    with load(packed(name, 4), Options(memory="8GiB", ctx_size=128)) as runtime:
        fresh = answer(runtime, [*prompt, 5, 6], [])
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, [*prompt, 9, 9, 9, 9])
        kept = sequence.truncate(len(prompt))
        again = runtime.prefill(sequence, [*prompt, 5, 6][kept:])
        assert kept in (0, len(prompt))
        assert (again - fresh[0]).norm() / fresh[0].norm() < 1e-2


@pytest.mark.parametrize("path", ["exact", "staged", "hot", "whole_layer"])
def test_a_read_that_fails_ends_the_step_and_nothing_else(
    path: str, packed: Packer, slots: Callable[[int], None]
) -> None:
    """Injected below the queue at every n: one clear error, and the next attempt gives the right numbers."""
    slots(4)
    store, prompt, forced = packed("qwen3_moe", 4), ids_of(6), ids_of(3, seed=14)
    with load(store, Options(memory="8GiB", ctx_size=128, path=path)) as runtime:
        right = answer(runtime, prompt, forced)
    failures = 0
    for nth in range(1, 25):
        with load(store, Options(memory="8GiB", ctx_size=128, path=path)) as runtime:
            runtime.queue.inject(nth, "eio")
            try:
                got = answer(runtime, prompt, forced)
            except ReadError as error:
                failures += 1
                assert "pool" in str(error) and "experts-" in str(error)
                got = answer(runtime, prompt, forced)
            assert torch.equal(got, right)
    assert failures > 0
