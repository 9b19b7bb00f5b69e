"""The student's path: teacher-forced routes against token by token, its gradients, and heads that learn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stoker.errors import OptionError
from stoker.routing.select import select
from stoker.train.data import Batch, Windows
from stoker.train.loop import Schedule
from stoker.train.lora import LoraSettings
from stoker.train.model import BaseOptions, load
from stoker.train.sample import answer
from stoker.train.session import Student, owners_of, targets
from stoker.train.stages import Stage, StageOptions, train_distill, train_heads, train_sft
from stoker.train.student import StudentRoutes
from stoker.train.teacher import Teacher
from stoker.train.workers import Workers
from tests.runtime.conftest import Packer
from tests.runtime.oracle import relative_l2
from tests.train.test_gradients import some_ids

ARCHITECTURES = ["qwen3_moe", "glm4_moe", "deepseek_v3", "qwen2_moe"]


def shaken_student(store: Path, hold: str = "memory", k: int | None = None, next_token: bool = False) -> Student:
    """Heads and LoRA moved away from where they begin, so that every part of them matters."""
    base = load(store, BaseOptions(memory="6GiB", hold=hold, step_tokens=64, threads=1))  # type: ignore[arg-type]
    student = Student.of(base, k)
    student.add_heads(hidden=32, next_token=next_token)
    student.add_lora(LoraSettings(4, 8))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (*student.head_parameters().values(), *student.lora_parameters().values()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.copy_(parameter.bfloat16())  # as files hold them
    return student


def whole_batch(ids: torch.Tensor, answer_from: int = 1) -> Batch:
    rows, tokens = ids.shape
    return Batch(ids, torch.full((rows,), tokens), torch.full((rows,), answer_from))


@pytest.mark.parametrize("k", [None, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("next_token", [False, True], ids=["", "sees_next"])
def test_teacher_forced_equals_token_by_token(
    architecture: str, k: int | None, next_token: bool, packed: Packer
) -> None:
    student = shaken_student(packed(architecture, 4), k=k, next_token=next_token)
    assert student.heads is not None
    along = (student.heads, student.rules, student.top_k)
    drawn = answer(student.model, some_ids(3, 6), torch.zeros(3, 12), temperature=0.0, student=along)
    with torch.no_grad(), student.routing(drawn) as routes:
        hidden = student.model.hidden_states(drawn.ids_BT)
        likeliest = student.model.logits(hidden.flatten(0, 1)).argmax(-1).view(3, -1)
    assert isinstance(routes, StudentRoutes)
    assert torch.equal(likeliest[:, 5:-1], drawn.ids_BT[:, 6:])
    followed = drawn.answers_BT.flatten()
    for layer, logits in routes.predicted.items():
        chosen, _ = select(logits, student.rules[layer], student.top_k)
        assert torch.equal(routes.executed[layer][followed], chosen[followed])  # the executed set is the predicted set
        own, _ = select(routes.gate_logits[layer], student.rules[layer], student.top_k)
        assert torch.equal(routes.executed[layer][~followed].sort().values, own[~followed].sort().values)
    student.model.close()


@pytest.mark.parametrize("next_token", [False, True], ids=["", "sees_next"])
def test_a_feature_is_of_the_token_before(next_token: bool, packed: Packer) -> None:
    """The route of a token depends on the tokens before it, on itself only where heads see it, never on later ones."""
    student = shaken_student(packed("qwen3_moe", 4), next_token=next_token)
    ids = some_ids(1, 10)
    other = ids.clone()
    other[0, 6] = (ids[0, 6] + 7) % 150 + 3
    kept = []
    for one in (ids, other):
        with torch.no_grad(), student.routing(whole_batch(one)) as routes:
            student.model.hidden_states(one)
        assert routes is not None
        kept.append(routes)
    for layer in kept[0].predicted:
        first, second = kept[0].predicted[layer], kept[1].predicted[layer]
        blind = 6 if next_token else 7
        assert torch.allclose(first[:blind], second[:blind], atol=1e-5)
        assert not torch.allclose(first[blind], second[blind], atol=1e-3)
    student.model.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streamed_gradients_are_those_of_plain_autograd(architecture: str, packed: Packer) -> None:
    """Kept in memory, computed again, and streamed: the same loss and the same gradients of heads and LoRA."""
    batch, found = whole_batch(some_ids(2, 20), 4), []
    for hold in ("memory", "stream"):
        student = shaken_student(packed(architecture, 4), hold)
        parameters = student.train_only(heads=True, lora=True)
        wanted = targets(batch)
        loss, routes = student.loss(
            batch, lambda logits, rows, wanted=wanted: F.cross_entropy(logits, wanted[rows], reduction="none")
        )
        assert routes is not None
        (loss + 0.1 * routes.imitation("kl")).backward()
        grads = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
        found.append((float(loss.detach()), grads))
        student.model.close()
    (plain_loss, plain), (streamed_loss, streamed) = found
    assert plain.keys() == streamed.keys() and any("fc1" in name for name in plain)
    assert any("lora_A" in name for name in plain)
    assert streamed_loss == pytest.approx(plain_loss, rel=1e-4)
    ours, theirs = (torch.cat([grads[name].flatten() for name in sorted(plain)]) for grads in (streamed, plain))
    assert relative_l2(ours, theirs) < 5e-3


def test_lora_gradient_is_that_of_finite_differences(packed: Packer) -> None:
    student = shaken_student(packed("qwen3_moe", 4))
    batch = whole_batch(some_ids(2, 16))
    wanted = targets(batch)

    def loss() -> torch.Tensor:
        return student.loss(batch, lambda logits, rows: F.cross_entropy(logits, wanted[rows], reduction="none"))[0]

    parameters = student.train_only(heads=False, lora=True)
    loss().backward()
    name = max(parameters, key=lambda key: float(parameters[key].grad.norm()))  # type: ignore[union-attr]
    parameter = parameters[name]
    assert parameter.grad is not None
    direction, step = parameter.grad / parameter.grad.norm(), 1e-3
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            parameter.add_(direction, alpha=sign * step)
            ends.append(float(loss()))
            parameter.add_(direction, alpha=-sign * step)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(parameter.grad.norm()), rel=0.05)
    student.model.close()


def stage(directory: Path, steps: int, lr: float, **options: object) -> Stage:
    return Stage(directory, Schedule(steps, lr, 2), StageOptions(sequences=4, **options), {}, Workers())  # type: ignore[arg-type]


def repeated_text() -> Windows:
    """Text with something to learn: each token fixes the next one."""
    step = np.random.default_rng(0).permutation(100)
    ids = [3]
    for _ in range(2000):
        ids.append(int(step[ids[-1] % 100]) + 3)
    return Windows([np.array(ids)], 24, 0)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(("kind", "next_token"), [("kl", False), ("set", False), ("kl", True)])
def test_heads_learn(architecture: str, kind: str, next_token: bool, packed: Packer, tmp_path: Path) -> None:
    base = load(packed(architecture, 4), BaseOptions(memory="6GiB", step_tokens=96, threads=1))
    student = Student.of(base)
    student.add_heads(hidden=32, next_token=next_token)
    untouched = {name: p.detach().clone() for name, p in base.model.named_parameters()}
    metrics = train_heads(student, repeated_text(), stage(tmp_path, 40, 3e-3, loss=kind))
    assert np.mean([m["loss"] for m in metrics[-5:]]) < 0.8 * metrics[0]["loss"]
    assert np.mean([m["agreement"] for m in metrics[-5:]]) > metrics[0]["agreement"] + 0.05
    assert all(torch.equal(untouched[name], p) for name, p in base.model.named_parameters())
    base.close()


def test_sft_and_distill_lower_their_losses(packed: Packer, tmp_path: Path) -> None:
    student = shaken_student(packed("qwen3_moe", 4), "stream")
    text = repeated_text()
    sft = train_sft(student, text, stage(tmp_path / "sft", 25, 1e-2))
    assert np.mean([m["loss"] for m in sft[-4:]]) < 0.9 * sft[0]["loss"]
    options = {"prompt_tokens": 4, "answer_tokens": 12, "likeliest": 16, "train_heads": True}
    teacher = Teacher(student.model, student)
    distilled = train_distill(student, teacher, text, stage(tmp_path / "distill", 25, 1e-2, **options))
    assert np.mean([m["loss"] for m in distilled[-4:]]) < 0.9 * np.mean([m["loss"] for m in distilled[:2]])
    student.model.close()


def test_without_what_was_trained_the_base_is_itself(packed: Packer) -> None:
    ids = some_ids(1, 8)
    with load(packed("qwen3_moe", 4), BaseOptions(memory="6GiB", step_tokens=64, threads=1)) as base, torch.no_grad():
        wanted = base.hidden_states(ids)
    student = shaken_student(packed("qwen3_moe", 4), k=1)
    with torch.no_grad():
        with student.untrained():
            assert torch.equal(student.model.hidden_states(ids), wanted)
        assert not torch.equal(student.model.hidden_states(ids), wanted)
    student.model.close()


def test_owners() -> None:
    assert owners_of(None, [1, 2, 3, 4]) == [0, 1, 2] and owners_of([3, 2], [1, 2, 3, 4]) == [1, 2]
    for wrong in ([4], [0, 1], []):
        with pytest.raises(OptionError, match="owners"):
            owners_of(wrong, [1, 2, 3, 4])
