"""What the bits of a weight matrix mean, in plain torch: the oracle that every kernel is held against.

Owns quantising, dequantising, and the move between the row layout of MLX checkpoints and tile16.
Knows nothing of files, models or kernels. Speed matters only as far as packing a checkpoint needs it.

Row layout: codes u32 [R, words], scales and biases 16-bit [R, groups]. tile16: see `formats`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.quant.formats import TILE_ROWS, MatrixSpec, ScaleDtype, WeightFormat

SCALE_DTYPES: dict[ScaleDtype, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16}
# A group of equal values still gets a scale that survives rounding.
_SMALLEST_SCALE: dict[ScaleDtype, float] = {"bf16": 1e-30, "f16": 1e-7}


class Parts(NamedTuple):
    """The tensors of one matrix, contiguous, on the CPU, in tile16 or in row layout.

    codes: uint32 (float32 for the f32 format); scales and biases: bfloat16 or float16, or None unless affine.
    """

    codes: Tensor
    scales: Tensor | None
    biases: Tensor | None


def quantize(w_RC: Tensor, fmt: WeightFormat) -> Parts:
    """Store float [R, C] in `fmt`, in tile16. Raises ValueError where the columns do not fit the group."""
    return pack_tiles(quantize_rows(w_RC, fmt), MatrixSpec(*_shape(w_RC), fmt))


def dequantize(parts: Parts, spec: MatrixSpec) -> Tensor:
    """The float32 [R, C] that tile16 `parts` stand for: scale * code + bias, in float32."""
    return dequantize_rows(unpack_tiles(parts, spec), spec)


def quantize_rows(w_RC: Tensor, fmt: WeightFormat) -> Parts:
    """Store float [R, C] in `fmt`, in row layout.

    Affine groups run from their minimum to their maximum. The edge that is larger in magnitude becomes the bias, and
    the scale is adjusted so that 0 is a code too (MLX's rule). Codes are the nearest to the *rounded* scale and bias,
    so that no element is further than half a step away inside the representable range.
    """
    rows, cols = _shape(w_RC)
    if not fmt.fits(cols):
        raise ValueError(f"{cols} columns are no multiple of the group size {fmt.group_size}")
    if fmt.kind == "f32":
        return Parts(w_RC.to(torch.float32).contiguous(), None, None)
    if fmt.kind == "bf16":
        return Parts(_pairs_to_words(w_RC.to(torch.bfloat16)), None, None)
    grouped = w_RC.to(torch.float32).reshape(rows, fmt.groups(cols), fmt.group_size)
    scales, biases = _affine_scales(grouped, fmt)
    codes = _nearest_codes(grouped, scales, biases, fmt.bits)
    return Parts(pack_codes(codes.view(rows, cols), fmt.bits), scales, biases)


def dequantize_rows(parts: Parts, spec: MatrixSpec) -> Tensor:
    """The float32 [R, C] that row-layout `parts` stand for."""
    fmt = spec.format
    if fmt.kind == "f32":
        return parts.codes.view(torch.float32).clone()
    if fmt.kind == "bf16":
        return parts.codes.view(torch.bfloat16)[:, : spec.cols].to(torch.float32)
    assert parts.scales is not None and parts.biases is not None, "affine parts carry scales and biases"
    codes = unpack_codes(parts.codes, fmt.bits).to(torch.float32)
    grouped = codes.view(spec.rows, fmt.groups(spec.cols), fmt.group_size)
    dense = parts.scales.to(torch.float32)[..., None] * grouped + parts.biases.to(torch.float32)[..., None]
    return dense.view(spec.rows, spec.cols)


def pack_tiles(rows: Parts, spec: MatrixSpec) -> Parts:
    """Row layout -> tile16: whole words move, rows beyond the last become zeros. Exact."""
    _check_rows(rows, spec)
    return Parts(*(None if part is None else _to_tiles(part, spec) for part in rows))  # type: ignore[arg-type]


def unpack_tiles(parts: Parts, spec: MatrixSpec) -> Parts:
    """tile16 -> row layout, padding rows dropped. The exact inverse of `pack_tiles`."""
    return Parts(*(None if part is None else _to_rows(part, spec) for part in parts))  # type: ignore[arg-type]


def pack_codes(codes_RC: Tensor, bits: int) -> Tensor:
    """uint8 codes [R, C] -> uint32 words [R, C * bits / 32], low bits first, little-endian."""
    if bits == 4:
        codes_RC = codes_RC[:, 0::2] | (codes_RC[:, 1::2] << 4)
    return codes_RC.contiguous().view(torch.uint32)


def unpack_codes(words_RW: Tensor, bits: int) -> Tensor:
    """uint32 words [R, W] -> uint8 codes [R, W * 32 / bits]."""
    octets = words_RW.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _affine_scales(grouped: Tensor, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """Scale and bias [R, G] of float32 groups [R, G, group], rounded to the format's scale dtype."""
    low, high = grouped.aminmax(dim=-1)
    step = ((high - low) / (2**fmt.bits - 1)).clamp_min(_SMALLEST_SCALE[fmt.scale_dtype])
    low_is_edge = low.abs() > high.abs()
    edge = torch.where(low_is_edge, low, high)
    zero_code = torch.round(edge.abs() / step)  # the code that will mean 0: edge + zero_code * scale = 0
    scales = torch.where(zero_code > 0, -edge / zero_code, step)
    biases = torch.where(zero_code > 0, edge, torch.zeros_like(edge))
    dtype = SCALE_DTYPES[fmt.scale_dtype]
    return scales.to(dtype), biases.to(dtype)


def _nearest_codes(grouped: Tensor, scales: Tensor, biases: Tensor, bits: int) -> Tensor:
    inverse = scales.to(torch.float32).reciprocal()
    inverse = torch.where(torch.isinf(inverse), torch.zeros_like(inverse), inverse)  # a scale that rounded to 0
    codes = (grouped - biases.to(torch.float32)[..., None]).mul_(inverse[..., None])
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def _pairs_to_words(w_RC: Tensor) -> Tensor:
    if w_RC.shape[1] % 2:
        w_RC = torch.nn.functional.pad(w_RC, (0, 1))
    return w_RC.contiguous().view(torch.uint32)


def _to_tiles(part: Tensor, spec: MatrixSpec) -> Tensor:
    raw = _as_integers(part)
    missing = spec.tiles * TILE_ROWS - spec.rows
    if missing:
        raw = torch.cat((raw, raw.new_zeros(missing, raw.shape[1])))
    return (
        raw.view(spec.tiles, TILE_ROWS, -1)
        .transpose(1, 2)
        .clone(memory_format=torch.contiguous_format)
        .view(part.dtype)
    )


def _to_rows(part: Tensor, spec: MatrixSpec) -> Tensor:
    raw = _swapped(_as_integers(part))
    return raw.view(spec.tiles * TILE_ROWS, -1)[: spec.rows].contiguous().view(part.dtype)


def _swapped(tiles: Tensor) -> Tensor:
    """A copy with the last two axes exchanged; `contiguous` alone may keep odd strides where an axis has length 1."""
    return tiles.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _as_integers(part: Tensor) -> Tensor:
    """The same bits in a dtype that torch can move about on every build (uint32 is only half supported)."""
    return part.contiguous().view(torch.int32 if part.element_size() == 4 else torch.int16)


def _check_rows(rows: Parts, spec: MatrixSpec) -> None:
    fmt = spec.format
    assert rows.codes.shape == (spec.rows, fmt.words(spec.cols)), (rows.codes.shape, spec)
    for part in (rows.scales, rows.biases):
        expected = (spec.rows, fmt.groups(spec.cols)) if fmt.kind == "affine" else None
        assert (None if part is None else tuple(part.shape)) == expected, (rows, spec)


def _shape(w_RC: Tensor) -> tuple[int, int]:
    rows, cols = w_RC.shape
    return rows, cols
