"""An adapter that nobody has trained yet: heads that apply the next layer's gate, or random ones to measure speed.

Reads a store's gates, the only weights that a warm start needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from stoker.adapter.adapter import Adapter, experts_of, moe_layers, save_adapter, width_of
from stoker.adapter.heads import HIDDEN, random_head, scale_for, warm_head
from stoker.errors import AdapterError
from stoker.quant.reference import Parts, dequantize
from stoker.store.reader import DenseTensor, Store


def init_adapter(
    store: Store,
    directory: Path,
    *,
    top_k: int | None = None,
    owners: Sequence[int] | None = None,
    hidden: int = HIDDEN,
    random: bool = False,
    next_token: bool = False,
    seed: int = 0,
) -> Adapter:
    """Write an untrained adapter. owners: decoder layers, None for every MoE layer that another follows. next_token:
    the heads also see the token that the route is for."""
    layers = moe_layers(store)
    chosen = list(layers[:-1] if owners is None else owners)
    if bad := [owner for owner in chosen if owner not in layers[:-1]]:
        raise AdapterError(
            "no MoE layer follows these", where="--owners", expected=f"{layers[0]} to {layers[-2]}", got=bad
        )
    scale = scale_for(embedding_of(store)) if next_token else 0.0
    if random:
        heads = {o: random_head(experts_of(store), width_of(store), hidden, seed + o, scale) for o in chosen}
    else:
        heads = {o: warm_head(gate_of(store, layers[layers.index(o) + 1]), hidden, seed + o, scale) for o in chosen}
    recipe = {"stage": "untrained", "start": "random" if random else "the next layer's gate", "seed": seed}
    return save_adapter(directory, store=store, top_k=top_k, heads_by_owner=heads, recipe=recipe)


def gate_of(store: Store, layer: int) -> Tensor:
    """The gate's matrix float32 [E, D] of a layer. Raises AdapterError where there is none or more than one."""
    shape = (experts_of(store), width_of(store))
    found = [
        tensor
        for name, tensor in store.dense.items()
        if f".layers.{layer}." in f".{name}" and tensor.shape == shape and ("gate" in name or "router" in name)
    ]
    if len(found) != 1:
        raise AdapterError(
            "the gate of a layer was not found", where=f"{store.path}: layer {layer}", expected=f"one matrix {shape}",
            got=[tensor.name for tensor in found], remedy="make the heads with --random, or train them",
        )  # fmt: skip
    return _value(found[0])


def embedding_of(store: Store) -> Tensor:
    """The table of the tokens' embeddings [V, D]. Raises AdapterError where there is none or more than one."""
    found = [t for name, t in store.dense.items() if name.endswith("embed_tokens.weight") and len(t.shape) == 2]
    if len(found) != 1:
        raise AdapterError(
            "the embeddings were not found", where=str(store.path), expected="one matrix embed_tokens.weight",
            got=[tensor.name for tensor in found], remedy="make heads that do not see the next token, or train them",
        )  # fmt: skip
    return _value(found[0])


def _value(tensor: DenseTensor) -> Tensor:
    parts = tensor.read()
    if tensor.spec is None:
        return parts["data"].view(tensor.shape).float()
    return dequantize(Parts(parts["codes"], parts.get("scales"), parts.get("biases")), tensor.spec).float()
