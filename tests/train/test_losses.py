"""Losses against brute force over the whole vocabulary, and what they must be at the ends."""

import itertools

import torch
from torch.nn import functional as F

from stoker.routing.select import LayerRule, select
from stoker.train.losses import Likeliest, imitation, reverse_kl, slot_agreement

SOFTMAX, SIGMOID = LayerRule(2), LayerRule(2, "sigmoid", groups=2, top_groups=1)


def some(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def test_reverse_kl_over_all_tokens_is_the_kl() -> None:
    student, teacher = some(5, 9, 0), some(5, 9, 1)
    q, p = student.log_softmax(-1), teacher.log_softmax(-1)
    wanted = (q.exp() * (q - p)).sum(-1)
    assert torch.allclose(reverse_kl(student, Likeliest.of(teacher, 8)), wanted)  # a tail of one token is that token
    fewer = [reverse_kl(student, Likeliest.of(teacher, count)) for count in (1, 3, 6, 8)]
    assert all((few <= more + 1e-12).all() for few, more in itertools.pairwise(fewer))
    assert torch.allclose(reverse_kl(teacher, Likeliest.of(teacher, 3)), torch.zeros(5, dtype=torch.float64), atol=1e-9)


def test_reverse_kl_has_the_gradient_of_finite_differences() -> None:
    teacher = Likeliest.of(some(3, 9, 1), 4)
    assert torch.autograd.gradcheck(lambda x: reverse_kl(x, teacher), some(3, 9, 2).requires_grad_())


def test_imitation_is_least_at_the_gate() -> None:
    gate, other = some(6, 8, 0), some(6, 8, 1)
    for rule in (SOFTMAX, SIGMOID):
        assert torch.allclose(imitation(gate, gate, rule, 2, "kl"), torch.zeros(6, dtype=torch.float64), atol=1e-9)
        assert (imitation(other, gate, rule, 2, "kl") > 0.01).all()
        sharp = torch.zeros_like(gate).scatter_(1, select(gate, rule, 2)[0], 50.0) - 25
        assert (imitation(sharp, gate, rule, 2, "set") < imitation(gate, gate, rule, 2, "set")).all()


def test_imitation_of_softmax_is_torchs_kl() -> None:
    gate, head = some(6, 8, 0), some(6, 8, 1)
    wanted = F.kl_div(head.log_softmax(-1), gate.softmax(-1), reduction="none").sum(-1)
    assert torch.allclose(imitation(head, gate, SOFTMAX, 2, "kl"), wanted)


def test_agreement_counts_common_experts() -> None:
    gate = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    head = torch.tensor([[3.0, 0.0, 2.0, 1.0]])
    assert slot_agreement(head, gate, SOFTMAX, 2).tolist() == [0.5]
