"""The oracle itself: exact moves, the meaning of words, and how far quantising may be off."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.quant.reference import (
    SCALE_DTYPES,
    Parts,
    dequantize,
    dequantize_rows,
    pack_codes,
    pack_tiles,
    quantize,
    quantize_rows,
    unpack_codes,
    unpack_tiles,
)

AFFINE = [WeightFormat("affine", b, g, s) for b in (4, 8) for g in (32, 64, 128) for s in ("bf16", "f16")]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def bits_equal(a: Parts, b: Parts) -> bool:
    for x, y in zip(a, b, strict=True):
        if (x is None) != (y is None):
            return False
        if x is not None and not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            return False
    return True


@pytest.mark.parametrize("fmt", AFFINE, ids=WeightFormat.label)
@pytest.mark.parametrize("rows", [1, 16, 19])
def test_every_element_is_within_half_a_step_or_at_the_end_of_the_range(fmt: WeightFormat, rows: int) -> None:
    w = torch.randn(rows, 3 * fmt.group_size, generator=torch.Generator().manual_seed(7)) * 0.05
    spec = MatrixSpec(*w.shape, fmt)
    parts = quantize(w, fmt)
    assert parts.codes.shape == spec.codes_shape and parts.scales.shape == spec.scales_shape
    flat = unpack_tiles(parts, spec)
    step = flat.scales.float().abs().repeat_interleave(fmt.group_size, 1)
    codes = unpack_codes(flat.codes, fmt.bits)
    error = (dequantize(parts, spec) - w).abs()
    inside = (codes > 0) & (codes < 2**fmt.bits - 1)
    assert (error[inside] <= 0.5001 * step[inside]).all()
    assert (error <= 2 * step).all()  # the ends: rounding of the zero code, the scale and the bias
    assert error.norm() / w.norm() < (0.12 if fmt.bits == 4 else 0.008)


@pytest.mark.parametrize("fmt", AFFINE, ids=WeightFormat.label)
def test_zero_stays_zero_within_a_rounding_of_the_bias(fmt: WeightFormat) -> None:
    w = torch.randn(8, fmt.group_size, generator=torch.Generator().manual_seed(3))
    w[:, ::2] = 0.0
    back = dequantize(quantize(w, fmt), MatrixSpec(*w.shape, fmt))
    edge = w.abs().amax(1, keepdim=True)
    assert (back[:, ::2].abs() <= edge * 2.0**-7).all()
    assert torch.equal(dequantize(quantize(0 * w, fmt), MatrixSpec(*w.shape, fmt)), 0 * w)


@pytest.mark.parametrize("value", [1e-20, 3.0, -0.125, 1e20])
def test_constant_groups_keep_their_value(value: float) -> None:
    fmt = WeightFormat("affine", 4, 32, "bf16")
    w = torch.full((16, 64), value)
    assert torch.allclose(dequantize(quantize(w, fmt), MatrixSpec(16, 64, fmt)), w, rtol=2**-8, atol=0)


def test_words_hold_low_bits_first() -> None:
    """Column c of a 4-bit row is bits 4c..4c+3 of the little-endian row: MLX's layout."""
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    assert pack_codes(codes, 4).numpy().tolist() == [[0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]]
    assert pack_codes(codes[:, :4], 8).numpy().tolist() == [[0x03020100]]


def test_tile16_holds_the_same_word_of_sixteen_rows_in_64_bytes() -> None:
    fmt = WeightFormat("affine", 4, 32, "f16")
    spec = MatrixSpec(17, 64, fmt)
    words = torch.from_numpy(np.arange(17 * 8, dtype=np.uint32).reshape(17, 8))
    scales = torch.arange(34, dtype=torch.float16).view(17, 2)
    tiles = pack_tiles(Parts(words, scales, -scales), spec)
    got = tiles.codes.numpy()
    assert got[0, 3].tolist() == [r * 8 + 3 for r in range(16)]
    assert got[1, 3].tolist() == [16 * 8 + 3] + [0] * 15
    assert tiles.scales[0, 1].tolist() == [2.0 * r + 1 for r in range(16)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 4), st.sampled_from(AFFINE), st.integers(0, 2**31))
def test_tiles_and_codes_come_back_bit_for_bit(rows: int, groups: int, fmt: WeightFormat, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cols = groups * fmt.group_size
    spec = MatrixSpec(rows, cols, fmt)
    codes = torch.randint(0, 2**fmt.bits, (rows, cols), generator=generator, dtype=torch.uint8)
    raw = torch.randint(-(2**15), 2**15, (2, rows, groups), generator=generator, dtype=torch.int16)
    scales, biases = raw.view(SCALE_DTYPES[fmt.scale_dtype])
    source = Parts(pack_codes(codes, fmt.bits), scales.contiguous(), biases.contiguous())
    assert torch.equal(unpack_codes(source.codes, fmt.bits), codes)
    tiles = pack_tiles(source, spec)
    assert all(t.is_contiguous() for t in tiles)
    assert bits_equal(unpack_tiles(tiles, spec), source)


@pytest.mark.parametrize("cols", [1, 7, 64])
def test_plain_formats_round_trip(cols: int) -> None:
    w = torch.randn(21, cols, generator=torch.Generator().manual_seed(1))
    full, half = WeightFormat("f32"), WeightFormat("bf16")
    assert torch.equal(dequantize(quantize(w, full), MatrixSpec(21, cols, full)), w)
    parts = quantize(w, half)
    assert parts.codes.shape == MatrixSpec(21, cols, half).codes_shape
    assert torch.equal(dequantize(parts, MatrixSpec(21, cols, half)), w.bfloat16().float())


def test_dequantize_rows_is_scale_times_code_plus_bias() -> None:
    fmt = WeightFormat("affine", 4, 32, "f16")
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    parts = Parts(pack_codes(codes, 4), torch.tensor([[0.5]]).half(), torch.tensor([[-4.0]]).half())
    assert torch.equal(dequantize_rows(parts, MatrixSpec(1, 32, fmt)), codes.float() * 0.5 - 4.0)


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the group size 64"):
        quantize_rows(torch.zeros(4, 96), WeightFormat("affine", 4, 64))


def test_quantizing_quantized_weights_changes_little() -> None:
    fmt = WeightFormat("affine", 8, 64)
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    spec = MatrixSpec(32, 128, fmt)
    once = dequantize(quantize(w, fmt), spec)
    twice = dequantize(quantize(once, fmt), spec)
    assert (twice - once).norm() / once.norm() < 0.005
