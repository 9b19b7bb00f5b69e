"""Fills a skeleton with a store's dense tensors: quantised matrices stay quantised, in one arena; the rest is float32.

Knows modules and extents; knows nothing of experts' records or of who reads what when.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.errors import StoreError
from stoker.native import io, kernels
from stoker.quant.formats import PART_ALIGNMENT, MatrixSpec, WeightFormat, align
from stoker.quant.reference import Parts, dequantize, quantize
from stoker.runtime.linear import QuantEmbedding, QuantLinear
from stoker.runtime.skeleton import NameMap, moe_blocks
from stoker.store.reader import DenseTensor, Store


@dataclass
class DenseWeights:
    """The loaded weights: `arena` holds every quantised part, `plain_bytes` is what float32 tensors take beside it."""

    arena: io.Arena
    plain_bytes: int = 0
    matrices: dict[str, kernels.Matrix] = field(default_factory=dict)


def quantised_bytes(store: Store) -> int:
    """Arena bytes that the store's quantised dense tensors need."""
    total = 0
    for tensor in store.dense.values():
        if tensor.spec is not None:
            total += sum(align(extent.length, PART_ALIGNMENT) for extent in tensor.parts.values())
    return total


def plain_bytes(store: Store) -> int:
    """Bytes of the tensors that are kept as float32."""
    return sum(4 * _numel(tensor.shape) for tensor in store.dense.values() if tensor.spec is None)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def load_dense(model: PreTrainedModel, store: Store, activation_bits: int = 16) -> DenseWeights:
    """Read every dense tensor into its module. Raises StoreError when names and modules do not match exactly.

    activation_bits: 8 or 16, how finely the inputs of quantised and bf16 linears are rounded (see kernels.Matrix).
    """
    names = NameMap(model)
    loader = _Loader(model, store, activation_bits)
    plain = [t for t in store.dense.values() if t.spec is None]
    for tensor in plain:
        loader.plain(tensor, names(tensor.name))
    for tensor in store.dense.values():
        if tensor.spec is not None:
            loader.quantised(tensor, names(tensor.name))
    loader.finish()
    return loader.weights


class _Loader:
    def __init__(self, model: PreTrainedModel, store: Store, activation_bits: int) -> None:
        self.model, self.store, self.activation_bits = model, store, activation_bits
        self.weights = DenseWeights(io.Arena(max(quantised_bytes(store), 4096)))
        self.cursor = 0
        self.expected = set(dict(model.named_parameters(remove_duplicate=False))) | self._persistent_buffers()
        self.expected -= {
            f"{block.path}.{name}" for block in moe_blocks(model) for name, _ in block.experts.named_parameters()
        }
        self.filled: set[str] = set()

    def _persistent_buffers(self) -> set[str]:
        return {name for name, _ in self.model.named_buffers() if name in self.model.state_dict()}

    def _claim(self, tensor: DenseTensor, name: str) -> bool:
        """Whether the model has a place for it. Extra heads that the class itself ignores are skipped."""
        if name in self.expected:
            self.filled.add(name)
            return True
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or []
        if any(re.search(pattern, name) or re.search(pattern, tensor.name) for pattern in ignored):
            return False
        raise StoreError(
            "the model has no place for this tensor",
            where=f"{self.store.path}: {tensor.name}",
            expected=f"a parameter of {type(self.model).__name__}",
            got=name,
            remedy="pack the checkpoint again",
        )

    def _bytes(self, tensor: DenseTensor, part: str) -> Tensor:
        extent = tensor.parts[part]
        buffer = torch.empty(extent.length, dtype=torch.uint8)
        io.read_file_into(extent.file, extent.offset, extent.length, buffer.data_ptr())
        return buffer

    def _place(self, tensor: DenseTensor, part: str) -> Tensor:
        extent = tensor.parts[part]
        view = self.weights.arena.tensor(self.cursor, extent.length)
        io.read_file_into(extent.file, extent.offset, extent.length, view.data_ptr())
        self.cursor = align(self.cursor + extent.length, PART_ALIGNMENT)
        return view

    def plain(self, tensor: DenseTensor, name: str) -> None:
        if not self._claim(tensor, name):
            return
        data = self._bytes(tensor, "data").view(tensor.torch_dtype).view(tensor.shape)
        self._set(name, data.to(torch.float32) if data.is_floating_point() else data)

    def _set(self, name: str, data: Tensor) -> None:
        path, attribute = name.rsplit(".", 1)
        module = self.model.get_submodule(path)
        slot: Any = module._parameters if attribute in module._parameters else module._buffers
        wanted = tuple(slot[attribute].shape)
        if wanted != tuple(data.shape):
            raise StoreError(
                "the tensor's shape is not the model's",
                where=f"{self.store.path}: {name}",
                expected=wanted,
                got=tuple(data.shape),
                remedy="check config.json against the weights",
            )
        if isinstance(module, nn.Linear) and attribute == "weight":
            self._replace_linear(path, name, _as_f32_matrix(data, module.bias))
        else:
            slot[attribute] = nn.Parameter(data, requires_grad=False) if slot is module._parameters else data
        self.weights.plain_bytes += data.numel() * data.element_size()

    def quantised(self, tensor: DenseTensor, name: str) -> None:
        if not self._claim(tensor, name):
            return
        spec = tensor.spec
        assert spec is not None
        path, attribute = name.rsplit(".", 1)
        module = self.model.get_submodule(path)
        if attribute == "weight" and isinstance(module, nn.Linear | nn.Embedding):
            self._check_shape(name, spec, module.weight)
            parts = {part: self._place(tensor, part) for part in tensor.parts}
            bias = getattr(module, "bias", None)
            matrix = kernels.Matrix(
                spec, *_typed(spec, parts), row_bias=_loaded(bias, path), activation_bits=self.activation_bits
            )
            if isinstance(module, nn.Linear):
                self._replace_linear(path, name, matrix)
            else:
                self.model.set_submodule(path, QuantEmbedding(matrix), strict=True)
                self.weights.matrices[name] = matrix
            return
        parts = {part: self._bytes(tensor, part) for part in tensor.parts}
        self._set(name, dequantize(Parts(*_typed(spec, parts)), spec).view(tensor.shape))

    def _check_shape(self, name: str, spec: MatrixSpec, weight: Tensor) -> None:
        if tuple(weight.shape) != (spec.rows, spec.cols):
            raise StoreError(
                "the tensor's shape is not the model's",
                where=f"{self.store.path}: {name}",
                expected=tuple(weight.shape),
                got=(spec.rows, spec.cols),
            )

    def _replace_linear(self, path: str, name: str, matrix: kernels.Matrix) -> None:
        self.model.set_submodule(path, QuantLinear(matrix), strict=True)
        self.weights.matrices[name] = matrix
        self.filled.add(f"{path}.bias")

    def finish(self) -> None:
        """Tie what is tied, then refuse a model with holes."""
        tied = self.model._tied_weights_keys or {}
        for target, source in tied.items() if isinstance(tied, dict) else ():
            if target in self.expected - self.filled and source in self.weights.matrices:
                self._replace_linear(target.rsplit(".", 1)[0], target, self.weights.matrices[source])
                self.filled.add(target)
        missing = sorted(self.expected - self.filled)
        missing = [n for n in missing if not n.endswith(".bias") or not self._is_quantised(n)]
        if missing:
            raise StoreError(
                f"{len(missing)} tensors of the model are not in the store",
                where=str(self.store.path),
                expected=", ".join(missing[:4]) + (" ..." if len(missing) > 4 else ""),
                remedy="pack a complete checkpoint",
            )

    def _is_quantised(self, name: str) -> bool:
        return isinstance(self.model.get_submodule(name.rsplit(".", 1)[0]), QuantLinear)


def _typed(spec: MatrixSpec, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Raw bytes as codes, scales and biases with the dtypes that the format has."""
    codes_dtype = torch.float32 if spec.format.kind == "f32" else torch.uint32
    codes = parts["codes"].view(codes_dtype).view(spec.codes_shape)
    if spec.format.kind != "affine":
        return codes, None, None
    dtype = torch.float16 if spec.format.scale_dtype == "f16" else torch.bfloat16
    return (
        codes,
        parts["scales"].view(dtype).view(spec.scales_shape),
        parts["biases"].view(dtype).view(spec.scales_shape),
    )


def _loaded(bias: Tensor | None, path: str) -> Tensor | None:
    """A linear's bias, which is plain and so was loaded first."""
    if bias is None:
        return None
    if bias.is_meta:
        raise StoreError("the linear's bias is not in the store", where=path, remedy="pack a complete checkpoint")
    return bias.detach().to(torch.float32).contiguous()


def _as_f32_matrix(weight: Tensor, bias: Tensor | None) -> kernels.Matrix:
    """A small linear that the store keeps unquantised, in the kernel's float32 format."""
    spec = MatrixSpec(weight.shape[0], weight.shape[1], WeightFormat("f32"))
    return kernels.Matrix(
        spec,
        *quantize(weight.to(torch.float32), spec.format),
        row_bias=None if bias is None or bias.is_meta else bias.detach(),
    )
