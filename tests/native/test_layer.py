"""The first part of a decoder layer in one call, and a token through its experts: the bits of the parts one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paged import Layer
from test_experts import A4, Pool, make_layout
from tile16 import aligned, to_tiles
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRotaryEmbedding

from stoker.native import kernels
from stoker.native.attention import rms_norm, topk_softmax
from stoker.native.layer import FrontResult, LayerFront, Norm, Router
from stoker.quant.formats import MatrixSpec, WeightFormat

WIDTH, EXPERTS, TOP_K = 96, 12, 3


def some_layer() -> SimpleNamespace:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=1
    )
    config._attn_implementation = "eager"
    module = Qwen3MoeAttention(config, 0).eval()
    layer = Layer(module, Qwen3MoeRotaryEmbedding(config), q_norm=module.q_norm.weight.detach(),
                  k_norm=module.k_norm.weight.detach(), eps=1e-6)  # fmt: skip
    gate = torch.randn(EXPERTS, WIDTH)
    return SimpleNamespace(
        attention=layer,
        before=Norm(torch.rand(WIDTH), 1e-6, False),
        after=Norm(torch.rand(WIDTH), 1e-5, True),
        router=Router(
            kernels.Matrix(
                MatrixSpec(EXPERTS, WIDTH, WeightFormat("f32")), aligned(to_tiles(gate.numpy())), None, None
            ),
            TOP_K,
            True,
        ),
    )


def one_call(layer: SimpleNamespace, front: LayerFront, x_TD: Tensor) -> FrontResult:
    tokens, attention = len(x_TD), layer.attention
    positions = torch.arange(tokens)
    seq, pos = torch.zeros(tokens, dtype=torch.int32), positions.to(torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    return front.forward(
        x_TD, *attention.tables(positions), attention.cache.address, attention.cache.table, seq, pos, start
    )


@pytest.mark.parametrize("tokens", [1, 5, 70, 400])
def test_the_bits_of_the_parts(tokens: int, isa: str) -> None:
    layer = some_layer()
    x_TD = torch.randn(tokens, WIDTH) * 2
    kept = x_TD.clone()
    normed_TD = rms_norm(x_TD, layer.before.weight, 1e-6)
    hidden_TD = x_TD + layer.attention(normed_TD, [0] * tokens, range(tokens))
    after_TD = rms_norm(hidden_TD, layer.after.weight, 1e-5, unit_offset=True)
    logits_TE = kernels.matmul(layer.router.matrix, after_TD)
    weights_TK, experts_TK = topk_softmax(logits_TE, TOP_K, True)

    layer.attention.cache = layer.attention.fresh_cache()
    got = one_call(layer, LayerFront(layer.attention.block, layer.before, layer.after, layer.router), x_TD)
    for name, wanted in zip(FrontResult._fields, (hidden_TD, after_TD, logits_TE, weights_TK, experts_TK), strict=True):
        assert torch.equal(getattr(got, name), wanted), name
    assert torch.equal(x_TD, kept)

    layer.attention.cache = layer.attention.fresh_cache()
    bare = one_call(layer, LayerFront(layer.attention.block, layer.before, layer.after, None), x_TD)
    assert torch.equal(bare.hidden, hidden_TD) and torch.equal(bare.normed, after_TD)
    assert bare.logits.numel() == bare.weights.numel() == bare.experts.numel() == 0


def test_the_front_refuses_what_does_not_fit() -> None:
    layer = some_layer()
    block, before, after, router = layer.attention.block, layer.before, layer.after, layer.router
    short = Norm(torch.rand(WIDTH - 1), 1e-6, False)
    for bad in ((short, after, router), (before, short, router), (before, after, router._replace(top_k=EXPERTS + 1))):
        with pytest.raises(ValueError):
            LayerFront(block, *bad)
    narrow = kernels.Matrix(
        MatrixSpec(EXPERTS, 32, WeightFormat("f32")), aligned(to_tiles(np.zeros((EXPERTS, 32), np.float32))), None, None
    )
    with pytest.raises(ValueError):
        LayerFront(block, before, after, Router(narrow, 2, True))
    front = LayerFront(block, before, after, router)
    for bad_x in (torch.randn(3, WIDTH).double(), torch.randn(3, WIDTH + 1), torch.randn(WIDTH, 3).T):
        with pytest.raises(ValueError):
            one_call(layer, front, bad_x)


@pytest.mark.parametrize("choices", [1, 3, 8])
def test_one_token_is_forward_combine_and_add(choices: int, isa: str) -> None:
    pool = Pool(make_layout(128, 64, A4), "silu", 8, activation_bits=16)
    x_1D, residual_1D, weights_1K = torch.randn(1, 128), torch.randn(1, 128), torch.rand(1, choices)
    experts = list(range(choices))
    summed = torch.empty(1, 128)
    kernels.combine(pool.run([(expert, 0) for expert in experts], x_1D), weights_1K, summed)
    addresses = [pool.records[expert].data_ptr() for expert in experts]
    got = pool.native.forward_token(addresses, x_1D, weights_1K, residual_1D)
    assert torch.equal(got, residual_1D + summed)


def test_one_token_refuses_what_does_not_fit() -> None:
    pool = Pool(make_layout(128, 64, A4), "silu", 2)
    x_1D, weights_1K, address = torch.randn(1, 128), torch.rand(1, 1), pool.records[0].data_ptr()
    for arguments in (
        ([address], torch.randn(2, 128), weights_1K, x_1D),
        ([address], x_1D, torch.rand(1, 2), x_1D),
        ([address], x_1D, weights_1K, torch.randn(1, 64)),
        ([address], x_1D.double(), weights_1K, x_1D),
    ):
        with pytest.raises(ValueError):
            pool.native.forward_token(*arguments)
    for bad in (0, address + 8):
        with pytest.raises(IndexError, match="null or not aligned"):
            pool.native.forward_token([bad], x_1D, weights_1K, x_1D)
