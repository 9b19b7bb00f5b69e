"""Collects the routed experts of a checkpoint and reads them one at a time, whatever layout they were published in.

Owns turning names and shapes into "matrix gate of expert 7 is these rows of that tensor", and checking that nothing is
missing. Reads only the slice that is asked for. Knows nothing of stores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stoker.checkpoint.layouts import EXPERT_COUNT_KEYS, ExpertTensor, Fused, expert_tensor, fused_layout
from stoker.checkpoint.mlx import module_format
from stoker.checkpoint.safetensors_file import FLOATS, TensorEntry
from stoker.checkpoint.source import Checkpoint
from stoker.errors import CheckpointError
from stoker.quant.formats import WeightFormat
from stoker.quant.reference import Parts

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class Slice:
    """Part of a tensor: index `expert` of axis 0 (None: all), then `rows` of its outputs: start, start + step, ..."""

    entry: TensorEntry
    expert: int | None
    rows: int
    start: int = 0
    step: int = 1
    transposed: bool = False  # the tensor is [inputs, outputs]

    @property
    def key(self) -> tuple[str, int | None]:
        """What has to be read: gate and up of a fused tensor share one read."""
        return self.entry.name, self.expert

    def read_base(self) -> Tensor:
        return self.entry.read() if self.expert is None else self.entry.read_rows(self.expert, self.expert + 1)[0]

    def take(self, base: Tensor) -> Tensor:
        """[rows, ...] of what `read_base` returned."""
        if self.transposed and base.dim() == 2:
            base = base.T
        return base[self.start : self.start + (self.rows - 1) * self.step + 1 : self.step]


@dataclass(frozen=True)
class SourceMatrix:
    """One matrix [rows, cols] of one expert. `format` is None for floats, else how it is quantised already."""

    rows: int
    cols: int
    format: WeightFormat | None
    weight: Slice
    scales: Slice | None = None
    biases: Slice | None = None
    row_bias: Slice | None = None

    def slices(self) -> Iterator[Slice]:
        yield from (part for part in (self.weight, self.scales, self.biases, self.row_bias) if part is not None)


@dataclass(frozen=True)
class MatrixData:
    """One matrix as read: floats [R, C] in the source's dtype, or the source's own parts in row layout."""

    floats: Tensor | None
    parts: Parts | None
    row_bias: Tensor | None


@dataclass(frozen=True)
class ExpertSource:
    """gate, up and down of one expert."""

    layer: int
    expert: int
    matrices: dict[str, SourceMatrix]

    def read(self) -> dict[str, MatrixData]:
        """Read every slice once. Raises CheckpointError where a file is cut or unreadable."""
        bases: dict[tuple[str, int | None], Tensor] = {}
        for matrix in self.matrices.values():
            for part in matrix.slices():
                if part.key not in bases:
                    bases[part.key] = part.read_base()
        return {name: _data(matrix, bases) for name, matrix in self.matrices.items()}


def collect_experts(checkpoint: Checkpoint, tensors: dict[str, TensorEntry]) -> dict[int, list[ExpertSource]]:
    """Layer -> its experts, ascending. `tensors` are those that layouts.expert_tensor recognises.

    Raises CheckpointError for a missing expert, a missing or odd matrix, or shapes that disagree with the config.
    """
    named: dict[int, dict[tuple[str, str, int | None], TensorEntry]] = {}
    for name, entry in tensors.items():
        meaning = expert_tensor(name)
        assert meaning is not None
        named.setdefault(meaning.layer, {})[_key(meaning)] = entry
    return {layer: _layer_experts(checkpoint, layer, found) for layer, found in sorted(named.items())}


def expert_count(config: dict[str, Any]) -> int | None:
    """How many routed experts a layer has, as the config says."""
    return next((int(config[key]) for key in EXPERT_COUNT_KEYS if config.get(key)), None)


def _key(meaning: ExpertTensor) -> tuple[str, str, int | None]:
    return meaning.part, meaning.role, meaning.expert


_Found = dict[tuple[str, str, int | None], TensorEntry]


def _layer_experts(checkpoint: Checkpoint, layer: int, found: _Found) -> list[ExpertSource]:
    count = _count(checkpoint, layer, found)
    return [
        ExpertSource(layer, e, {m: _matrix(checkpoint, layer, e, m, found) for m in MATRICES}) for e in range(count)
    ]


def _count(checkpoint: Checkpoint, layer: int, found: _Found) -> int:
    indices = {expert for _, _, expert in found if expert is not None}
    stacked = {entry.shape[0] for (_, _, expert), entry in found.items() if expert is None}
    count = max(indices) + 1 if indices else max(stacked, default=0)
    expected = expert_count(checkpoint.text_config)
    if len(stacked) > 1 or (expected is not None and count != expected):
        raise CheckpointError(
            f"layer {layer} does not have the experts that the config promises",
            where=str(checkpoint.path),
            expected=expected,
            got=sorted(stacked) if len(stacked) > 1 else count,
        )
    return count


def _matrix(checkpoint: Checkpoint, layer: int, e: int, matrix: str, found: _Found) -> SourceMatrix:
    part, own, tensor = _find(checkpoint, layer, e, matrix, found)
    layout = _layout(checkpoint, tensor, part, own)
    rows, cols = _dims(tensor, own, layout)
    if part == "gate_up":
        if rows % 2:
            raise CheckpointError("gate and up do not halve", where=tensor.name, got=f"{rows} rows")
        rows //= 2
    start, step = _rows_of(matrix, part, rows, layout)

    def cut(role: str) -> Slice | None:
        entry = found.get((part, role, own))
        return None if entry is None else Slice(entry, e if own is None else None, rows, start, step, layout.transposed)

    weight, scales = cut("weight"), cut("scales")
    assert weight is not None
    fmt = None if scales is None else module_format(checkpoint.config, tensor, scales.entry)
    if fmt is not None:
        cols = cols * 32 // fmt.bits
    elif tensor.dtype not in FLOATS:
        raise CheckpointError("unsupported dtype", where=tensor.name, expected=", ".join(FLOATS), got=tensor.dtype)
    _check_dims(checkpoint, tensor, matrix, rows, cols)
    return SourceMatrix(rows, cols, fmt, weight, scales, cut("biases"), cut("row_bias"))


def _find(
    checkpoint: Checkpoint, layer: int, e: int, matrix: str, found: _Found
) -> tuple[str, int | None, TensorEntry]:
    """Which tensor holds a matrix: (part, its own expert index or None where stacked, tensor)."""
    for part in (matrix,) if matrix == "down" else (matrix, "gate_up"):
        for own in (e, None):
            if (part, "weight", own) in found:
                return part, own, found[part, "weight", own]
    raise CheckpointError(f"layer {layer}, expert {e}: no {matrix} matrix", where=str(checkpoint.path))


def _layout(checkpoint: Checkpoint, tensor: TensorEntry, part: str, own: int | None) -> Fused:
    """Stacked modules (name.weight) keep [outputs, inputs]; fused parameters are laid out as their authors liked."""
    is_parameter = not tensor.name.endswith(".weight")
    if own is None and (part == "gate_up" or is_parameter):
        return fused_layout(checkpoint.model_type, tensor.name)
    return Fused()


def _rows_of(matrix: str, part: str, rows: int, layout: Fused) -> tuple[int, int]:
    """(first row, step) of a matrix inside the tensor that holds it."""
    if part != "gate_up":
        return 0, 1
    second = matrix == "up"
    return (int(second), 2) if layout.interleaved else (rows * second, 1)


def _dims(entry: TensorEntry, expert: int | None, layout: Fused) -> tuple[int, int]:
    shape = entry.shape if expert is not None else entry.shape[1:]
    if len(shape) != 2:
        raise CheckpointError("an expert's matrix should have two axes", where=entry.name, got=list(entry.shape))
    return (shape[1], shape[0]) if layout.transposed else (shape[0], shape[1])


def _check_dims(checkpoint: Checkpoint, entry: TensorEntry, matrix: str, rows: int, cols: int) -> None:
    hidden = checkpoint.text_config.get("hidden_size")
    got = rows if matrix == "down" else cols
    if hidden is not None and got != hidden:
        raise CheckpointError(
            f"the {matrix} matrix does not fit the model's width",
            where=entry.name,
            expected=f"hidden_size {hidden}",
            got=f"{rows} outputs, {cols} inputs",
        )


def _data(matrix: SourceMatrix, bases: dict[tuple[str, int | None], Tensor]) -> MatrixData:
    def take(part: Slice | None) -> Tensor | None:
        return None if part is None else part.take(bases[part.key])

    weight = take(matrix.weight)
    assert weight is not None
    if matrix.format is None:
        return MatrixData(weight, None, take(matrix.row_bias))
    scales, biases = take(matrix.scales), take(matrix.biases)
    if scales is None or biases is None:
        raise CheckpointError("a quantised matrix lacks its scales or biases", where=matrix.weight.entry.name)
    return MatrixData(None, Parts(weight, scales, biases), take(matrix.row_bias))
