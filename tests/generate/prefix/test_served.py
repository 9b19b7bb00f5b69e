"""Jobs of a batcher that share beginnings through the cache: the tokens of jobs without it, whatever runs beside."""

import queue
import random
from pathlib import Path
from typing import Any

import pytest

from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Failed, Job, Piece
from stoker.generate.model import Model
from stoker.generate.prefix import open_prefix_cache
from stoker.generate.report import Result
from stoker.generate.request import Request, SamplingOptions
from stoker.runtime.model import Options, load
from tests.generate.prefix.talk import some_ids
from tests.runtime.conftest import Packer


def answers(batcher: Batcher, prompts: list[list[int]], *, cache: bool) -> list[Result]:
    """All at once; seeded sampling, so that a wrong logit shows."""
    waiting: list[queue.SimpleQueue[Any]] = []
    for n, prompt in enumerate(prompts):
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        sampling = SamplingOptions(temperature=1.0, seed=n)
        batcher.submit(Job(Request(tuple(prompt), sampling, max_tokens=12, ignore_eos=True), cache=cache), events.put)
        waiting.append(events)
    found = []
    for events in waiting:
        while not isinstance(event := events.get(timeout=180), Done | Failed):
            pass
        assert isinstance(event, Done), event
        found.append(event.result)
    return found


@pytest.mark.parametrize("ctx_size", [2048, 512])
def test_jobs_say_the_same_with_the_cache(ctx_size: int, packed: Packer, tmp_path: Path) -> None:
    """Eight jobs, three at once, that begin alike and part in the middle of a block; also where memory is short."""
    source = random.Random(9)
    shared = some_ids(source, 200)
    prompts = [shared[: source.choice((60, 130, 200))] + some_ids(source, 40) for _ in range(8)]
    runtime = load(packed("qwen3_moe", 8), Options(memory="8GiB", ctx_size=512, kv_tokens=ctx_size, parallel=3))
    with Model(runtime) as model:
        for round_ in range(2):  # the second time everything comes from disk
            cache = open_prefix_cache(runtime, directory=tmp_path)
            batcher = Batcher(model, parallel=3, prefix=cache)
            assert cache is not None
            plain = answers(batcher, prompts, cache=False)
            assert cache.stats()["lookups"] == 0
            served = answers(batcher, prompts, cache=True)
            again = answers(batcher, prompts, cache=True)
            batcher.close()
            cache.close()
            tokens = [result.token_ids for result in plain]
            assert [result.token_ids for result in served] == [result.token_ids for result in again] == tokens
            assert sum(result.usage.cached_tokens for result in again) > sum(map(len, prompts)) * 0.9
            if round_:
                assert all(result.usage.cached_tokens for result in served)
            assert runtime.kv is not None and runtime.kv.free_tokens == ctx_size


def test_a_prompt_is_shared_before_its_answer_ends(packed: Packer) -> None:
    """Two agents with one system prompt: the second takes it up while the first still answers."""
    ids = some_ids(random.Random(10), 300)
    runtime = load(packed("qwen3_moe", 8), Options(memory="8GiB", ctx_size=1024, parallel=2))
    with Model(runtime) as model:
        cache = open_prefix_cache(runtime)
        batcher = Batcher(model, parallel=2, prefix=cache)
        first: queue.SimpleQueue[Any] = queue.SimpleQueue()
        ticket = batcher.submit(Job(Request(tuple(ids), SamplingOptions(), max_tokens=700, ignore_eos=True)), first.put)
        while not isinstance(first.get(timeout=180), Piece):
            pass
        (second,) = answers(batcher, [ids[:280]], cache=True)
        ticket.cancel()
        batcher.close()
        assert second.usage.cached_tokens == 256, "its full blocks"
        assert cache is not None
        cache.close()
