"""Quantised matmul and embedding lookup against dequantised weights in f64, on every available instruction set."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import available
from tile16 import aligned, random_matrix, relative_error, worst_element

from stoker.errors import OptionError
from stoker.native import kernels
from stoker.quant.formats import MatrixSpec, WeightFormat

AFFINE = [WeightFormat("affine", b, g, s) for b, g, s in itertools.product((4, 8), (32, 64, 128), ("bf16", "f16"))]
FORMATS = [*AFFINE, WeightFormat("bf16"), WeightFormat("f32")]
TOLERANCE = {"affine": 1e-2, "bf16": 4e-3, "f32": 2e-6}  # int8 and bf16 activations, f32 sums
FINE_TOLERANCE = {"affine": 5e-5, "bf16": 1e-6, "f32": 1e-6}  # activation_bits=16


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = kernels.threads()
    kernels.set_threads(2)
    yield
    kernels.set_threads(before)


def activations(tokens: int, cols: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((tokens, cols)).astype(np.float32))


def expected(x: torch.Tensor, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return x.numpy().astype(np.float64) @ w.astype(np.float64).T + bias


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 31, 64, 300])
def test_matmul_equals_the_dequantised_product(isa: str, fmt: WeightFormat, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    rows, cols = 53, 256 if fmt.kind == "affine" else 251
    m, w, bias = random_matrix(rows, cols, fmt, rng, row_bias=tokens % 2 == 1)
    x = activations(tokens, cols, rng)
    got, want = kernels.matmul(m, x).numpy(), expected(x, w, bias)
    assert relative_error(got, want) < TOLERANCE[fmt.kind], worst_element(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
@pytest.mark.parametrize("tokens", [1, 3, 8, 75])
def test_sixteen_bit_activations(isa: str, fmt: WeightFormat, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    cols = 256 if fmt.kind == "affine" else 251
    m, w, bias = random_matrix(53, cols, fmt, rng, row_bias=tokens % 2 == 1, activation_bits=16)
    x = activations(tokens, cols, rng)
    got, want = kernels.matmul(m, x).numpy(), expected(x, w, bias)
    assert relative_error(got, want) < FINE_TOLERANCE[fmt.kind], worst_element(got, want)
    for t in range(tokens):
        assert torch.equal(kernels.matmul(m, x[t : t + 1].clone())[0], torch.from_numpy(got[t]))


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.sampled_from(FORMATS),
    activation_bits=st.sampled_from([8, 16]),
    rows=st.integers(1, 70),
    units=st.integers(1, 5),
    odd=st.integers(0, 31),
    tokens=st.integers(1, 70),
    name=st.sampled_from(available()),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes(
    fmt: WeightFormat, activation_bits: int, rows: int, units: int, odd: int, tokens: int, name: str, seed: int
) -> None:
    before = kernels.isa()
    kernels.force_isa(name)
    try:
        rng = np.random.default_rng(seed)
        cols = units * fmt.group_size if fmt.kind == "affine" else units * 32 - odd
        m, w, bias = random_matrix(rows, cols, fmt, rng, row_bias=bool(seed % 2), activation_bits=activation_bits)
        x = activations(tokens, cols, rng)
        got, want = kernels.matmul(m, x).numpy(), expected(x, w, bias)
    finally:
        kernels.force_isa(before)
    # A single small product can cancel: errors are judged against the sizes of the terms.
    size = np.sqrt(expected(x**2, w**2, bias**2)) + 1e-30
    coarse, fine = {"affine": (0.05, 2e-4), "bf16": (0.02, 1e-5), "f32": (1e-5, 1e-5)}[fmt.kind]
    limit = coarse if activation_bits == 8 else fine
    assert np.max(np.abs(got - want) / size) < limit, worst_element(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_a_row_does_not_depend_on_its_company(
    isa: str, fmt: WeightFormat, activation_bits: int, two_threads: None
) -> None:
    rng = np.random.default_rng(7)
    m, _, _ = random_matrix(80, 512, fmt, rng, row_bias=True, activation_bits=activation_bits)
    x = activations(37, 512, rng)  # enough to be encoded by all threads, which single rows are not
    together = kernels.matmul(m, x)
    for n_threads in (1, 2):
        kernels.set_threads(n_threads)
        assert torch.equal(kernels.matmul(m, x), together)
        for t in range(37):
            assert torch.equal(kernels.matmul(m, x[t : t + 1].clone()), together[t : t + 1])


@pytest.mark.parametrize(
    ("fmt", "activation_bits"),
    [*itertools.product(AFFINE, (8, 16)), (WeightFormat("bf16"), 16), (WeightFormat("f32"), 8)],
    ids=lambda p: p.label() if isinstance(p, WeightFormat) else str(p),
)
def test_results_are_equal_on_all_instruction_sets(fmt: WeightFormat, activation_bits: int) -> None:
    """All but bf16 with bf16 activations, whose hardware product rounds in its own way."""
    rng = np.random.default_rng(3)
    m, _, _ = random_matrix(40, 512, fmt, rng, activation_bits=activation_bits)
    x = activations(9, 512, rng)
    before, results = kernels.isa(), []
    for name in available():
        kernels.force_isa(name)
        results.append(kernels.matmul(m, x))
    kernels.force_isa(before)
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_extreme_codes_do_not_saturate(isa: str, bits: int, activation_bits: int) -> None:
    fmt = WeightFormat("affine", bits, 32)
    spec = MatrixSpec(16, 128, fmt)
    one = np.full(spec.scales_shape, 0x3F80, np.uint16)
    codes = np.full(spec.codes_shape, 0xFFFFFFFF, np.uint32)
    m = kernels.Matrix(spec, aligned(codes), aligned(one), aligned(np.zeros_like(one)), activation_bits=activation_bits)
    for sign in (1.0, -1.0):
        x = torch.full((5, 128), sign)
        torch.testing.assert_close(
            kernels.matmul(m, x), torch.full((5, 16), sign * 128 * (2**bits - 1)), rtol=1e-6, atol=0
        )
        x[:, 1:] *= (127 * 256 - 128) / (127 * 256)  # the low plane of 16 bits is at its end, -128
        want = sign * (2**bits - 1) * (4 + 124 * (127 * 256 - 128) / (127 * 256))
        x[:, 0::32] = sign
        got = kernels.matmul(m, x)
        torch.testing.assert_close(got, torch.full((5, 16), want), rtol=1e-6 if activation_bits == 16 else 5e-3, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_is_reported_in_its_row_alone(
    isa: str, fmt: WeightFormat, activation_bits: int, value: float
) -> None:
    rng = np.random.default_rng(11)
    m, _, _ = random_matrix(35, 256, fmt, rng, activation_bits=activation_bits)
    x = activations(6, 256, rng)
    clean = kernels.matmul(m, x)
    x[3, 200] = value
    dirty = kernels.matmul(m, x)
    assert not torch.isfinite(dirty[3]).any()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
def test_zeros_and_denormals(isa: str, fmt: WeightFormat) -> None:
    rng = np.random.default_rng(5)
    m, w, bias = random_matrix(33, 256, fmt, rng, row_bias=True)
    assert torch.equal(kernels.matmul(m, torch.zeros(3, 256)), torch.from_numpy(bias).expand(3, 33))
    m, w, bias = random_matrix(33, 256, fmt, rng)
    x = activations(3, 256, rng)
    tiny = kernels.matmul(m, x * 1e-39)  # f32 denormals; bf16 products may flush them to zero, never to garbage
    assert torch.isfinite(tiny).all()
    assert tiny.abs().max() < 1e-35
    small = (x * 1e-30).contiguous()
    got, want = kernels.matmul(m, small).numpy(), expected(small, w, bias)
    assert relative_error(got * 1e30, want * 1e30) < TOLERANCE[fmt.kind]
    if fmt.kind == "affine":
        denormal = (x * 1e-38).contiguous()
        got, want = kernels.matmul(m, denormal).numpy(), expected(denormal, w, bias)
        assert relative_error(got.astype(np.float64) * 1e38, want * 1e38) < TOLERANCE[fmt.kind]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
def test_gather_rows_is_exact(fmt: WeightFormat, two_threads: None) -> None:
    rng = np.random.default_rng(2)
    m, w, _ = random_matrix(61, 256, fmt, rng)
    ids = torch.from_numpy(rng.integers(0, 61, 40))
    got = kernels.gather_rows(m, ids).numpy()
    np.testing.assert_array_equal(got, w[ids.numpy()])
    np.testing.assert_array_equal(kernels.gather_rows(m, ids[:1].clone()).numpy(), w[ids[:1].numpy()])


@pytest.mark.parametrize("bad", [-1, 61])
def test_gather_refuses_ids_out_of_range(bad: int) -> None:
    m, _, _ = random_matrix(61, 64, AFFINE[2], np.random.default_rng(2))
    with pytest.raises(IndexError, match="is not in"):
        kernels.gather_rows(m, torch.tensor([0, bad]))


def test_the_door_refuses_what_does_not_fit() -> None:
    rng = np.random.default_rng(1)
    m, _, _ = random_matrix(20, 64, WeightFormat("affine", 4, 64), rng)
    for x in (
        torch.zeros(2, 63),
        torch.zeros(2, 64, dtype=torch.float64),
        torch.zeros(64),
        torch.zeros(64, 2).T,
    ):
        with pytest.raises(ValueError, match="x: expected"):
            kernels.matmul(m, x)
    with pytest.raises(ValueError, match="out: expected"):
        kernels.matmul(m, torch.zeros(2, 64), torch.zeros(2, 21))
    codes = aligned(np.zeros(m.spec.codes_bytes, np.uint8))
    scales = aligned(np.zeros(m.spec.scales_bytes, np.uint8))
    with pytest.raises(ValueError, match="bytes in tile16"):
        kernels.Matrix(m.spec, codes[64:], scales, scales)
    with pytest.raises(ValueError, match="scales and biases"):
        kernels.Matrix(m.spec, codes, None, None)
    with pytest.raises(ValueError, match="raw integers"):
        kernels.Matrix(m.spec, codes, scales.view(torch.float16), scales)
    with pytest.raises(ValueError, match="aligned"):
        wide = aligned(np.zeros(m.spec.codes_bytes + 64, np.uint8))
        kernels.Matrix(m.spec, wide[4 : 4 + m.spec.codes_bytes], scales, scales)
    with pytest.raises(ValueError, match="activation_bits must be 8 or 16"):
        kernels.Matrix(m.spec, codes, scales, scales, activation_bits=12)
    with pytest.raises(OptionError):
        kernels.set_threads(0)
    with pytest.raises(OptionError):
        kernels.force_isa("sse9")


def test_activation_bits_change_nothing_for_f32_weights(isa: str) -> None:
    spec, rng = MatrixSpec(20, 61, WeightFormat("f32")), np.random.default_rng(1)
    codes = aligned(rng.standard_normal(spec.codes_shape).astype(np.float32))
    x = activations(5, 61, rng)
    results = [kernels.matmul(kernels.Matrix(spec, codes, None, None, activation_bits=bits), x) for bits in (8, 16)]
    assert torch.equal(*results)


def test_no_tokens_give_no_rows() -> None:
    m, _, _ = random_matrix(20, 64, WeightFormat("affine", 4, 64), np.random.default_rng(1))
    assert kernels.matmul(m, torch.zeros(0, 64)).shape == (0, 20)
    assert kernels.gather_rows(m, torch.zeros(0, dtype=torch.int64)).shape == (0, 64)
