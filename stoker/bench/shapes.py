"""Turns a config and a manifest, packed or only planned, into the axes that the forecast needs. Reads nothing."""

from typing import Any

from stoker.plan.sizes import ModelShape
from stoker.store.files import dense_parts
from stoker.store.manifest import DenseEntry, Manifest

TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def shape_of(config: dict[str, Any], manifest: Manifest, name: str, top_k: int | None = None) -> ModelShape:
    """The shape of a model in the formats of `manifest`."""
    text = config.get("text_config", config)
    layers = int(text["num_hidden_layers"])
    matrices = [entry for entry in manifest.dense if entry.spec is not None and _layer(entry.name)]
    plain = [entry for entry in manifest.dense if entry.spec is None and _layer(entry.name)]
    embedding = next((e for e in manifest.dense if e.name.endswith("embed_tokens.weight")), None)
    head = next((e for e in manifest.dense if e.name.endswith("lm_head.weight")), embedding)
    pools = manifest.pools
    expert_bytes = sum(pool.experts * pool.layout.record_bytes for pool in pools)
    experts = sum(pool.experts for pool in pools)
    moe_layers = sum(len(pool.layers) for pool in pools)
    kinds = text.get("layer_types") or ["full_attention"] * layers
    with_cache = sum("attention" in kind and "linear" not in kind for kind in kinds[:layers])
    heads = int(text.get("num_attention_heads", 1))
    dense_bytes = sum(part.nbytes for entry in manifest.dense for part in dense_parts(entry).values())
    return ModelShape(
        name=name,
        layers=layers,
        moe_layers=moe_layers,
        experts=round(experts / len(pools)),
        top_k=top_k or next((int(text[key]) for key in TOP_K_KEYS if text.get(key)), 1),
        hidden=pools[0].layout.gate.spec.cols,
        expert_width=pools[0].layout.gate.spec.rows,
        vocabulary=int(text.get("vocab_size") or (embedding.shape[0] if embedding else 0)),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        attention_layers=with_cache,
        plain_attention=layers - with_cache,
        record_bytes=round(expert_bytes / experts),
        expert_bytes=expert_bytes,
        dense_bytes=loaded_bytes(manifest),
        total_bytes=dense_bytes + expert_bytes,
        dense_layer_bytes=sum(_spec_bytes(entry) for entry in matrices) / layers,
        plain_layer_bytes=sum(4 * _numel(entry.shape) for entry in plain) / layers,
        dense_layer_macs=sum(_numel(entry.shape) for entry in [*matrices, *plain]) / layers,
        head_bytes=_spec_bytes(head) if head and head.spec else 4 * _numel(head.shape) if head else 0,
        head_macs=_numel(head.shape) if head else 0,
    )


def loaded_bytes(manifest: Manifest) -> int:
    """Dense bytes in memory: matrices as stored, everything else as float32."""
    return sum(_spec_bytes(entry) if entry.spec else 4 * _numel(entry.shape) for entry in manifest.dense)


def _layer(name: str) -> bool:
    return ".layers." in name


def _spec_bytes(entry: DenseEntry) -> int:
    assert entry.spec is not None
    return entry.spec.total_bytes


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
