"""Served answers on the demo model: words, logprobs and results as of a single run, with and without company."""

import queue
from pathlib import Path
from typing import Any

from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Event, Job, Piece
from stoker.generate.model import Model, load
from stoker.generate.request import Request, resolve_sampling
from tests.server.conftest import demo_store  # noqa: F401

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("The capital of France is", {"temperature": 0.0}),
    ("Once upon a time there was a little robot who " * 12, {"temperature": 0.8, "top_p": 0.9, "seed": 11}),
    ("1, 2, 3,", {"temperature": 1.0, "top_k": 20, "seed": 3, "logprobs": 2}),
    ("Dear", {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.1, "logit_bias": {11: -5.0}}),
    ("Water boils at", {"temperature": 0.0}),
]
TOKENS = 24


def jobs(model: Model) -> list[Job]:
    config = model.runtime.generation_config
    return [
        Job(Request(tuple(model.encode(text)), resolve_sampling(sampling, config), TOKENS)) for text, sampling in ASKED
    ]


def answers(batcher: Batcher, jobs: list[Job]) -> list[tuple[str, list[int], Any]]:
    listeners: list[queue.Queue[Event]] = [queue.Queue() for _ in jobs]
    for job, listener in zip(jobs, listeners, strict=True):
        batcher.submit(job, listener.put)
    found = []
    for listener in listeners:
        text, samples = "", []
        while not isinstance(event := listener.get(timeout=180), Done):
            if isinstance(event, Piece):
                text += event.text
                samples += event.samples
        assert text == event.result.text and [sample.token for sample in samples] == event.result.token_ids
        assert event.result.logprobs is None or event.result.logprobs == samples
        found.append((text, event.result.token_ids, event.result.logprobs))
    return found


def test_served_answers_are_those_of_single_runs(demo_store: Path) -> None:  # noqa: F811
    with load(demo_store, memory="8GiB", slots=(4,) * 30, ctx_size=512, kv_tokens=2048, parallel=4) as model:
        wanted = []
        for text, sampling in ASKED:
            result = model.generate(text, max_tokens=TOKENS, **sampling)
            wanted.append((result.text, result.token_ids, result.logprobs))
        assert all(text for text, _, _ in wanted)
        batcher = Batcher(model, parallel=4, mixed_tokens=16)
        try:
            assert answers(batcher, jobs(model)) == wanted
            for index, job in enumerate(jobs(model)):
                assert answers(batcher, [job]) == [wanted[index]]
        finally:
            batcher.close()
