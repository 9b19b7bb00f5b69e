"""Parts of a transformers cache as bytes and back: rows of attention by token range, and the state of everything else.

Rows are keys and values of layers that keep every token; state is what belongs to one moment: convolution and recurrent
states, sliding windows. Knows transformers' cache layers; neither models nor who keeps what.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers import cache_utils as kinds

from stoker import __version__
from stoker.native import kernels
from stoker.native.io import read_file_into

# Exact classes: a subclass may hold more than is known here.
_ROWS = (kinds.DynamicLayer, kinds.LinearAttentionAndFullAttentionLayer)
_WINDOW = (kinds.DynamicSlidingWindowLayer, kinds.LinearAttentionAndSlidingWindowAttentionLayer)
_LINEAR = (
    kinds.LinearAttentionLayer,
    kinds.LinearAttentionAndFullAttentionLayer,
    kinds.LinearAttentionAndSlidingWindowAttentionLayer,
)
_KNOWN = {*_ROWS, *_WINDOW, *_LINEAR, kinds.DummyLayer}
Row = tuple[Tensor, str, int]  # bytes, meta, tokens


def software() -> dict[str, str]:
    """The programs that keys and values come from: another version may round them in another way."""
    return {
        "stoker": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "kernels": kernels.isa(),
        "build": hashlib.sha256(Path(kernels._kernels.__file__).read_bytes()).hexdigest(),
    }


def unsupported(config: Any) -> str | None:
    """The first kind of cache layer of this model that cannot be kept, or None."""
    cache = DynamicCache(config=config)
    if not cache.layers:
        return "layers that are made as they are used"
    return next((type(layer).__name__ for layer in cache.layers if type(layer) not in _KNOWN), None)


def has_state(config: Any) -> bool:
    """Whether some layer cannot be cut to any number of tokens."""
    return any(type(layer) in (*_WINDOW, *_LINEAR) for layer in DynamicCache(config=config).layers)


def blank(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def read(data: Tensor, file: Path, offset: int) -> None:
    """Fill a tensor from a file, past the page cache. Raises ReadError."""
    if data.numel():
        read_file_into(file, offset, data.numel(), data.data_ptr())


# ---- rows ------------------------------------------------------------------------------------------------------------


def _layers(cache: DynamicCache, of: tuple[type, ...]) -> list[tuple[int, Any]]:
    return [(index, layer) for index, layer in enumerate(cache.layers) if type(layer) in of]


def _row_layers(cache: DynamicCache) -> list[tuple[int, Any]]:
    return [(index, layer) for index, layer in _layers(cache, _ROWS) if layer.is_initialized]


def rows_bytes(cache: DynamicCache, tokens: int) -> int:
    return sum(
        tensor[..., :1, :].numel() * tensor.element_size() * tokens
        for _, layer in _row_layers(cache)
        for tensor in (layer.keys, layer.values)
    )


def take_rows(cache: DynamicCache, first: int, last: int) -> tuple[Tensor, str]:
    """Keys and values of tokens [first, last): a copy, uint8, and the axes that are needed to read it."""
    axes, parts = [], []
    for index, layer in _row_layers(cache):
        for tensor in (layer.keys, layer.values):
            parts.append(_bytes(tensor[..., first:last, :]))
            axes.append([index, list(tensor.shape[:-2]), tensor.shape[-1], str(tensor.dtype).removeprefix("torch.")])
    return torch.cat(parts) if parts else blank(0), json.dumps(axes)


def _restore_rows(cache: DynamicCache, rows: Sequence[Row], tokens: int) -> None:
    """Set keys and values of the layers that keep every token to the first `tokens` of `rows`."""
    gathered: dict[int, list[list[Tensor]]] = {}
    for data, meta, count in rows:
        at, seen = 0, dict[int, int]()
        for index, lead, width, name in json.loads(meta):
            dtype = getattr(torch, name)
            nbytes = math.prod(lead) * count * width * dtype.itemsize
            part = data[at : at + nbytes].view(dtype).view(*lead, count, width)
            at += nbytes
            which = seen[index] = seen.get(index, -1) + 1
            gathered.setdefault(index, [[], []])[which].append(part)
    for index, pair in gathered.items():
        layer: Any = cache.layers[index]
        keys, values = (torch.cat(parts, dim=-2)[..., :tokens, :].contiguous() for parts in pair)
        _begin_attention(layer, keys, values)


def _begin_attention(layer: Any, keys: Tensor, values: Tensor) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


# ---- state -----------------------------------------------------------------------------------------------------------


def _state_tensors(cache: DynamicCache) -> Iterator[tuple[int, str, int, Tensor]]:
    """(layer, name, place, tensor) of everything that is not rows."""
    for index, layer in _layers(cache, _WINDOW):
        if layer.is_initialized:
            yield index, "keys", 0, layer.keys
            yield index, "values", 0, layer.values
    for index, layer in _layers(cache, _LINEAR):
        for name in ("conv_states", "recurrent_states"):
            for place, tensor in getattr(layer, name).items():
                if tensor is not None:
                    yield index, name, place, tensor


def state_bytes(cache: DynamicCache) -> int:
    return sum(tensor.numel() * tensor.element_size() for *_, tensor in _state_tensors(cache))


def take_state(cache: DynamicCache) -> tuple[Tensor, str]:
    """A copy of everything that is not rows, uint8, and what is needed to put it back."""
    parts, entries = [], []
    for index, name, place, tensor in _state_tensors(cache):
        parts.append(_bytes(tensor))
        entries.append([index, name, place, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
    lengths = [[index, layer.cumulative_length] for index, layer in _layers(cache, _WINDOW)]
    widths = [
        [i, at, size] for i, layer in _layers(cache, _LINEAR) for at, size in layer.conv_kernel_size.items() if size
    ]
    meta = json.dumps({"tensors": entries, "lengths": lengths, "kernels": widths})
    return torch.cat(parts) if parts else blank(0), meta


def _restore_state(cache: DynamicCache, data: Tensor, meta: str) -> None:
    about, at = json.loads(meta), 0
    found: dict[tuple[int, str, int], Tensor] = {}
    for index, name, place, shape, kind in about["tensors"]:
        dtype = getattr(torch, kind)
        nbytes = math.prod(shape) * dtype.itemsize
        found[index, name, place] = data[at : at + nbytes].clone().view(dtype).view(shape)
        at += nbytes
    for index, length in about["lengths"]:
        layer: Any = cache.layers[index]
        if (index, "keys", 0) in found:
            _begin_attention(layer, found[index, "keys", 0], found[index, "values", 0])
        layer.cumulative_length = length
    kernel_of = {(index, place): size for index, place, size in about["kernels"]}
    for (index, name, place), tensor in found.items():
        layer = cache.layers[index]
        if name == "conv_states":
            size = kernel_of[index, place]
            kinds.LinearAttentionLayer.lazy_initialization(
                layer, conv_states=tensor, state_idx=place, conv_kernel_size=size
            )
            layer.conv_states[place].copy_(tensor)
            layer.has_previous_state[place] = True
        elif name == "recurrent_states":
            kinds.LinearAttentionLayer.lazy_initialization(layer, recurrent_states=tensor, state_idx=place)
            layer.recurrent_states[place].copy_(tensor)


def restore(cache: DynamicCache, rows: Sequence[Row], tokens: int, state: tuple[Tensor, str] | None) -> None:
    """Make an empty cache one of `tokens` tokens; `rows` lie one after the other and may reach further."""
    _restore_rows(cache, rows, tokens)
    if state is not None:
        _restore_state(cache, *state)


def _bytes(tensor: Tensor) -> Tensor:
    """A flat copy as uint8."""
    return tensor.detach().contiguous().clone().view(-1).view(torch.uint8)
