"""Low-rank pairs against f64, alone and inside an attention block, on every available instruction set."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import available
from paged import Layer, eager, relative
from tile16 import random_matrix
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention, OlmoeConfig, OlmoeRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRotaryEmbedding

from stoker.native import kernels
from stoker.native.attention import Adapted, Pairs, rms_norm
from stoker.native.layer import LayerFront, Norm
from stoker.native.low_rank import LowRank
from stoker.quant.formats import WeightFormat
from stoker.runtime.linear import plain_matrix

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 96, 6, 2, 20  # heads begin and end inside tiles


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = kernels.threads()
    yield
    kernels.set_threads(before)


class Case:
    """A pair with the f32 values of its matrices. bf16 values are held as bf16, others as f32."""

    def __init__(self, rank: int, inputs: int, outputs: int, *, bf16: tuple[bool, bool], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a, self.b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
        self.a, self.b = (w.bfloat16().float() if short else w for w, short in zip((self.a, self.b), bf16, strict=True))
        self.pair = LowRank(plain_matrix(self.a), plain_matrix(self.b))

    def added(self, x_TD: Tensor, y_TO: Tensor) -> Tensor:
        y_TO = y_TO.clone()
        self.pair.add(x_TD, y_TO)
        return y_TO

    def expected(self, x_TD: Tensor, y_TO: Tensor) -> Tensor:
        return y_TO.double() + x_TD.double() @ self.a.double().T @ self.b.double().T


def rows(tokens: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed + 1000 * tokens))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(available()), st.integers(1, 64), st.integers(1, 300), st.integers(1, 150), st.integers(1, 70),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_sum_of_the_products(
    isa: str, rank: int, inputs: int, outputs: int, tokens: int, short_a: bool, short_b: bool
) -> None:
    before = kernels.isa()
    kernels.force_isa(isa)
    try:
        case = Case(rank, inputs, outputs, bf16=(short_a, short_b), seed=rank)
        x, y = rows(tokens, inputs), rows(tokens, outputs)
        got, want = case.added(x, y), case.expected(x, y)
    finally:
        kernels.force_isa(before)
    # Elements near zero are differences of large terms: errors are measured by the sum of their magnitudes.
    size = y.double().abs() + x.double().abs() @ case.a.double().abs().T @ case.b.double().abs().T
    assert ((got - want).abs() / size).max() < 2e-6


@pytest.mark.parametrize("bf16", [(True, True), (False, False)])
@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(16, 2048, 512), (1, 33, 17), (5, 100, 40), (64, 640, 1000)])
def test_a_token_has_the_same_bits_in_every_call(
    isa: str, rank: int, inputs: int, outputs: int, bf16: tuple[bool, bool], restored_threads: None
) -> None:
    case = Case(rank, inputs, outputs, bf16=bf16)
    x, y = rows(70, inputs), rows(70, outputs)
    kernels.set_threads(1)
    want = torch.cat([case.added(x[t : t + 1], y[t : t + 1]) for t in range(70)])
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        assert torch.equal(case.added(x, y), want)
        assert torch.equal(case.added(x[3:20], y[3:20]), want[3:20])
        assert torch.equal(case.added(x[69:], y[69:]), want[69:])


@pytest.mark.parametrize("bf16", [(True, True), (False, False)])
def test_zeros_add_nothing_and_infinities_pass(isa: str, bf16: tuple[bool, bool]) -> None:
    case = Case(5, 70, 37, bf16=bf16)
    x, y = rows(6, 70), rows(6, 37)
    assert torch.equal(case.added(torch.zeros_like(x), y), y)
    assert torch.equal(case.added(x[:0], y[:0]), y[:0])
    silent = LowRank(plain_matrix(case.a), plain_matrix(torch.zeros(37, 5)))
    still = y.clone()
    silent.add(x, still)
    assert torch.equal(still, y)
    x[2, 69], y[4, 36] = torch.inf, -torch.inf
    got, want = case.added(x, y), case.expected(x, y)
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(got), test(want))
    assert torch.isinf(got[2]).any() or torch.isnan(got[2]).all()
    assert torch.equal(case.added(x, y)[[0, 1, 3, 5]], case.added(rows(6, 70), rows(6, 37))[[0, 1, 3, 5]])


def test_what_does_not_fit_is_refused() -> None:
    a, b = plain_matrix(torch.randn(4, 32)), plain_matrix(torch.randn(20, 4))
    affine, _, _ = random_matrix(20, 32, WeightFormat("affine", 4, 32, "bf16"), np.random.default_rng(0))
    for bad_a, bad_b in (
        (b, a), (a, plain_matrix(torch.randn(20, 5))), (a, plain_matrix(torch.randn(20, 4), torch.randn(20))),
        (plain_matrix(torch.randn(32, 16)), affine),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="plain"):
            LowRank(bad_a, bad_b)
    pair, x, y = LowRank(a, b), torch.randn(3, 32), torch.randn(3, 20)
    for bad_x, bad_y in (
        (x.double(), y),
        (x[:2], y),
        (x, y[:, :19]),
        (torch.randn(32, 3).T, y),
        (x, torch.randn(20, 3).T),
    ):
        with pytest.raises(ValueError):
            pair.add(bad_x, bad_y)


def block(max_tokens: int = 64, n_seqs: int = 1) -> tuple[Qwen3MoeAttention, Qwen3MoeRotaryEmbedding, Layer]:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module, rotary = Qwen3MoeAttention(config, 0).eval(), Qwen3MoeRotaryEmbedding(config)
    norms = {"q_norm": module.q_norm.weight.detach(), "k_norm": module.k_norm.weight.detach(), "eps": 1e-6}
    return module, rotary, Layer(module, rotary, **norms, max_tokens=max_tokens, n_seqs=n_seqs)


def some_pairs(layer: Layer, names: str = "qkvo", rank: int = 6, seed: int = 0) -> dict[str, Case]:
    q, k, v = layer.block.projections
    shapes = {"q": (WIDTH, q), "k": (WIDTH, k), "v": (WIDTH, v), "o": (layer.block.mixed_width, layer.block.out_width)}
    cases = {name: Case(rank, *shapes[name], bf16=(True, name != "v"), seed=seed + ord(name)) for name in names}
    for case in cases.values():  # so that the sums stay of the size of what they are added to
        case.b = case.b * 0.03125
        case.pair = LowRank(plain_matrix(case.a), plain_matrix(case.b))
    return cases


def pairs_of(cases: dict[str, Case]) -> Pairs:
    return Pairs(**{name: case.pair for name, case in cases.items()})


def merge(module: torch.nn.Module, cases: dict[str, Case]) -> None:
    with torch.no_grad():
        for name, case in cases.items():
            getattr(module, f"{name}_proj").weight += case.b @ case.a


@pytest.mark.parametrize("names", ["qkvo", "qv", "k", "o"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_block_adds_what_a_merged_module_has(names: str, tokens: int, isa: str) -> None:
    module, rotary, layer = block()
    cases, x = some_pairs(layer, names), rows(tokens, WIDTH)
    base = layer(x, [0] * tokens, range(tokens))
    got = layer(x, [0] * tokens, range(tokens), adapted=Adapted(layer.block, [(0, 1 << 40, pairs_of(cases))]))
    merge(module, cases)
    want = eager(module, rotary, x)
    assert relative(got, want) < 2e-3
    if tokens > 1 or names != "k":  # one token sees itself alone, whatever its key
        assert relative(base, want) > 0.02


def test_norms_over_the_whole_projection_see_the_sum(isa: str) -> None:
    torch.manual_seed(4)
    config = OlmoeConfig(hidden_size=WIDTH, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=1)
    config._attn_implementation = "eager"
    module, rotary = OlmoeAttention(config, 0).eval(), OlmoeRotaryEmbedding(config)
    norms = {"q_norm": module.q_norm.weight.detach(), "k_norm": module.k_norm.weight.detach()}
    layer = Layer(module, rotary, **norms, eps=config.rms_norm_eps)
    cases, x = some_pairs(layer), rows(30, WIDTH)
    got = layer(x, [0] * 30, range(30), adapted=Adapted(layer.block, [(0, 30, pairs_of(cases))]))
    merge(module, cases)
    assert relative(got, eager(module, rotary, x)) < 2e-3


def test_a_token_of_a_block_has_the_same_bits_beside_others(isa: str, restored_threads: None) -> None:
    """Three sequences, two adapters of other ranks and none: together, alone, and token by token."""
    _, _, layer = block(n_seqs=3)
    one, two = (pairs_of(some_pairs(layer, names, rank, rank)) for names, rank in (("qkvo", 6), ("qo", 33)))
    x, seqs = rows(60, WIDTH), [0] * 25 + [1] * 20 + [2] * 15
    positions = [*range(25), *range(20), *range(15)]
    spans = {0: (0, 25, one), 1: (25, 45, None), 2: (45, 60, two)}
    together = [(first, last, pairs) for first, last, pairs in spans.values() if pairs is not None]
    results = []
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        layer.cache = layer.fresh_cache()
        results.append(layer(x, seqs, positions, adapted=Adapted(layer.block, together)))
    assert all(torch.equal(result, results[0]) for result in results)
    for seq, (first, last, pairs) in spans.items():
        for size in (last - first, 1, 7):
            layer.cache = layer.fresh_cache()
            parts = []
            for at in range(first, last, size):
                n = min(size, last - at)
                adapted = None if pairs is None else Adapted(layer.block, [(0, n, pairs)])
                parts.append(layer(x[at : at + n], [seq] * n, positions[at : at + n], adapted=adapted))
            assert torch.equal(torch.cat(parts), results[0][first:last])


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_front_passes_pairs_on(tokens: int, isa: str) -> None:
    _, _, layer = block()
    adapted = Adapted(layer.block, [(0, tokens, pairs_of(some_pairs(layer)))])
    before, after = Norm(torch.rand(WIDTH), 1e-6, False), Norm(torch.rand(WIDTH), 1e-6, False)
    x = rows(tokens, WIDTH)
    hidden = x + layer(rms_norm(x, before.weight, before.eps), [0] * tokens, range(tokens), adapted=adapted)
    layer.cache = layer.fresh_cache()
    positions = torch.arange(tokens)
    shared = (torch.zeros(tokens, dtype=torch.int32), positions.to(torch.int32), torch.zeros(1, dtype=torch.int32))
    cache = (layer.cache.address, layer.cache.table)
    got = LayerFront(layer.block, before, after, None).forward(x, *layer.tables(positions), *cache, *shared, adapted)
    assert torch.equal(got.hidden, hidden)
    assert torch.equal(got.normed, rms_norm(hidden, after.weight, after.eps))


def test_a_block_refuses_pairs_that_do_not_fit() -> None:
    _, _, layer = block()
    cases = some_pairs(layer)
    q, o = cases["q"].pair, cases["o"].pair
    for bad in (Pairs(k=q), Pairs(v=o), Pairs(o=q)):
        with pytest.raises(ValueError, match="expected"):
            Adapted(layer.block, [(0, 1, bad)])
    for spans in ([(-1, 2)], [(0, 2), (1, 3)], [(4, 3)]):
        with pytest.raises(ValueError, match="row"):
            Adapted(layer.block, [(*span, Pairs(q=q)) for span in spans])
