"""Prerouted decoding against an independent oracle, and against itself on every path, budget, batch and chunk."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.adapter.heads import Head, random_head, warm_head
from stoker.routing.prerouter import Prerouter
from stoker.runtime.heads import NativeHeads
from stoker.runtime.model import Options, Runtime, load
from stoker.runtime.step import Part
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of, relative_l2
from tests.runtime.prerouted import Prerouted
from tests.runtime.routes import RouteRecorder
from tests.runtime.test_architectures import some_ids

WIDTH, EXPERTS, HIDDEN = 64, 8, 24
LAYERS = {"qwen3_moe": [0, 1, 2], "glm4_moe": [1, 2], "deepseek_v3": [1, 2], "gpt_oss": [0, 1, 2, 3]}
PROMPT, ANSWER = 9, 14
NEXT = 20.0  # about what brings the tiny models' embeddings to the size of a normed hidden state
both_kinds = pytest.mark.parametrize("next_scale", [0.0, NEXT], ids=["", "sees_next"])


def some_heads(
    architecture: str, owners: list[int] | None = None, seed: int = 5, next_scale: float = 0.0
) -> dict[int, Head]:
    """Random heads of bf16 values, so that the engine computes with just these."""
    chosen = LAYERS[architecture][:-1] if owners is None else owners
    rounded = {}
    for owner in chosen:
        head = random_head(EXPERTS, WIDTH, HIDDEN, seed + owner, next_scale)
        parts = (part.bfloat16().float() for part in (head.fc1, head.fc2, head.linear_init))
        rounded[owner] = Head(*parts, next_scale=next_scale)
    return rounded


def prerouted(
    store: Path, heads: dict[int, Head], *, top_k: int | None = None, early: bool = True, recorder: object = None,
    **options: object,
) -> Runtime:  # fmt: skip
    runtime = load(store, Options(**({"memory": "8GiB", "ctx_size": 256, "kv_tokens": 1024} | options)), recorder)  # type: ignore[arg-type]
    runtime.follow(Prerouter(NativeHeads(heads), top_k=top_k, early=early))
    return runtime


def greedy(runtime: Runtime, prompt: list[int], tokens: int = ANSWER) -> tuple[list[int], Tensor]:
    """An answer's tokens, and the logits they were taken from."""
    sequence = runtime.new_sequence()
    rows = [runtime.prefill(sequence, prompt)]
    ids: list[int] = []
    while len(ids) < tokens:
        ids.append(int(rows[-1].argmax()))
        if len(ids) < tokens:
            rows.append(runtime.decode([sequence], [ids[-1]])[0])
    sequence.close()
    return ids, torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
@both_kinds
def test_an_answer_is_the_oracle_s(packed: Packer, architecture: str, top_k: int, next_scale: float) -> None:
    """softmax; sigmoid with a correction; sigmoid with groups and another attention. The oracle is fed the engine's
    tokens, so that one near tie does not end the comparison; its routes must be the engine's."""
    store, heads = packed(architecture, 8), some_heads(architecture, next_scale=next_scale)
    prompt, recorder = some_ids(1, PROMPT)[0].tolist(), RouteRecorder()
    with prerouted(store, heads, top_k=top_k, recorder=recorder) as runtime:
        ids, ours = greedy(runtime, prompt)
        counters = runtime.stats()
    taken = recorder.take()
    oracle = Prerouted(oracle_of(open_store(store)), heads, top_k)
    theirs = oracle.logits(prompt + ids[:-1], PROMPT)[PROMPT - 1 :]
    for layer, used in oracle.routes().items():
        assert taken[layer].shape == used.shape == (PROMPT + ANSWER - 1, top_k)
        same = (taken[layer].sort(-1).values == used.sort(-1).values).all(-1)
        assert same.float().mean() > 0.9, f"layer {layer}: {same.tolist()}"
    same_rows = torch.stack(
        [(taken[layer].sort(-1).values == used.sort(-1).values).all(-1) for layer, used in oracle.routes().items()]
    ).all(0)
    until = int(same_rows.float().cumprod(0).sum()) - PROMPT + 1  # after a near tie that fell the other way all differs
    assert until >= 4, same_rows.tolist()
    assert relative_l2(ours[:until], theirs[:until]) < 5e-3
    assert counters["prerouter_fallbacks"] == 0
    assert counters["prerouter_routes"] == (ANSWER - 1) * len(heads)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])
@both_kinds
def test_no_path_and_no_budget_changes_a_bit(packed: Packer, architecture: str, next_scale: float) -> None:
    store, heads = packed(architecture, 4), some_heads(architecture, next_scale=next_scale)
    prompt = some_ids(1, PROMPT)[0].tolist()
    pools = len(open_store(store).pools)
    found = []
    for options in (
        {"path": "hot"}, {"path": "hot", "slots": (2,) * pools}, {"path": "hot", "slots": (3,) * pools},
        {"path": "staged", "slots": (4,) * pools}, {"path": "exact"}, {"path": "whole_layer"}, {"path": "auto"},
    ):  # fmt: skip
        with prerouted(store, heads, **options) as runtime:
            found.append(greedy(runtime, prompt))
            stats = runtime.stats()
            assert stats["prerouter_fallbacks"] == 0 and stats["dropped_experts"] == 0
    with prerouted(store, heads, early=False) as runtime:
        found.append(greedy(runtime, prompt))
    for ids, logits in found[1:]:
        assert ids == found[0][0] and torch.equal(logits, found[0][1])


@both_kinds
def test_what_is_staged_is_what_is_routed(packed: Packer, next_scale: float) -> None:
    """Twice K slots a layer: from the second answer token on, no predicted expert is read on demand."""
    store, heads = packed("qwen3_moe", 4), some_heads("qwen3_moe", next_scale=next_scale)
    for early in (True, False):
        with prerouted(store, heads, path="staged", slots=(4, 4, 4), early=early) as runtime:
            sequence = runtime.new_sequence()
            token = int(runtime.prefill(sequence, some_ids(1, PROMPT)[0].tolist()).argmax())
            own = [False, True, True]  # layer 0 has its gate
            for step in range(12):
                before = runtime.stats()
                token = int(runtime.decode([sequence], [token])[0].argmax())
                after = runtime.stats()
                fallbacks = after["staged_fallbacks"] - before["staged_fallbacks"]
                assert fallbacks <= 2 * own.count(False), f"step {step}: {fallbacks} experts that nobody had staged"
            assert after["prefetch_used"] > 0 and after["prerouter_fallbacks"] == 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])
@both_kinds
def test_batches_chunks_and_recomputing_change_nothing(packed: Packer, architecture: str, next_scale: float) -> None:
    store, heads = packed(architecture, 4), some_heads(architecture, next_scale=next_scale)
    prompts = [some_ids(1, n, seed=n)[0].tolist() for n in (1, 5, 12)]
    with prerouted(store, heads) as runtime:
        alone = [greedy(runtime, prompt) for prompt in prompts]
        sequences = [runtime.new_sequence() for _ in prompts]
        last = []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            for at, token in enumerate(prompt):  # the prompt token by token
                rows = runtime.advance([Part(sequence, [token])])
                assert sequence.routing.gated == at + 1
            last.append(rows[0])
        rows_of = [[row] for row in last]
        for at in range(ANSWER - 1):
            rows = runtime.decode(sequences, [ids[at] for ids, _ in alone])
            for own, row in zip(rows_of, rows, strict=True):
                own.append(row)
        for own, (_, logits) in zip(rows_of, alone, strict=True):
            assert torch.equal(torch.stack(own), logits)
        for sequence in sequences:
            sequence.close()
        # Put back and computed again as one prompt of which the last tokens are answer, and as whole-sequence logits.
        for prompt, (ids, logits) in zip(prompts, alone, strict=True):
            again = runtime.new_sequence()
            again.prompt_tokens = len(prompt)
            assert torch.equal(runtime.prefill(again, prompt + ids[:-1]), logits[-1])
            again.close()
            whole = runtime.logits(torch.tensor([prompt + ids[:-1]]), prompt_tokens=len(prompt))[0]
            assert torch.equal(whole[len(prompt) - 1 :], logits)
        assert runtime.stats()["prerouter_fallbacks"] == 0


def test_state_keeps_one_token_of_a_prompt(packed: Packer) -> None:
    """What heads want of the last token lies outside the prompt's own tensors, which a budget has no place for."""
    store, heads = packed("qwen3_moe", 4), some_heads("qwen3_moe", next_scale=NEXT)
    with prerouted(store, heads) as runtime:
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, some_ids(1, 40)[0].tolist())
        assert len(sequence.routing.kept) == len(heads)
        for seen in sequence.routing.kept:
            assert all(part.untyped_storage().nbytes() == part.nbytes for part in seen)
        sequence.close()


@both_kinds
def test_state_is_cut_with_its_sequence(packed: Packer, next_scale: float) -> None:
    store, heads = packed("qwen3_moe", 4), some_heads("qwen3_moe", next_scale=next_scale)
    prompt = some_ids(1, PROMPT)[0].tolist()
    with prerouted(store, heads) as runtime:
        ids, logits = greedy(runtime, prompt)
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, prompt)
        runtime.decode([sequence], [ids[0]])
        rule, state = runtime.rule, sequence.routing
        assert rule is not None and (state.length, state.gated) == (PROMPT + 1, PROMPT)
        keep = rule.reusable(state, PROMPT - 1)
        assert keep == PROMPT - 2, "two tokens of the prompt are computed again, for the features of the last"
        sequence.truncate(keep)
        assert state.length == keep and not state.ready and not state.kept
        assert torch.equal(runtime.prefill(sequence, prompt[keep:]), logits[0])
        assert torch.equal(runtime.decode([sequence], [ids[0]])[0], logits[1])
        sequence.truncate(PROMPT)  # what no caller does: the predictions are gone, so the gate is asked, and counted
        runtime.decode([sequence], [ids[0]])
        assert runtime.stats()["prerouter_fallbacks"] == len(heads)
        sequence.close()


def test_only_some_layers_may_have_heads(packed: Packer) -> None:
    store, prompt = packed("gpt_oss", 8), some_ids(1, PROMPT)[0].tolist()
    heads, recorder = some_heads("gpt_oss", owners=[1]), RouteRecorder()
    with prerouted(store, heads, recorder=recorder) as runtime:
        _, ours = greedy(runtime, prompt)
        assert runtime.stats()["prerouter_routes"] == ANSWER - 1
    assert ours.isfinite().all()


def test_a_warm_head_applies_the_next_gate(packed: Packer) -> None:
    """Untrained, a head's route is what the next gate would say to this layer's input: fc2 is 0."""
    gate = torch.randn(EXPERTS, WIDTH)
    head = warm_head(gate, HIDDEN)
    hidden, used = torch.randn(5, WIDTH), torch.randint(0, EXPERTS, (5, 2))
    bank = NativeHeads({0: head})
    native = bank.logits(0, hidden, used, torch.full_like(used, -1))
    assert torch.allclose(native, hidden @ gate.T, atol=1e-4)


@pytest.mark.parametrize("make", [random_head])
def test_native_heads_are_the_reference(make: Callable[..., Head]) -> None:
    from stoker.adapter.heads import features

    for dtype, limit in ((torch.bfloat16, 1e-5), (torch.float32, 1e-5)):
        plain = make(EXPERTS, WIDTH, HIDDEN, 3)
        head = Head(*(part.to(dtype).float() for part in (plain.fc1, plain.fc2, plain.linear_init)))
        hidden, used = torch.randn(33, WIDTH), torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(33)])
        before = torch.cat([torch.full_like(used[:1], -1), used[:-1]])
        bank = NativeHeads({4: head})
        ours = bank.logits(4, hidden, used, before)
        theirs = head.logits(features(hidden, used, before, EXPERTS))
        assert relative_l2(ours, theirs) < limit
        alone = torch.cat([bank.logits(4, *(x[t : t + 1] for x in (hidden, used, before))) for t in range(33)])
        assert torch.equal(ours, alone), "a row depends on itself alone"
