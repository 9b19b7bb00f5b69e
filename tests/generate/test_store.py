"""`stoker.load` on real stores: the Python door end to end, against transformers and against itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import stoker
from stoker.errors import BudgetError, OptionError, StokerError, StoreError
from stoker.trace.reader import Trace
from tests.generate.stores import pack, write_checkpoint

PROMPTS = ["The quick brown fox", "def f(x):", "Größe, 東京 und 🙂", "1, 2, 3"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
BUDGET = "2GiB"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def store(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(checkpoint, tmp_path_factory.mktemp("store") / "bf16", "--bits", 16)


@pytest.fixture(scope="module")
def model(store: Path) -> Iterator[stoker.Model]:
    with stoker.load(store, memory=BUDGET) as model:
        yield model


def test_logits_are_the_checkpoints(model: stoker.Model, checkpoint: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.tensor([model.encode(prompt * 12)[:24] for prompt in PROMPTS])
    with torch.inference_mode():
        expected = eager(ids).logits
    logits = model.logits(ids)
    assert logits.shape == expected.shape and logits.dtype == torch.float32
    assert float((logits - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_the_argmax_of_teacher_forced_logits(model: stoker.Model, prompt: str) -> None:
    """Token by token through the cache gives the very logits of one pass over everything."""
    result = model.generate(prompt, max_tokens=32, temperature=0.0, ignore_eos=True)
    ids = model.encode(prompt)
    logits = model.logits([ids + result.token_ids])[0]
    assert logits[len(ids) - 1 : -1].argmax(dim=-1).tolist() == result.token_ids


def test_text_is_what_the_tokenizer_says(model: stoker.Model) -> None:
    for prompt in PROMPTS:
        result = model.generate(prompt, max_tokens=24, temperature=1.0, seed=1)
        whole = model.tokenizer.decode(model.encode(prompt) + result.token_ids, skip_special_tokens=True)
        assert prompt + result.text == whole


@pytest.mark.parametrize("path", ["exact", "staged", "hot", "whole_layer"])
def test_path_and_threads_never_change_the_output(model: stoker.Model, store: Path, path: str) -> None:
    with stoker.load(store, memory=BUDGET, path=path, policy="lru", threads=1) as other:
        for prompt in (*PROMPTS, CHAT):
            expected = model.generate(prompt, max_tokens=16, temperature=0.8, seed=2)
            result = other.generate(prompt, max_tokens=16, temperature=0.8, seed=2)
            assert result.token_ids == expected.token_ids and result.text == expected.text
        assert other.stats()["dropped_experts"] == 0


def test_a_session_reuses_and_says_the_same(model: stoker.Model) -> None:
    turns, answers = list(CHAT), []
    with model.session() as session:
        for question in ("And of Spain?", "Thanks", "Bye"):
            result = model.generate(turns, max_tokens=20, session=session, ignore_eos=True)
            assert result.token_ids == model.generate(turns, max_tokens=20, ignore_eos=True).token_ids
            answers.append(result)
            turns += [{"role": "assistant", "content": result.text}, {"role": "user", "content": question}]
    assert [answer.usage.cached_tokens > 0 for answer in answers] == [False, True, True]
    assert answers[2].usage.cached_tokens >= answers[1].usage.prompt_tokens


def test_streams_take_turns_on_one_model(model: stoker.Model) -> None:
    alone = [model.generate(prompt, max_tokens=12, ignore_eos=True).token_ids for prompt in PROMPTS]
    streams = [model.stream(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS]
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == alone


def test_the_kv_of_abandoned_streams_comes_back(model: stoker.Model) -> None:
    """Forty times 60% of the context would fill it many times over."""
    for _ in range(40):
        with model.stream([7] * 300, max_tokens=20, ignore_eos=True) as stream:
            next(stream, None)
    assert len(model.generate([7] * 500, max_tokens=13, ignore_eos=True).token_ids) == 13


def test_ledger_and_stats_have_numbers(model: stoker.Model) -> None:
    before = model.stats()
    result = model.generate(PROMPTS[0], max_tokens=9, ignore_eos=True)
    after, ledger = model.stats(), model.ledger()
    prefill, decode = result.stats["prefill"], result.stats["decode"]
    assert after["hits"] - before["hits"] == prefill["hits"] + decode["hits"]
    assert after["misses"] - before["misses"] == prefill["misses"] + decode["misses"]
    assert decode["hits"] + decode["misses"] == 8 * 2 * 2, "8 steps, 2 layers, 2 experts each"
    assert ledger["budget_bytes"] == 2 << 30
    assert any("budget" in line for line in model.ledger_lines())


def test_decode_reads_what_the_stats_say(store: Path) -> None:
    """The exact path keeps nothing: every demanded expert is read, record by record."""
    with stoker.load(store, memory=BUDGET, path="exact") as model:
        decode = model.generate(PROMPTS[0], max_tokens=9, ignore_eos=True).stats["decode"]
        record = model.runtime.store.pools[0].layout.record_bytes
    assert decode["misses"] == 32 and decode["demand_bytes"] == 32 * record == decode["read_bytes"]
    assert decode["read_bytes_per_token"] == 4 * record and decode["hit_rate"] == 0 and decode["stall_ms"] > 0


def test_a_trace_tells_what_ran(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    with stoker.load(store, memory=BUDGET, trace=file) as model:
        model.generate(PROMPTS[0], max_tokens=5, ignore_eos=True)
    assert str(store) in str(Trace(file).about)
    assert len(Trace(file).column("step.step")) >= 5
    with pytest.raises(StokerError, match="exists already"):
        stoker.load(store, memory=BUDGET, trace=file)
    refused = tmp_path / "refused.trace"
    with pytest.raises(BudgetError):
        stoker.load(store, memory="64MiB", trace=refused)
    assert list(tmp_path.iterdir()) == [file], "nothing half-written stays"


def test_the_context_defaults_to_the_models_length(model: stoker.Model, store: Path) -> None:
    assert model.runtime.ctx_size == 512
    with pytest.raises(OptionError, match="longer than the model"):
        stoker.load(store, memory=BUDGET, ctx_size=513)
    with stoker.load(store, memory=BUDGET, ctx_size=64) as small:
        assert len(small.generate([5] * 60, ignore_eos=True).token_ids) == 5
        with pytest.raises(OptionError, match="context is too long"):
            small.stream([5] * 60, max_tokens=6)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"memory": "64MiB"}, BudgetError, "at least"),
        ({"memory": "100TiB"}, BudgetError, "larger than"),
        ({"memory": "much"}, OptionError, "not a size"),
        ({"path": "fast"}, OptionError, "path"),
        ({"policy": "newest"}, OptionError, "policy"),
        ({"threads": 0}, OptionError, "threads"),
        ({"ctx_size": 0}, OptionError, "ctx_size"),
        ({"ctx_size": 4.5}, OptionError, "ctx_size"),
        ({"speed": 9}, OptionError, "unknown option speed"),
    ],
)
def test_bad_options_of_load(store: Path, options: dict, error: type[StokerError], word: str) -> None:
    with pytest.raises(error, match=word):
        stoker.load(store, **({"memory": BUDGET} | options))


def test_what_is_not_a_store(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(StoreError, match="nothing"):
        stoker.load(tmp_path / "nothing", memory=BUDGET)
    with pytest.raises(StoreError, match=r"(?s)store.*stoker pack"):
        stoker.load(checkpoint, memory=BUDGET)
