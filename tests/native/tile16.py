"""Random tile16 weights together with their f32 values, in plain numpy: an oracle that shares no code with stoker."""

import numpy as np
import torch

from stoker.native.kernels import Matrix
from stoker.quant.formats import ExpertLayout, MatrixSpec, WeightFormat


def float_bits(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """f32 values to 16 bits (u16) and back to the f32 that those bits mean."""
    if dtype == "f16":
        half = values.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float32)
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return tensor.view(torch.int16).numpy().view(np.uint16), tensor.to(torch.float32).numpy()


def to_tiles(words_RW: np.ndarray) -> np.ndarray:
    """[rows, words] to [tiles, words, 16]; rows past the end are zero."""
    rows, words = words_RW.shape
    padded = np.zeros((-(-rows // 16) * 16, words), dtype=words_RW.dtype)
    padded[:rows] = words_RW
    return np.ascontiguousarray(padded.reshape(-1, 16, words).transpose(0, 2, 1))


def random_parts(spec: MatrixSpec, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parts (codes, and for affine scales and biases) in tile16, and the f32 matrix [rows, cols] that they mean."""
    rows, cols, fmt = spec.rows, spec.cols, spec.format
    if fmt.kind == "f32":
        w = rng.standard_normal((rows, cols)).astype(np.float32)
        return {"codes": to_tiles(w)}, w
    if fmt.kind == "bf16":
        bits, w = float_bits(rng.standard_normal((rows, cols)), "bf16")
        even = np.zeros((rows, 2 * fmt.words(cols)), dtype=np.uint16)
        even[:, :cols] = bits
        return {"codes": to_tiles(even.view(np.uint32))}, w
    top = 2**fmt.bits
    codes = rng.integers(0, top, (rows, cols), dtype=np.uint32)
    spread = rng.uniform(0.5, 1.5, (rows, cols // fmt.group_size)) / top
    scale_bits, scales = float_bits(spread, fmt.scale_dtype)
    bias_bits, biases = float_bits(-spread * top / 2 * rng.uniform(0.8, 1.2, spread.shape), fmt.scale_dtype)
    per_word = 32 // fmt.bits
    shifts = (np.arange(per_word) * fmt.bits).astype(np.uint32)
    words = np.bitwise_or.reduce(codes.reshape(rows, -1, per_word) << shifts, axis=2).astype(np.uint32)
    w = codes.astype(np.float64) * np.repeat(scales, fmt.group_size, axis=1) + np.repeat(biases, fmt.group_size, axis=1)
    parts = {"codes": to_tiles(words), "scales": to_tiles(scale_bits), "biases": to_tiles(bias_bits)}
    return parts, w.astype(np.float32)


def aligned(array: np.ndarray) -> torch.Tensor:
    """The bytes of `array` as a uint8 tensor that begins at a multiple of 64."""
    raw = np.frombuffer(array.tobytes(), dtype=np.uint8)
    buffer = torch.zeros(raw.size + 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64
    buffer[start : start + raw.size] = torch.from_numpy(raw.copy())
    return buffer[start : start + raw.size]


def random_matrix(
    rows: int,
    cols: int,
    fmt: WeightFormat,
    rng: np.random.Generator,
    *,
    row_bias: bool = False,
    activation_bits: int = 8,
) -> tuple[Matrix, np.ndarray, np.ndarray]:
    """A Matrix, its f32 values [rows, cols], and its row bias [rows] (zeros if none)."""
    spec = MatrixSpec(rows, cols, fmt)
    parts, w = random_parts(spec, rng)
    bias = rng.standard_normal(rows).astype(np.float32) if row_bias else np.zeros(rows, np.float32)
    tensors = {name: aligned(part) for name, part in parts.items()}
    matrix = Matrix(
        spec,
        tensors["codes"],
        tensors.get("scales"),
        tensors.get("biases"),
        torch.from_numpy(bias) if row_bias else None,
        activation_bits=activation_bits,
    )
    return matrix, w, bias


def random_record(
    layout: ExpertLayout, rng: np.random.Generator
) -> tuple[torch.Tensor, list[tuple[np.ndarray, np.ndarray]]]:
    """One record's bytes (aligned to 64), and (weights, row bias) of gate, up and down."""
    record = np.zeros(layout.record_bytes, dtype=np.uint8)
    values = []
    for placed in (layout.gate, layout.up, layout.down):
        parts, w = random_parts(placed.spec, rng)
        for name, part in parts.items():
            put(record, getattr(placed, name), part)
        bias = np.zeros(placed.spec.rows, np.float32)
        if placed.row_bias is not None:
            bias = rng.standard_normal(placed.spec.rows).astype(np.float32)
            put(record, placed.row_bias, bias)
        values.append((w, bias))
    return aligned(record), values


def put(record: np.ndarray, offset: int, part: np.ndarray) -> None:
    raw = np.frombuffer(part.tobytes(), dtype=np.uint8)
    record[offset : offset + raw.size] = raw


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; the message of a failing assertion should also give worst_element()."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / max(np.linalg.norm(want), 1e-300))


def worst_element(got: np.ndarray, want: np.ndarray) -> str:
    difference = np.abs(got.astype(np.float64) - want)
    at = np.unravel_index(int(np.argmax(difference)), difference.shape)
    return f"worst element {tuple(int(i) for i in at)}: got {got[at]:.6g}, want {want[at]:.6g}"
