"""The batcher on a small real model: events in order, output equal to a plain run, cancelling, refusing, closing."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.errors import Closing, ContextError
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
    seen = [events.get(timeout=30)]
    while not isinstance(seen[-1], Done | Failed):
        seen.append(events.get(timeout=30))
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
        while not isinstance(events.get(timeout=30), Piece):
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


def test_after_close_nothing_is_taken(model: Model) -> None:
    batcher = Batcher(model)
    batcher.close()
    batcher.close()
    with pytest.raises(Closing):
        batcher.submit(job(model), print)
