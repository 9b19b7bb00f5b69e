"""Weight formats and the tile16 layout, as data: sizes, shapes and offsets. No arithmetic, no torch.

Rows are grouped in tiles of 16; the last tile is padded with zero rows. Codes are u32 words [tiles, words, 16], so that
64 consecutive bytes hold the same few columns of 16 rows. Scales and biases are 16-bit [tiles, cols/group, 16].
Within a word the bits are those of MLX's affine checkpoints (low bits first, little-endian): tile16 only moves whole
words.
"""

from dataclasses import dataclass
from typing import Literal

TILE_ROWS = 16
RECORD_ALIGNMENT = 4096
PART_ALIGNMENT = 64

Kind = Literal["affine", "bf16", "f32"]
ScaleDtype = Literal["bf16", "f16"]


@dataclass(frozen=True)
class WeightFormat:
    """How one matrix is stored. `bits`, `group_size`, `scale_dtype` apply to affine alone (w = scale * code + bias)."""

    kind: Kind
    bits: int = 0
    group_size: int = 0
    scale_dtype: ScaleDtype = "bf16"

    def __post_init__(self) -> None:
        if self.kind == "affine":
            if self.bits not in (4, 8):
                raise ValueError(f"affine bits must be 4 or 8, got {self.bits}")
            if self.group_size not in (32, 64, 128):
                raise ValueError(f"affine group size must be 32, 64 or 128, got {self.group_size}")
        elif self.kind not in ("bf16", "f32"):
            raise ValueError(f"unknown weight format {self.kind!r}")

    def words(self, cols: int) -> int:
        """u32 words that hold one row of `cols` columns."""
        if self.kind == "affine":
            return cols * self.bits // 32
        return (cols + 1) // 2 if self.kind == "bf16" else cols

    def groups(self, cols: int) -> int:
        """Scale groups in one row; 0 unless affine."""
        return cols // self.group_size if self.kind == "affine" else 0

    def fits(self, cols: int) -> bool:
        """Whether a matrix with `cols` inputs can have this format."""
        return self.kind != "affine" or cols % self.group_size == 0

    def label(self) -> str:
        return f"affine-{self.bits} g{self.group_size} {self.scale_dtype}" if self.kind == "affine" else self.kind


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix [rows, cols] (outputs, inputs) in a format, with the byte sizes of its parts in tile16 layout."""

    rows: int
    cols: int
    format: WeightFormat

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def codes_shape(self) -> tuple[int, int, int]:
        """u32 (or f32 for the f32 format)."""
        return (self.tiles, self.format.words(self.cols), TILE_ROWS)

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        """16-bit floats; biases have the same shape. Zero-sized unless affine."""
        return (self.tiles, self.format.groups(self.cols), TILE_ROWS)

    @property
    def codes_bytes(self) -> int:
        return 4 * self.codes_shape[0] * self.codes_shape[1] * TILE_ROWS

    @property
    def scales_bytes(self) -> int:
        return 2 * self.scales_shape[0] * self.scales_shape[1] * TILE_ROWS

    @property
    def total_bytes(self) -> int:
        return self.codes_bytes + 2 * self.scales_bytes


def align(offset: int, to: int) -> int:
    return -(-offset // to) * to


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix inside a record: byte offsets from its start, each a multiple of 64. Absent parts have offset 0."""

    spec: MatrixSpec
    codes: int
    scales: int
    biases: int
    row_bias: int | None = None  # f32 [rows], or None


@dataclass(frozen=True)
class ExpertLayout:
    """The parts of every record of a pool: down(act(gate(x)) * up(x)). gate and up are [F, D], down is [D, F]."""

    gate: PlacedMatrix
    up: PlacedMatrix
    down: PlacedMatrix
    record_bytes: int  # a multiple of 4096

    @staticmethod
    def plan(gate: MatrixSpec, up: MatrixSpec, down: MatrixSpec, *, row_bias: bool = False) -> "ExpertLayout":
        """Place gate, up, down one after the other, each part aligned to 64 bytes, the record padded to 4096."""
        cursor = 0
        placed: list[PlacedMatrix] = []

        def take(nbytes: int) -> int:
            nonlocal cursor
            start = align(cursor, PART_ALIGNMENT)
            cursor = start + nbytes
            return start

        for spec in (gate, up, down):
            codes = take(spec.codes_bytes)
            scales = take(spec.scales_bytes) if spec.scales_bytes else 0
            biases = take(spec.scales_bytes) if spec.scales_bytes else 0
            bias = take(4 * spec.rows) if row_bias else None
            placed.append(PlacedMatrix(spec, codes, scales, biases, bias))
        return ExpertLayout(placed[0], placed[1], placed[2], record_bytes=align(cursor, RECORD_ALIGNMENT))
