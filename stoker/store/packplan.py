"""Decides what a store made from a checkpoint will hold: which tensor becomes what, in which format.

Owns the choice; reads headers only, so that sizes and refusals come before any work. Writes nothing.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stoker.checkpoint import mlx
from stoker.checkpoint.experts import MATRICES, ExpertSource, SourceMatrix, collect_experts
from stoker.checkpoint.layouts import FOREIGN_QUANTISATION, expert_tensor, layer_of, left_out, stays_plain
from stoker.checkpoint.safetensors_file import FLOATS, TensorEntry
from stoker.checkpoint.source import Checkpoint
from stoker.errors import CheckpointError, OptionError
from stoker.quant.formats import ExpertLayout, MatrixSpec, ScaleDtype, WeightFormat
from stoker.store.files import plain_dtype
from stoker.store.manifest import DenseEntry, Manifest, PoolEntry

DEFAULT_BITS, DEFAULT_GROUP = 4, 64


@dataclass(frozen=True)
class PackOptions:
    """What the user asked for; None means: not said. bits 16 keeps bf16."""

    bits: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8, 16):
            raise OptionError("unsupported number of bits", where="--bits", expected="4, 8 or 16", got=self.bits)
        if self.group_size not in (None, 32, 64, 128):
            raise OptionError(
                "unsupported group size", where="--group-size", expected="32, 64 or 128", got=self.group_size
            )
        if self.bits == 16 and self.group_size is not None:
            raise OptionError(
                "a bf16 store has no groups", where="--group-size", got=f"{self.group_size} with --bits 16"
            )

    def wanted(self, source_dtype: str) -> WeightFormat:
        """The format for a float matrix of `source_dtype`. fp16 sources get fp16 scales, all others bf16."""
        bits = self.bits or DEFAULT_BITS
        if bits == 16:
            return WeightFormat("bf16")
        scale: ScaleDtype = "f16" if source_dtype == "F16" else "bf16"
        return WeightFormat("affine", bits, self.group_size or DEFAULT_GROUP, scale)


@dataclass(frozen=True)
class DenseSource:
    """One dense tensor: what it becomes (`entry`) and from what. scales, biases: of a matrix that MLX quantised."""

    entry: DenseEntry
    weight: TensorEntry
    scales: TensorEntry | None = None
    biases: TensorEntry | None = None


@dataclass(frozen=True)
class PackPlan:
    """Everything that packing needs to know. `experts[p]` are those of manifest.pools[p]."""

    checkpoint: Checkpoint
    manifest: Manifest
    experts: list[list[ExpertSource]]
    dense: list[DenseSource]
    moved_convolutions: bool

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed pack must agree on."""
        source, quantisation = self.manifest.source, self.manifest.quantisation
        changed = self.checkpoint.newest_ns
        return {"source": source, "quantisation": quantisation, "changed": changed, "plan": self.manifest.fingerprint()}


def plan_pack(checkpoint: Checkpoint, options: PackOptions) -> PackPlan:
    """Plan a store. Raises CheckpointError for what cannot be packed, OptionError for options that do not apply."""
    is_mlx = mlx.is_mlx(checkpoint.config, checkpoint.tensors)
    _refuse_foreign(checkpoint, is_mlx)
    if is_mlx and (options.bits, options.group_size) != (None, None):
        raise OptionError(
            "the checkpoint is quantised already and is packed byte for byte",
            where="--bits/--group-size",
            remedy="leave these options out, or pack the original checkpoint",
        )
    packed, skipped = _select(checkpoint)
    expert_tensors = {name: entry for name, entry in packed.items() if expert_tensor(name) is not None}
    if not expert_tensors:
        raise CheckpointError(
            f"no routed experts here: model type {checkpoint.model_type!r} is dense, or its layout is not known",
            where=str(checkpoint.path),
            expected="a Mixture-of-Experts model",
        )
    layers = collect_experts(checkpoint, expert_tensors)
    pools = tuple(_pool(i, layer, layers[layer], options) for i, layer in enumerate(layers))
    moved = is_mlx and mlx.has_moved_convolutions(packed.values())
    rest = {name: entry for name, entry in packed.items() if name not in expert_tensors}
    dense = _dense(checkpoint, rest, options, is_mlx, moved)
    misfits = [source.entry.name for source in dense if _is_misfit(source, options)]
    manifest = Manifest(
        source={
            "kind": "mlx" if is_mlx else "safetensors",
            "name": checkpoint.path.resolve().name,
            "model_type": checkpoint.model_type,
            "fingerprint": checkpoint.fingerprint(),
        },
        quantisation=_quantisation(pools, is_mlx),
        pools=pools,
        dense=tuple(source.entry for source in dense),
        files={},
        side_files={},
        notes={"left_out": skipped, "kept_bf16": misfits},
    )
    return PackPlan(checkpoint, manifest, [layers[layer] for layer in layers], dense, moved)


def _refuse_foreign(checkpoint: Checkpoint, is_mlx: bool) -> None:
    for name in checkpoint.tensors:
        kind = next((kind for suffix, kind in FOREIGN_QUANTISATION.items() if name.endswith(suffix)), None)
        if kind is not None:
            raise CheckpointError(
                f"the checkpoint is quantised in a way that is not supported: {kind}",
                where=name,
                expected="bf16, fp16 or fp32 weights, or MLX's affine 4 or 8 bits",
                remedy="pack the original checkpoint, or an MLX one",
            )
    settings = checkpoint.config.get("quantization_config")
    if settings and not is_mlx:
        raise CheckpointError(
            "the config says that the checkpoint is quantised in a way that is not supported",
            where=str(checkpoint.path / "config.json"),
            got=settings.get("quant_method", settings) if isinstance(settings, dict) else settings,
        )


def _select(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], list[str]]:
    """What is packed, and a line for each kind of thing that is left out."""
    layers = int(checkpoint.text_config.get("num_hidden_layers") or 0)
    if not layers:
        raise CheckpointError("the config does not say how many layers there are", where=str(checkpoint.path))
    packed: dict[str, TensorEntry] = {}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, entry in checkpoint.tensors.items():
        layer = layer_of(name)
        reason = left_out(name) or ("layers beyond the model's" if layer is not None and layer >= layers else None)
        if reason is None:
            packed[name] = entry
        else:
            counts[reason] += 1
            sizes[reason] += entry.nbytes
    missing = set(range(layers)) - {layer_of(name) for name in packed}
    if missing:
        raise CheckpointError(
            f"no tensor of layer {min(missing)}", where=str(checkpoint.path), expected=f"{layers} layers"
        )
    return packed, [f"{reason}: {counts[reason]} tensors, {sizes[reason] / 1e6:.1f} MB" for reason in sorted(counts)]


def _pool(pool: int, layer: int, experts: list[ExpertSource], options: PackOptions) -> PoolEntry:
    specs = _expert_specs(experts[0], options)
    for source in experts[1:]:
        if _expert_specs(source, options) != specs:
            raise CheckpointError(
                f"layer {layer}: experts {experts[0].expert} and {source.expert} differ in shape or format",
                where=source.matrices["gate"].weight.entry.name,
                expected=[f"{spec.rows} x {spec.cols} {spec.format.label()}" for spec in specs],
            )
    biased = {name: experts[0].matrices[name].row_bias is not None for name in MATRICES}
    if len(set(biased.values())) != 1:
        raise CheckpointError(f"layer {layer}: some matrices of an expert have a bias and some do not", got=biased)
    layout = ExpertLayout.plan(*specs, row_bias=biased["gate"])
    return PoolEntry(pool, (layer,), len(experts), layout)


def _expert_specs(source: ExpertSource, options: PackOptions) -> tuple[MatrixSpec, MatrixSpec, MatrixSpec]:
    gate, up, down = (_expert_spec(source.matrices[name], name, options) for name in MATRICES)
    return gate, up, down


def _expert_spec(matrix: SourceMatrix, name: str, options: PackOptions) -> MatrixSpec:
    fmt = matrix.format or options.wanted(matrix.weight.entry.dtype)
    if not fmt.fits(matrix.cols):
        groups = [g for g in (128, 64, 32) if matrix.cols % g == 0]
        raise OptionError(
            f"the {name} matrix of an expert has {matrix.cols} columns, no multiple of the group size {fmt.group_size}",
            where=matrix.weight.entry.name,
            remedy=f"use --group-size {groups[0]}" if groups else "use --bits 16",
        )
    return MatrixSpec(matrix.rows, matrix.cols, fmt)


def _dense(
    checkpoint: Checkpoint, tensors: dict[str, TensorEntry], options: PackOptions, is_mlx: bool, moved: bool
) -> list[DenseSource]:
    sources = []
    for name, entry in tensors.items():
        module = name.rsplit(".", 1)[0]
        if is_mlx and name.endswith((".scales", ".biases")) and f"{module}.weight" in tensors:
            continue
        if is_mlx:
            sources.append(_mlx_dense(checkpoint, entry, tensors, moved))
        else:
            sources.append(DenseSource(_float_entry(entry, options), entry))
    return sorted(sources, key=lambda source: source.entry.name)


def _float_entry(entry: TensorEntry, options: PackOptions) -> DenseEntry:
    if entry.dtype not in FLOATS or stays_plain(entry.name, entry.shape):
        return DenseEntry(entry.name, entry.dtype.lower(), entry.shape, None)
    rows, cols = entry.shape
    fmt = options.wanted(entry.dtype)
    spec = MatrixSpec(rows, cols, fmt if fmt.fits(cols) else WeightFormat("bf16"))
    return DenseEntry(entry.name, plain_dtype(spec), entry.shape, spec)


def _mlx_dense(checkpoint: Checkpoint, entry: TensorEntry, tensors: dict[str, TensorEntry], moved: bool) -> DenseSource:
    name = mlx.published_name(entry.name, checkpoint.model_type)
    module = entry.name.removesuffix(".weight")
    scales, biases = tensors.get(f"{module}.scales"), tensors.get(f"{module}.biases")
    if scales is None or entry.name == module:
        is_norm = mlx.is_offset_norm(entry, checkpoint.model_type, moved)
        dtype = "f32" if is_norm else entry.dtype.lower()
        return DenseSource(DenseEntry(name, dtype, mlx.restored_shape(entry), None), entry)
    if biases is None:
        raise CheckpointError("a quantised matrix lacks its biases", where=entry.name)
    fmt = mlx.module_format(checkpoint.config, entry, scales)
    shape = (entry.shape[0], scales.shape[1] * fmt.group_size)
    spec = MatrixSpec(*shape, fmt)
    return DenseSource(DenseEntry(name, plain_dtype(spec), shape, spec), entry, scales, biases)


def _is_misfit(source: DenseSource, options: PackOptions) -> bool:
    """A matrix that would be quantised if its columns fitted."""
    spec = source.entry.spec
    return spec is not None and source.scales is None and spec.format.kind == "bf16" and options.bits != 16


def _quantisation(pools: Iterable[PoolEntry], is_mlx: bool) -> dict[str, Any]:
    """One line about the experts' formats; each matrix carries its own."""
    labels = {
        spec.format.label()
        for pool in pools
        for spec in (pool.layout.gate.spec, pool.layout.up.spec, pool.layout.down.spec)
    }
    return {"experts": ", ".join(sorted(labels)), "requantised": not is_mlx}
