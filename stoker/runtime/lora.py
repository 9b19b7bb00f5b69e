"""LoRA beside quantised linears: y = W x + B (A x), never merged, each token with its own sequence's adapter.

A token's result does not depend on which other adapters are in the step. Linears inside a native attention block are
served by what is added to the block's projections and to its output. Knows modules and rows; files are the adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.adapter.lora import Lora, LoraPair
from stoker.errors import AdapterError
from stoker.native import kernels
from stoker.runtime.linear import QuantLinear, is_bf16, plain_matrix
from stoker.runtime.step import LoraRows

RANK_MULTIPLE = 8  # ranks are padded with zeros to what the kernels like
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class NativePair:
    """B (A x) with the scale inside B: x float32 [T, in] -> float32 [T, out]."""

    def __init__(self, a_RD: Tensor, b_OR: Tensor) -> None:
        pad = -len(a_RD) % RANK_MULTIPLE
        self.a = plain_matrix(F.pad(a_RD, (0, 0, 0, pad)).contiguous())
        self.b = plain_matrix(F.pad(b_OR, (0, pad)).contiguous())

    def __call__(self, x_TD: Tensor) -> Tensor:
        return kernels.matmul(self.b, kernels.matmul(self.a, x_TD if x_TD.is_contiguous() else x_TD.contiguous()))


class LoraLinear(nn.Module):
    """A linear and the pairs of every adapter that has one for it, by the adapter's name."""

    def __init__(self, linear: QuantLinear, step: Any) -> None:
        super().__init__()
        self.linear, self.step = linear, step
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.pairs: dict[str, NativePair] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        flat_TC, flat_TO = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        for first, last, name in self.step.lora:
            pair = self.pairs.get(name)
            if pair is not None:
                flat_TO[first:last] += pair(flat_TC[first:last])
        return y


class AttentionLora:
    """The adapters of one native attention block. qkv: A of q, k and v one above the other, B of each in its own rows
    and columns; o: on the heads' outputs."""

    def __init__(self, projected_width: int, mixed_width: int) -> None:
        self.projected_width, self.mixed_width = projected_width, mixed_width
        self.qkv: dict[str, NativePair] = {}
        self.o: dict[str, NativePair] = {}

    def begin(self, x_TD: Tensor, rows: Sequence[LoraRows]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the projections [T, q + k + v], and where the block leaves its heads' outputs."""
        added = None
        for first, last, name in rows:
            pair = self.qkv.get(name)
            if pair is None:
                continue
            delta = pair(x_TD[first:last])
            if last - first >= len(x_TD):
                added = delta
            else:
                added = x_TD.new_zeros(len(x_TD), self.projected_width) if added is None else added
                added[first:last] = delta
        wants_mixed = any(name in self.o for _, _, name in rows)
        return added, x_TD.new_empty(len(x_TD), self.mixed_width) if wants_mixed else None

    def end(self, mixed_TQ: Tensor | None, out_TD: Tensor, rows: Sequence[LoraRows]) -> None:
        for first, last, name in rows:
            pair = self.o.get(name)
            if pair is not None and mixed_TQ is not None:
                out_TD[first:last] += pair(mixed_TQ[first:last])


def lora_bytes(lora: Lora) -> int:
    """What an adapter holds in memory, for the ledger; B of q, k and v lie in one matrix with zeros between."""
    total = 0
    for path, pair in lora.items():
        rank = -(-pair.rank // RANK_MULTIPLE) * RANK_MULTIPLE
        columns = 3 * rank if path.rsplit(".", 1)[-1] in PROJECTIONS else rank
        total += (pair.a.shape[1] * rank + pair.b.shape[0] * columns) * (2 if _exact(pair) else 4)
    return total


def install_lora(model: nn.Module, step: Any, adapters: Mapping[str, Lora]) -> None:
    """Let the linears of a loaded model serve these adapters, by name. Raises AdapterError for a path that the model
    does not have, or a shape that is not its linear's."""
    for name, lora in adapters.items():
        blocks: dict[str, dict[str, LoraPair]] = {}
        for path, pair in lora.items():
            parent, _, leaf = path.rpartition(".")
            module = _find(model, path)
            if isinstance(module, QuantLinear | LoraLinear) and leaf != "lm_head":
                _check(path, pair, module.in_features, module.out_features)
                if isinstance(module, QuantLinear):
                    module = LoraLinear(module, step)
                    model.set_submodule(path, module, strict=True)
                module.pairs[name] = NativePair(pair.a, _scaled(pair))
            elif hasattr(_find(model, parent), "block") and leaf in (*PROJECTIONS, "o_proj"):
                blocks.setdefault(parent, {})[leaf] = pair
            else:
                raise AdapterError(
                    "the model has no linear here that can take a LoRA", where=path,
                    expected="projections of attention, linear attention, shared experts and dense layers",
                )  # fmt: skip
        for parent, pairs in blocks.items():
            _install_block(_find(model, parent), parent, name, pairs)


def _install_block(attention: Any, path: str, name: str, pairs: Mapping[str, LoraPair]) -> None:
    block = attention.block
    if attention.lora is None:
        attention.lora = AttentionLora(block.projected_width, block.mixed_width)
    heights = dict(zip(PROJECTIONS, block.projections, strict=True))
    for leaf, pair in pairs.items():
        shape = (block.mixed_width, block.out_width) if leaf == "o_proj" else (block.width, heights[leaf])
        _check(f"{path}.{leaf}", pair, *shape)
    if "o_proj" in pairs:
        attention.lora.o[name] = NativePair(pairs["o_proj"].a, _scaled(pairs["o_proj"]))
    inside = [leaf for leaf in PROJECTIONS if leaf in pairs]
    if not inside:
        return
    a = torch.cat([pairs[leaf].a.float() for leaf in inside])
    b = torch.zeros(block.projected_width, len(a))
    row = column = 0
    for leaf in PROJECTIONS:
        if leaf in pairs:
            rank = pairs[leaf].rank
            b[row : row + heights[leaf], column : column + rank] = _scaled(pairs[leaf])
            column += rank
        row += heights[leaf]
    attention.lora.qkv[name] = NativePair(a, b)


def _scaled(pair: LoraPair) -> Tensor:
    return pair.b.float() * pair.scale


def _exact(pair: LoraPair) -> bool:
    return is_bf16(pair.a) and is_bf16(_scaled(pair))


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _check(path: str, pair: LoraPair, inputs: int, outputs: int) -> None:
    got = (pair.a.shape[1], pair.b.shape[0])
    if got != (inputs, outputs):
        raise AdapterError(
            "the LoRA's shapes are not the linear's", where=path, expected=f"{inputs} in, {outputs} out",
            got=f"{got[0]} in, {got[1]} out",
        )  # fmt: skip
