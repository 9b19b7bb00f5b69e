"""Losses, KL and agreement against their definitions, written out."""

import numpy as np
import pytest
import torch

from stoker.evaluate.scores import ROWS, kl_divergence, losses, score


def probabilities(logits: torch.Tensor) -> np.ndarray:
    shifted = np.exp(logits.double().numpy() - logits.double().numpy().max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2 * ROWS + 3, 50) * 3, torch.randn(2 * ROWS + 3, 50) * 3
    return ours, theirs, torch.randint(0, 50, (2 * ROWS + 3,))


def test_losses_and_kl_follow_their_definitions(pair: tuple[torch.Tensor, ...]) -> None:
    ours, theirs, wanted = pair
    p, q = probabilities(theirs), probabilities(ours)
    found = score(ours, wanted, theirs)
    rows = np.arange(len(wanted))
    np.testing.assert_allclose(found.losses_N, -np.log(q[rows, wanted.numpy()]), rtol=1e-6)
    np.testing.assert_allclose(found.kl_N, (p * np.log(p / q)).sum(-1), rtol=1e-6)
    np.testing.assert_array_equal(found.same_top1_N, p.argmax(-1) == q.argmax(-1))


def test_kl_has_a_direction_and_a_zero(pair: tuple[torch.Tensor, ...]) -> None:
    ours, theirs, _ = pair
    assert kl_divergence(ours, ours).max() < 1e-12
    assert not np.allclose(kl_divergence(ours, theirs), kl_divergence(theirs, ours))
    assert kl_divergence(ours, theirs + 7).min() >= 0  # a constant changes no probability
    np.testing.assert_allclose(kl_divergence(ours, theirs + 7), kl_divergence(ours, theirs), rtol=1e-4)


def test_tokens_that_a_model_rules_out_stay_finite() -> None:
    certain = torch.tensor([[200.0, 0.0, -200.0]])
    assert np.isfinite(losses(certain, torch.tensor([2])))[0]
    assert np.isfinite(kl_divergence(torch.zeros(1, 3), certain))[0]
