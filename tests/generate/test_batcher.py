"""The batcher on a small real model: events in order, output equal to a plain run, cancelling, refusing, closing."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stoker.errors import Closing, ContextError, QueueFull
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Event, Failed, Job, Piece, Progress
from stoker.generate.model import Model
from stoker.generate.request import Request, SamplingOptions
from tests.generate.eager_runtime import EagerRuntime, random_model
from tests.generate.tokenizers_ import byte_level

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def weights() -> object:
    return random_model(512, seed=3)


@pytest.fixture
def model(weights: object) -> Iterator[Model]:
    with Model(EagerRuntime(weights, byte_level())) as model:
        yield model


def job(model: Model, prompt: str = PROMPT, max_tokens: int = 12, **sampling: Any) -> Job:
    return Job(Request(tuple(model.encode(prompt)), SamplingOptions(**sampling), max_tokens, ignore_eos=True))


def follow(batcher: Batcher, job: Job) -> "queue.Queue[Event]":
    events: queue.Queue[Event] = queue.Queue()
    batcher.submit(job, events.put)
    return events


def to_end(events: "queue.Queue[Event]") -> list[Event]:
    seen = [events.get(timeout=180)]
    while not isinstance(seen[-1], Done | Failed):
        seen.append(events.get(timeout=180))
    return seen


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 5, "frequency_penalty": 0.4}])
def test_a_job_says_what_a_plain_run_says(model: Model, sampling: dict[str, Any]) -> None:
    plain = model.generate(PROMPT, max_tokens=12, ignore_eos=True, **sampling)
    batcher = Batcher(model)
    try:
        seen = to_end(follow(batcher, job(model, **sampling)))
    finally:
        batcher.close()
    progress = [event for event in seen if isinstance(event, Progress)]
    pieces = [event for event in seen if isinstance(event, Piece)]
    end = seen[-1]
    assert seen == [*progress, *pieces, end] and isinstance(end, Done)
    total = len(model.encode(PROMPT))
    assert progress[0] == Progress(0, total, 0) and progress[-1] == Progress(total, total, 0)
    assert [sample.token for piece in pieces for sample in piece.samples] == plain.token_ids == end.result.token_ids
    assert "".join(piece.text for piece in pieces) == plain.text == end.result.text
    assert (end.result.finish_reason, end.result.usage, end.result.seed) == ("length", plain.usage, end.result.seed)


def test_cancelling_ends_it(model: Model) -> None:
    batcher, events = Batcher(model), queue.Queue()
    try:
        ticket = batcher.submit(job(model, max_tokens=100), events.put)
        while not isinstance(events.get(timeout=180), Piece):
            pass
        ticket.cancel()
        end = to_end(events)[-1]
        assert isinstance(end, Done) and end.result.finish_reason == "cancelled"
        assert 1 <= len(end.result.token_ids) < 100
    finally:
        batcher.close()


def test_what_cannot_fit_is_refused_with_both_numbers(model: Model) -> None:
    batcher = Batcher(model)
    try:
        with pytest.raises(ContextError) as caught:
            batcher.submit(job(model, max_tokens=1000), print)
        tokens = len(model.encode(PROMPT))
        assert (caught.value.asked_tokens, caught.value.limit_tokens) == (tokens + 999, 256)
    finally:
        batcher.close()


def test_cancelling_during_a_long_prefill_ends_within_a_step(model: Model) -> None:
    batcher, events = Batcher(model), queue.Queue()
    ticket = None

    def listen(event: Event) -> None:
        events.put(event)
        if isinstance(event, Progress) and event.done == 16:
            ticket.cancel()

    try:
        with batcher._wake:  # so that the ticket is known before the engine begins
            ticket = batcher.submit(job(model, "fox " * 60), listen)
        seen = to_end(events)
        total = len(model.encode("fox " * 60))
        assert seen[:-1] == [Progress(0, total, 0), Progress(16, total, 0)]
        assert isinstance(seen[-1], Done) and seen[-1].result.finish_reason == "cancelled"
        assert seen[-1].result.token_ids == [] and model.runtime.prefilled_tokens == 16
    finally:
        batcher.close()


def test_a_failed_step_ends_its_job_and_no_other(model: Model) -> None:
    wanted = model.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids
    bad = next(token for token in range(300, 512) if token not in (*wanted, *model.encode(PROMPT)))
    model.runtime.fail_on_token = bad
    batcher = Batcher(model)
    try:
        good, failing = follow(batcher, job(model)), follow(batcher, Job(Request((5, bad), SamplingOptions())))
        end = to_end(failing)[-1]
        assert isinstance(end, Failed) and f"token {bad}" in str(end.error)
        assert to_end(good)[-1].result.token_ids == wanted
        assert to_end(follow(batcher, job(model)))[-1].result.token_ids == wanted, "the batcher goes on"
        assert batcher.status().healthy
        assert all(sequence.closed for sequence in model.runtime.sequences)
    finally:
        batcher.close()


def test_a_bug_in_the_engine_is_told_to_everyone(model: Model) -> None:
    model.runtime.fail_decode_at = None
    batcher = Batcher(model, parallel=1)
    broken = AssertionError("a broken invariant")

    def fail(parts: object) -> None:
        raise broken

    model.runtime.advance = fail
    with batcher._wake:  # both are in before the engine begins
        first, second = follow(batcher, job(model)), follow(batcher, job(model))
    for events in (first, second):
        end = to_end(events)[-1]
        assert isinstance(end, Failed) and "a broken invariant" in str(end.error)
    status = batcher.status()
    assert not status.healthy and "a broken invariant" in status.error and status.sequences == ()
    with pytest.raises(Closing, match="failed"):
        batcher.submit(job(model), print)
    batcher.close()


def test_a_constraint_chooses_among_its_tokens_and_ends_the_answer(model: Model) -> None:
    class Digits:
        """Three of the tokens 20 to 29."""

        def __init__(self) -> None:
            self.taken: list[int] = []

        def mask(self) -> Any:
            bits = np.zeros(512, dtype=np.uint8)
            bits[20:30] = 1
            return np.packbits(bits, bitorder="little").view("<u4")

        def accept(self, token: int) -> None:
            self.taken.append(token)

        @property
        def ended(self) -> bool:
            return len(self.taken) == 3

    batcher = Batcher(model)
    try:
        for sampling in ({}, {"temperature": 1.5, "seed": 2, "repetition_penalty": 1.3, "top_k": 40}):
            constraint = Digits()
            asked = Job(job(model, **sampling).request, constraint=constraint)
            end = to_end(follow(batcher, asked))[-1]
            assert isinstance(end, Done) and end.result.finish_reason == "stop"
            assert end.result.token_ids == constraint.taken and all(20 <= token < 30 for token in constraint.taken)

        class Broken(Digits):
            def mask(self) -> Any:
                raise KeyError("no such rule")

        events = follow(batcher, Job(job(model).request, constraint=Broken()))
        other = follow(batcher, job(model))
        assert isinstance(end := to_end(events)[-1], Failed) and "no such rule" in str(end.error)
        assert isinstance(to_end(other)[-1], Done) and batcher.status().healthy
    finally:
        batcher.close()


def test_a_full_queue_refuses_and_says_when(model: Model) -> None:
    batcher = Batcher(model, parallel=1, queue=2)
    try:
        with batcher._wake:  # nothing is taken from the queue meanwhile
            listening = [follow(batcher, job(model, max_tokens=2)) for _ in range(3)]
            with pytest.raises(QueueFull) as caught:
                batcher.submit(job(model), print)
        assert caught.value.retry_after_s >= 1
        assert all(isinstance(to_end(events)[-1], Done) for events in listening)
        assert isinstance(to_end(follow(batcher, job(model)))[-1], Done)
    finally:
        batcher.close()


def test_draining_lets_answers_finish_and_tells_who_waits(model: Model) -> None:
    batcher = Batcher(model, parallel=1)
    running = follow(batcher, job(model, max_tokens=30))
    while not isinstance(running.get(timeout=180), Piece):
        pass
    waiting = follow(batcher, job(model))
    assert batcher.drain(timeout_s=180)
    assert isinstance(end := to_end(waiting)[-1], Failed) and isinstance(end.error, Closing)
    assert isinstance(end := to_end(running)[-1], Done) and len(end.result.token_ids) == 30
    with pytest.raises(Closing):
        batcher.submit(job(model), print)
    batcher.close()


def test_closing_tells_who_is_at_work(model: Model) -> None:
    batcher = Batcher(model)
    running = follow(batcher, job(model, max_tokens=200))
    while not isinstance(running.get(timeout=180), Piece):
        pass
    assert not batcher.drain(timeout_s=0)
    batcher.close()
    assert isinstance(end := to_end(running)[-1], Failed) and isinstance(end.error, Closing)
    assert all(sequence.closed for sequence in model.runtime.sequences)


def test_a_listener_that_is_gone_stops_its_job_alone(model: Model) -> None:
    def gone(event: Event) -> None:
        raise RuntimeError("event loop is closed")

    batcher = Batcher(model)
    try:
        batcher.submit(job(model, max_tokens=200), gone)
        assert isinstance(to_end(follow(batcher, job(model)))[-1], Done)
        assert model.runtime.decoded_tokens < 100 and batcher.status().healthy
    finally:
        batcher.close()


def test_status_tells_who_is_where(model: Model) -> None:
    batcher, events = Batcher(model, parallel=1, queue=5), queue.Queue()
    seen = []

    def listen(event: Event) -> None:
        if isinstance(event, Piece) and not seen:
            follow(batcher, job(model, max_tokens=2))
            seen.append(batcher.status())
        events.put(event)

    try:
        batcher.submit(job(model), listen)
        to_end(events)
        status = seen[0]
        assert (status.running, status.waiting, status.parallel, status.queue, status.healthy) == (1, 1, 1, 5, True)
        total = len(model.encode(PROMPT))
        at_work, waiting = status.sequences
        assert (at_work.phase, at_work.prompt_tokens, at_work.prefilled_tokens) == ("decode", total, total)
        assert (waiting.phase, waiting.generated_tokens, waiting.prefilled_tokens) == ("waiting", 0, 0)
        assert status.kv_used_tokens == total and status.kv_total_tokens == model.runtime.kv_tokens
    finally:
        batcher.close()


def test_after_close_nothing_is_taken(model: Model) -> None:
    batcher = Batcher(model)
    batcher.close()
    batcher.close()
    with pytest.raises(Closing):
        batcher.submit(job(model), print)
