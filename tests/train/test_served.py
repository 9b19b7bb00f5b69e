"""A trained adapter is served as it was trained: the same logits from the engine's own prerouter and LoRA."""

from pathlib import Path

import pytest
import torch

from stoker.runtime.model import Options
from stoker.runtime.model import load as serve
from stoker.train.model import BaseOptions, load
from stoker.train.output import load_into, save
from stoker.train.session import Student
from tests.runtime.conftest import Packer
from tests.train.test_gradients import some_ids
from tests.train.test_student import shaken_student, whole_batch

CLOSE = 1e-2  # of a row's norm: half-precision keys and values, 16-bit activations
NEAR_TIES = 0.1  # of the rows may have a route that flips between two experts with nearly the same score


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe", "qwen2_moe"])
def test_serving_computes_what_was_trained(architecture: str, packed: Packer, tmp_path: Path) -> None:
    store, ids, prompt = packed(architecture, 4), some_ids(2, 24), 5
    shaken = shaken_student(store)
    save(shaken, tmp_path, {}, {}, {})
    shaken.model.close()
    student = Student.of(load(store, BaseOptions(memory="6GiB", step_tokens=64, threads=1)))
    load_into(student, tmp_path)
    with torch.no_grad(), student.routing(whole_batch(ids, prompt)):
        trained = student.model.logits(student.model.hidden_states(ids).flatten(0, 1))
    student.model.close()
    with serve(store, Options(memory="6GiB", ctx_size=64, routing="prerouter", adapter=str(tmp_path))) as runtime:
        served = runtime.logits(ids, prompt_tokens=prompt).flatten(0, 1)
        exact_route = runtime.logits(ids, prompt_tokens=24).flatten(0, 1)
    apart = (served - trained).norm(dim=-1) / trained.norm(dim=-1)
    assert (apart < CLOSE).float().mean() >= 1 - NEAR_TIES, apart
    assert ((exact_route - trained).norm(dim=-1) / trained.norm(dim=-1) > 0.1).float().mean() > 0.5  # heads matter
