"""RMS norm and the router's choice against torch."""

from __future__ import annotations

import pytest
import torch

from stoker.native import kernels
from stoker.native.attention import rms_norm, topk_softmax


@pytest.mark.parametrize("shape", [(1, 2048), (7, 33), (300, 1000), (2, 3, 128), (0, 16)])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("isa", kernels.ISAS)
def test_rms_norm(shape: tuple[int, ...], unit_offset: bool, isa: str) -> None:
    before = kernels.isa()
    try:
        kernels.force_isa(isa)
    except kernels.OptionError:
        pytest.skip(f"no {isa} here")
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * (weight.double() + unit_offset)
    got = rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    kernels.force_isa(before)
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-6)


def test_rms_norm_rows_do_not_depend_on_the_batch_and_out_may_be_x() -> None:
    x, weight = torch.randn(400, 512), torch.randn(512)
    whole = rms_norm(x, weight, 1e-6)
    assert torch.equal(torch.cat([rms_norm(row[None], weight, 1e-6) for row in x]), whole)
    assert rms_norm(x, weight, 1e-6, out=x) is x
    assert torch.equal(x, whole)
    x[3, 5] = torch.nan
    spoiled = rms_norm(x, weight, 1e-6)
    assert spoiled[3].isnan().all() and not spoiled[torch.arange(400) != 3].isnan().any()


def test_rms_norm_refuses_what_does_not_fit() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    for args in [
        (x.double(), weight),
        (x.T, weight[:4]),
        (x, weight[:7]),
        (x, weight.half()),
        (torch.randn(8, 4).T, weight),
    ]:
        with pytest.raises(ValueError):
            rms_norm(*args, 1e-6)
    with pytest.raises(ValueError):
        rms_norm(x, weight, 1e-6, out=torch.empty(3, 8))


@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "k"), [(1, 128, 8), (5, 8, 2), (600, 64, 8), (3, 4, 4), (2, 512, 10), (4, 1, 1)]
)
@pytest.mark.parametrize("renormalise", [False, True])
def test_topk_softmax(n_tokens: int, n_experts: int, k: int, renormalise: bool) -> None:
    logits = torch.randn(n_tokens, n_experts) * 3
    want, chosen = torch.softmax(logits, -1).topk(k)
    if renormalise:
        want = want / want.sum(-1, keepdim=True)
    weights, experts = topk_softmax(logits, k, renormalise)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=0)


def test_topk_ties_take_the_lower_expert() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0], [5.0] * 7])
    weights, experts = topk_softmax(logits, 5, True)
    assert experts.tolist() == [[1, 3, 6, 2, 4], [0, 1, 2, 3, 4]]
    torch.testing.assert_close(weights[1], torch.full((5,), 0.2))


def test_topk_extremes() -> None:
    weights, experts = topk_softmax(torch.tensor([[1000.0, -torch.inf, 999.0], [-3e38, 3e38, 0.0]]), 2, False)
    assert experts.tolist() == [[0, 2], [1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.7310586, 0.2689414], [1.0, 0.0]]))
    weights, experts = topk_softmax(torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, 2.0]]), 2, True)
    assert weights[0].isnan().all() and not weights[1].isnan().any()
    assert experts.min() >= 0 and experts.max() < 3
    with pytest.raises(ValueError):
        topk_softmax(torch.zeros(2, 3), 4, True)
