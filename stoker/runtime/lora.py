"""LoRA beside quantised linears: y = W x + B (A x), never merged, each token with its own sequence's adapter.

A token's result does not depend on which other adapters are in the step. A native attention block takes its pairs
into its own call. Knows modules and rows; files are the adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stoker.adapter.lora import Lora, LoraPair
from stoker.errors import AdapterError
from stoker.native.attention import Adapted, Attention, Pairs
from stoker.native.low_rank import LowRank
from stoker.runtime.linear import QuantLinear, plain_matrix, plain_spec
from stoker.runtime.step import LoraRows

PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}  # of an attention block


class LoraLinear(nn.Module):
    """A linear and the pairs of every adapter that has one for it, by the adapter's name."""

    def __init__(self, linear: QuantLinear, step: Any) -> None:
        super().__init__()
        self.linear, self.step = linear, step
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.pairs: dict[str, LowRank] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        flat_TC, flat_TO = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        for first, last, name in self.step.lora:
            pair = self.pairs.get(name)
            if pair is not None:
                pair.add(flat_TC[first:last].contiguous(), flat_TO[first:last])
        return y


class AttentionLora:
    """The adapters of one native attention block, by name."""

    def __init__(self, block: Attention) -> None:
        self.block = block
        self.pairs: dict[str, Pairs] = {}
        self._last: tuple[Sequence[LoraRows], Adapted | None] = ((), None)

    def adapted(self, rows: Sequence[LoraRows]) -> Adapted | None:
        """What the block adds in a step with these rows; None: nothing. Steps of an answer ask for the same again."""
        if rows != self._last[0]:
            found = [(first, last, self.pairs[name]) for first, last, name in rows if name in self.pairs]
            self._last = rows, Adapted(self.block, found) if found else None
        return self._last[1]


def lora_bytes(lora: Lora) -> int:
    """What an adapter holds in memory, for the ledger."""
    return sum(plain_spec(weight).codes_bytes for pair in lora.values() for weight in (pair.a, _scaled(pair)))


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
                module.pairs[name] = _native(pair)
            elif hasattr(_find(model, parent), "block") and leaf in PROJECTIONS:
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
        attention.lora = AttentionLora(block)
    shapes = [(block.width, height) for height in block.projections] + [(block.mixed_width, block.out_width)]
    for leaf, shape in zip(PROJECTIONS, shapes, strict=True):
        if leaf in pairs:
            _check(f"{path}.{leaf}", pairs[leaf], *shape)
    attention.lora.pairs[name] = Pairs(**{PROJECTIONS[leaf]: _native(pair) for leaf, pair in pairs.items()})


def _native(pair: LoraPair) -> LowRank:
    """The scale is inside B. Nothing is rounded."""
    return LowRank(plain_matrix(pair.a), plain_matrix(_scaled(pair)))


def _scaled(pair: LoraPair) -> Tensor:
    return pair.b.float() * pair.scale


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
