"""Many jobs at once on real stores: each says, bit for bit, what it says alone, whatever shares its steps."""

import os
import queue
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ReadError
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Event, Failed, Job
from stoker.generate.model import Model
from stoker.generate.request import Request, SamplingOptions
from stoker.runtime.model import Options, load
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer, packed  # noqa: F401
from tests.runtime.tiny import VOCABULARY

PAGED, UNPAGED = ("qwen3_moe", "qwen2_moe", "glm4_moe"), ("gpt_oss", "qwen3_5_moe")
# Prompt tokens, tokens to say, sampling: lengths around blocks of 64 and chunks of 32, greedy and drawn.
SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (130, 9, {}),
    (3, 40, {"temperature": 0.8, "seed": 4}),
    (64, 20, {}),
    (1, 30, {"temperature": 1.2, "top_p": 0.9, "seed": 9, "repetition_penalty": 1.2}),
    (33, 25, {"temperature": 0.7, "seed": 1, "logprobs": 3}),
    (100, 1, {}),
]


def jobs() -> list[Job]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length, _, _ in SHAPES]
    return [
        Job(Request(tuple(prompt), SamplingOptions(**sampling), count, ignore_eos=True))
        for prompt, (_, count, sampling) in zip(prompts, SHAPES, strict=True)
    ]


def open_model(store: Path, **options: Any) -> Model:
    """With 3 slots for 8 experts, of which a token takes 2: one answer goes through the slots, more stream."""
    torch.set_num_threads(1)
    options["slots"] = (3,) * len(open_store(store).pools)
    chosen = {"memory": "8GiB", "ctx_size": 192, "prefill_chunk": 32, "threads": 1} | options
    return Model(load(store, Options(**chosen)))


def alone(model: Model, job: Job) -> tuple[list[int], Any]:
    sampling = {name: value for name, value in vars(job.request.sampling).items() if value not in (None, {})}
    if job.request.sampling.greedy:
        sampling = {"temperature": 0.0}
    result = model.generate(
        list(job.request.prompt_ids), max_tokens=job.request.max_tokens, ignore_eos=True, **sampling
    )
    return result.token_ids, result.logprobs


def together(batcher: Batcher, jobs: list[Job]) -> list[tuple[list[int], Any]]:
    found = []
    listeners: list[queue.Queue[Event]] = [queue.Queue() for _ in jobs]
    for job, listener in zip(jobs, listeners, strict=True):
        batcher.submit(job, listener.put)
    for listener in listeners:
        event = listener.get(timeout=180)
        while not isinstance(event, Done | Failed):
            event = listener.get(timeout=180)
        assert isinstance(event, Done), event
        found.append((event.result.token_ids, event.result.logprobs))
    return found


@pytest.mark.parametrize("name", PAGED + UNPAGED)
def test_company_changes_no_bit(name: str, packed: Packer) -> None:  # noqa: F811
    """Six jobs, three at a time, prompts in small parts beside running answers; few slots, so that experts stream."""
    with open_model(packed(name, 4), kv_tokens=768) as model:
        wanted = [alone(model, job) for job in jobs()]
        for mixed_tokens, share in ((5, 0.0), (32, 0.5)):
            batcher = Batcher(model, parallel=3, mixed_tokens=mixed_tokens, decode_share=share)
            try:
                assert together(batcher, jobs()) == wanted
                assert model.runtime.kv is None or model.runtime.kv.free_tokens == 768, "all blocks are back"
            finally:
                batcher.close()


def test_putting_back_changes_no_bit(packed: Packer, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Room for little more than the longest: answers that outgrow it push the youngest out, and it comes back."""
    put_back: list[int] = []
    real = Batcher._put_back
    monkeypatch.setattr(Batcher, "_put_back", lambda self, ticket: (put_back.append(ticket.id), real(self, ticket))[1])
    growing = [Job(Request((7, n, 9), SamplingOptions(temperature=1.0, seed=n), 220, ignore_eos=True)) for n in (5, 6)]
    with open_model(packed("qwen3_moe", 4), ctx_size=320, kv_tokens=384) as model:
        wanted = [alone(model, job) for job in [*growing, *jobs()]]
        batcher = Batcher(model, parallel=4)
        try:
            assert together(batcher, [*growing, *jobs()]) == wanted
        finally:
            batcher.close()
        assert put_back, "the test must have seen it happen"
        assert model.runtime.kv.free_tokens == 384


def test_nothing_of_a_job_reaches_the_next(packed: Packer) -> None:  # noqa: F811
    """B after A (finished, cancelled or failed) equals B in a model that has seen nothing."""
    a, b = jobs()[0], jobs()[4]
    for name in ("qwen3_moe", "qwen3_5_moe"):
        with open_model(packed(name, 4)) as model:
            batcher = Batcher(model, parallel=1)
            fresh = together(batcher, [b])
            batcher.close()
        with open_model(packed(name, 4)) as model:
            batcher = Batcher(model, parallel=1)
            together(batcher, [a])
            listener: queue.Queue[Event] = queue.Queue()
            batcher.submit(a, listener.put).cancel()
            assert together(batcher, [b]) == fresh
            batcher.close()


def test_failed_reads_end_their_jobs_and_leave_the_batcher_well(packed: Packer, tmp_path: Path) -> None:  # noqa: F811
    """The file of the experts is cut short under a loaded model, and then made whole again."""
    store = tmp_path / "store"
    shutil.copytree(packed("qwen3_moe", 4), store)
    with open_model(store, kv_tokens=768) as model:
        wanted = [alone(model, job) for job in jobs()]
        batcher = Batcher(model, parallel=3)
        files = {file: file.read_bytes() for file in store.glob("experts-*")}
        for file in files:
            os.truncate(file, 4096)
        listeners: list[queue.Queue[Event]] = [queue.Queue() for _ in jobs()]
        for job, listener in zip(jobs(), listeners, strict=True):
            batcher.submit(job, listener.put)
        ends = [next(e for e in iter(listener.get, None) if isinstance(e, Done | Failed)) for listener in listeners]
        assert all(isinstance(end, Failed) and isinstance(end.error, ReadError) for end in ends)
        for file, content in files.items():
            with file.open("r+b") as whole:
                whole.write(content)
        assert batcher.status().healthy and model.runtime.kv.free_tokens == 768
        assert together(batcher, jobs()) == wanted
        batcher.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_a_long_step_that_nobody_wants_ends_between_two_layers(name: str, packed: Packer) -> None:  # noqa: F811
    """Cancelled while its one chunk is computed: the step does not go on to the last layer, and nothing is left."""
    with open_model(packed(name, 4)) as model:
        wanted = alone(model, jobs()[1])
        batcher, asked = Batcher(model, parallel=1), []
        real = model.runtime.step.check_wanted

        def check_wanted() -> None:
            asked.append(model.runtime.step.index)
            if len(asked) == 2:
                ticket.cancel()
            real()

        model.runtime.step.check_wanted = check_wanted
        listener: queue.Queue[Event] = queue.Queue()
        with batcher._wake:
            ticket = batcher.submit(jobs()[4], listener.put)
        events = [listener.get(timeout=180)]
        while not isinstance(events[-1], Done | Failed):
            events.append(listener.get(timeout=180))
        assert isinstance(events[-1], Done) and events[-1].result.finish_reason == "cancelled"
        assert len(asked) == 2 and events[-1].result.usage.completion_tokens == 0
        assert together(batcher, [jobs()[1]]) == [wanted]
        batcher.close()
