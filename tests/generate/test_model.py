"""Model, Stream and Session over a real small model: what comes out, when it stops, what is reused, what is refused."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from stoker.errors import OptionError, StokerError
from stoker.generate.model import Model
from tests.generate.eager_runtime import EagerRuntime, random_model
from tests.generate.tokenizers_ import byte_level

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def weights() -> object:
    return random_model(512, seed=3)


@pytest.fixture
def runtime(weights: object) -> EagerRuntime:
    return EagerRuntime(weights, byte_level())


@pytest.fixture
def model(runtime: EagerRuntime) -> Iterator[Model]:
    with Model(runtime) as model:
        yield model


def transformers_greedy(runtime: EagerRuntime, ids: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = runtime.model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=2, pad_token_id=0
        )
    return out[0, len(ids) :].tolist()


def test_greedy_equals_transformers_generate(model: Model, runtime: EagerRuntime) -> None:
    for prompt in (PROMPT, "user", "1, 2, 3"):
        ids = model.encode(prompt)
        result = model.generate(prompt, max_tokens=40, temperature=0.0)
        assert result.token_ids == transformers_greedy(runtime, ids, 40)
        assert model.tokenizer.decode(ids) + result.text == model.tokenizer.decode(
            ids + result.token_ids, skip_special_tokens=True
        )


def test_pieces_are_the_text_and_the_result_comes_after(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=24)
    with pytest.raises(StokerError, match="not finished"):
        _ = stream.result
    pieces = list(stream)
    assert len(pieces) > 5 and all(pieces)
    assert "".join(pieces) == stream.result.text == model.generate(PROMPT, max_tokens=24).text


def test_usage_timings_and_the_closing_line(model: Model) -> None:
    result = model.generate(PROMPT, max_tokens=12, ignore_eos=True)
    usage, timings = result.usage, result.timings
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(model.encode(PROMPT)), 0, 12)
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert 0 < timings.prefill_ms <= timings.ttft_ms < timings.total_ms
    assert timings.decode_tok_s == pytest.approx(11e3 / timings.decode_ms)
    assert timings.token_ms_p50 <= timings.token_ms_p95 <= timings.token_ms_p99
    line = result.closing_line()
    for part in (f"prompt {usage.prompt_tokens} tokens", "TTFT", "tok/s", "hits", "MB/token", "stall", "length"):
        assert part in line
    assert result.as_dict()["usage"]["total_tokens"] == usage.total_tokens


def test_a_slow_reader_does_not_slow_the_rate(model: Model) -> None:
    """What the reader takes for itself between two tokens is no part of the decoding."""
    stream, first = model.stream(PROMPT, max_tokens=8, ignore_eos=True), None
    read_ms = 0.0
    for _ in stream:
        if first is not None:
            began = time.perf_counter()
            time.sleep(0.1)
            read_ms += (time.perf_counter() - began) * 1e3
        first = False
    timings = stream.result.timings
    assert read_ms >= 200 and timings.total_ms - timings.ttft_ms - timings.decode_ms > read_ms - 150


def test_ends_at_length(model: Model) -> None:
    result = model.generate(PROMPT, max_tokens=7, ignore_eos=True)
    assert result.finish_reason == "length" and len(result.token_ids) == 7


def test_ends_at_an_end_token(model: Model, runtime: EagerRuntime) -> None:
    free = model.generate(PROMPT, max_tokens=30, ignore_eos=True)
    end = free.token_ids[10]
    first = free.token_ids.index(end)
    runtime.eos_token_ids = (2, end)
    result = model.generate(PROMPT, max_tokens=30)
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.text == model.generate(PROMPT, max_tokens=first, ignore_eos=True).text, "the end token is not text"
    assert model.generate(PROMPT, max_tokens=30, ignore_eos=True).token_ids == free.token_ids


def test_ends_before_a_stop_string(model: Model, runtime: EagerRuntime) -> None:
    free = model.generate(PROMPT, max_tokens=30, ignore_eos=True).text
    stop = free[9:14]
    stream = model.stream(PROMPT, max_tokens=30, ignore_eos=True, stop=["never seen", stop])
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == free[: free.index(stop)]
    assert stream.result.finish_reason == "stop"
    assert len(stream.result.token_ids) < 30, "it must not go on computing"
    assert model.generate(PROMPT, max_tokens=30, ignore_eos=True, stop=stop).text == stream.result.text


def test_cancel_ends_at_a_token(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=100, ignore_eos=True)
    next(stream)
    stream.cancel()
    rest = list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert 1 <= len(stream.result.token_ids) < 10 and len(rest) <= 1


def test_cancel_from_another_thread_during_prefill(model: Model, runtime: EagerRuntime) -> None:
    seen: list[tuple[int, int]] = []

    def on_prefill(done: int, total: int) -> None:
        seen.append((done, total))
        if done:
            thread = threading.Thread(target=stream.cancel)
            thread.start()
            thread.join()

    stream = model.stream("fox " * 60, max_tokens=5, on_prefill=on_prefill)
    assert list(stream) == []
    total = len(model.encode("fox " * 60))
    assert seen == [(0, total), (16, total)]
    result = stream.result
    assert (result.finish_reason, result.text, result.token_ids, runtime.decoded_tokens) == ("cancelled", "", [], 0)
    assert result.timings.ttft_ms == 0 and "cancelled" in result.closing_line()


def test_closing_early_is_a_cancel_and_frees_the_sequence(model: Model, runtime: EagerRuntime) -> None:
    stream = model.stream(PROMPT, max_tokens=100, ignore_eos=True)
    first = next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled" and stream.result.text == first
    assert all(sequence.closed for sequence in runtime.sequences)
    stream.close()


def test_streams_may_take_turns(model: Model) -> None:
    alone = [model.generate(p, max_tokens=10, temperature=1.0, seed=4, ignore_eos=True) for p in (PROMPT, "Hello")]
    streams = [model.stream(p, max_tokens=10, temperature=1.0, seed=4, ignore_eos=True) for p in (PROMPT, "Hello")]
    texts = ["", ""]
    live = {0, 1}
    while live:
        for i in sorted(live):
            piece = next(streams[i], None)
            if piece is None:
                live.discard(i)
            else:
                texts[i] += piece
    assert texts == [result.text for result in alone]
    assert [s.result.token_ids for s in streams] == [result.token_ids for result in alone]


def test_sampling_repeats_with_its_seed(model: Model) -> None:
    first = model.generate(PROMPT, max_tokens=16, temperature=1.2, top_k=50)
    again = model.generate(PROMPT, max_tokens=16, temperature=1.2, top_k=50, seed=first.seed)
    assert again.token_ids == first.token_ids
    others = {tuple(model.generate(PROMPT, max_tokens=16, temperature=1.2, seed=s).token_ids) for s in range(5)}
    assert len(others) == 5


def test_the_models_own_settings_come_after_the_requests(model: Model, runtime: EagerRuntime) -> None:
    greedy = model.generate(PROMPT, max_tokens=16, ignore_eos=True).token_ids
    runtime.generation_config = {"do_sample": True, "temperature": 1.5, "top_k": 100, "max_new_tokens": 3}
    sampled = {tuple(model.generate(PROMPT, max_tokens=16, ignore_eos=True, seed=s).token_ids) for s in range(4)}
    assert len(sampled) == 4 and tuple(greedy) not in sampled
    assert model.generate(PROMPT, max_tokens=16, ignore_eos=True, temperature=0.0).token_ids == greedy


def test_logprobs_belong_to_the_tokens(model: Model, runtime: EagerRuntime) -> None:
    result = model.generate(PROMPT, max_tokens=6, ignore_eos=True, logprobs=2)
    ids = model.encode(PROMPT)
    full = torch.log_softmax(model.logits([ids + result.token_ids])[0].double(), dim=-1)
    assert [sample.token for sample in result.logprobs] == result.token_ids
    for step, sample in enumerate(result.logprobs):
        row = full[len(ids) - 1 + step]
        assert sample.logprob == pytest.approx(float(row[sample.token]), abs=1e-3)
        assert [t for t, _ in sample.top] == row.topk(2).indices.tolist()
    assert model.generate(PROMPT, max_tokens=2).logprobs is None


def test_messages_go_through_the_template(model: Model) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenizer.encode(prompt, add_special_tokens=False)
    by_messages = model.generate(messages, max_tokens=8)
    assert by_messages.token_ids == model.generate(ids, max_tokens=8).token_ids
    assert by_messages.token_ids == model.generate(np.array(ids), max_tokens=8).token_ids
    assert by_messages.usage.prompt_tokens == len(ids)


def test_a_session_computes_only_what_is_new(model: Model, runtime: EagerRuntime) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    with model.session() as session:
        first = model.generate(turns, max_tokens=9, session=session, ignore_eos=True)
        held = session.cached_tokens
        assert held == first.usage.prompt_tokens + 8, "the last token was never fed"
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Spain?"}]
        runtime.prefilled_tokens = 0
        second = model.generate(turns, max_tokens=9, session=session, ignore_eos=True)
        cached = second.usage.cached_tokens
        assert first.usage.prompt_tokens <= cached <= held
        assert runtime.prefilled_tokens == second.usage.prompt_tokens - cached
        assert second.token_ids == model.generate(turns, max_tokens=9, ignore_eos=True).token_ids
        other = [{"role": "user", "content": "Something else"}]
        third = model.generate(other, max_tokens=9, session=session, ignore_eos=True)
        assert third.usage.cached_tokens < 6
        assert third.token_ids == model.generate(other, max_tokens=9, ignore_eos=True).token_ids
        again = model.generate(other, max_tokens=9, session=session, ignore_eos=True)
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
        assert again.token_ids == third.token_ids
    assert session.cached_tokens == 0 and all(sequence.closed for sequence in runtime.sequences)


def test_a_session_survives_a_cancel_but_not_an_error(model: Model, runtime: EagerRuntime) -> None:
    expected = model.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids
    session = model.session()
    stream = model.stream(PROMPT, max_tokens=12, ignore_eos=True, session=session)
    next(stream)
    with pytest.raises(OptionError, match="in use"):
        next(model.stream("other", session=session))
    stream.close()
    assert session.cached_tokens > 0
    assert model.generate(PROMPT, max_tokens=12, ignore_eos=True, session=session).token_ids == expected
    runtime.fail_decode_at = runtime.decoded_tokens + 3
    with pytest.raises(OSError, match="went away"):
        model.generate(PROMPT, max_tokens=12, ignore_eos=True, session=session)
    assert session.cached_tokens == 0, "a sequence that an error may have left half-written is dropped"
    runtime.fail_decode_at = None
    assert model.generate(PROMPT, max_tokens=12, ignore_eos=True, session=session).token_ids == expected


def test_a_context_that_does_not_fit_is_refused_before_computing(model: Model, runtime: EagerRuntime) -> None:
    ids = [5] * 250
    with pytest.raises(OptionError, match="context is too long") as caught:
        model.stream(ids, max_tokens=8)
    assert "256" in str(caught.value) and "257" in str(caught.value) and "250" in str(caught.value)
    assert runtime.prefilled_tokens == 0 and not runtime.sequences
    assert model.generate(ids, max_tokens=7, ignore_eos=True).finish_reason == "length"
    assert len(model.generate(ids, ignore_eos=True).token_ids) == 7, "without max_tokens: until the context is full"
    assert len(model.generate([5] * 256, ignore_eos=True).token_ids) == 1
    with pytest.raises(OptionError, match="context is too long"):
        model.stream([5] * 257)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temprature": 1.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {5: 1e9}}, "logit_bias"),
        ({"temperature": 0.0, "top_p": 0.5}, "top_p does nothing"),
        ({"temperature": 0.0, "top_k": 5}, "top_k does nothing"),
    ],
)
def test_bad_options_are_refused_by_name(model: Model, runtime: EagerRuntime, options: dict, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        model.stream(PROMPT, **options)
    assert not runtime.sequences


def test_options_that_are_neutral_are_fine_when_greedy(model: Model) -> None:
    plain = model.generate(PROMPT, max_tokens=4)
    assert (
        model.generate(PROMPT, max_tokens=4, temperature=0.0, top_p=1.0, top_k=0, seed=5).token_ids == plain.token_ids
    )


def test_prompts_that_cannot_be_read(model: Model, runtime: EagerRuntime) -> None:
    for bad, word in (
        ("", "empty"),
        ([], "empty"),
        ([600], "vocabulary"),
        ([-1], "vocabulary"),
        ([{"x": 1}], "message"),
    ):
        with pytest.raises(OptionError, match=word):
            model.stream(bad)
    runtime.tokenizer = None
    with pytest.raises(OptionError, match="no tokenizer"):
        model.stream("text")
    result = model.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
    assert result.text == "" and len(result.token_ids) == 4


def test_logits(model: Model, runtime: EagerRuntime) -> None:
    ids = [[3, 4, 5], [6, 7, 8]]
    expected = runtime.logits(torch.tensor(ids))
    for form in (ids, np.array(ids, dtype=np.int32), torch.tensor(ids)):
        logits = model.logits(form)
        assert logits.shape == (2, 3, 512) and logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected)
    for bad in ([1, 2], [[1.5]], [[]]):
        with pytest.raises(OptionError, match="token ids"):
            model.logits(bad)
    with pytest.raises(OptionError, match="mask"):
        model.logits(ids, [[1, 1]])


def test_a_closed_model_says_so(runtime: EagerRuntime) -> None:
    model = Model(runtime)
    model.close()
    model.close()
    assert runtime.closed == 1
    for use in (model.ledger, model.stats, lambda: model.stream("x"), lambda: model.logits([[1]])):
        with pytest.raises(StokerError, match="closed"):
            use()


def test_threads_take_turns(model: Model) -> None:
    expected = [model.generate(f"{i}", max_tokens=12, ignore_eos=True).token_ids for i in range(4)]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = model.generate(f"{i}", max_tokens=12, ignore_eos=True).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(4)] == expected


def test_dropped_experts_are_never_accepted(model: Model, runtime: EagerRuntime) -> None:
    counts = iter(range(100))
    runtime.stats = lambda: {"dropped_experts": next(counts)}  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="left out"):
        model.generate(PROMPT, max_tokens=3)
