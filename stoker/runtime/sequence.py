"""A sequence for models whose attention keeps transformers' own cache (hybrid, latent or sliding attention)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import DynamicCache

from stoker.routing.rule import RouteState


@dataclass
class CacheSequence:
    """Token ids and the transformers cache that holds their state. routing, prompt_tokens: see PagedSequence."""

    config: Any
    ids: list[int] = field(default_factory=list)
    routing: RouteState | None = None
    prompt_tokens: int | None = None
    adapter: str | None = None  # whose LoRA its tokens take
    cache: DynamicCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = DynamicCache(config=self.config)

    @property
    def length(self) -> int:
        return len(self.ids)

    def append(self, ids: list[int]) -> None:
        self.ids.extend(ids)

    def truncate(self, length: int) -> int:
        """Keep the first `length` tokens where the cache can be cut, else none; returns the length kept."""
        if length >= self.length:
            return self.length
        if length and all(getattr(layer, "is_croppable", False) for layer in self.cache.layers):
            if self.routing is not None:
                self.routing.truncate(length)
            self.cache.crop(length - self.length)
            del self.ids[length:]
        else:
            self.close()
        return self.length

    def close(self) -> None:
        if self.routing is not None:
            self.routing.truncate(0)
        self.ids.clear()
        self.cache = DynamicCache(config=self.config)


def cache_token_bytes(config: Any) -> int:
    """Bytes that one token takes in a float32 transformers cache, by the configuration's attention axes."""
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        heads, width = (
            config.num_attention_heads,
            (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2,
        )
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind in ("full_attention", "sliding_attention") for kind in kinds)
    # One layer's concatenation holds the old and the new tensors at once.
    return int((layers + 1) * 2 * heads * width * 4)


def cache_state_bytes(config: Any) -> int:
    """Bytes that each sequence takes whatever its length: float32 states of linear attention and short convolutions."""
    kinds = list(getattr(config, "layer_types", None) or ())
    convolved = kinds.count("conv") * config.hidden_size * getattr(config, "conv_L_cache", 0) * 4
    linear = kinds.count("linear_attention")
    if not linear or not hasattr(config, "linear_num_value_heads"):
        return int(convolved)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = config.linear_key_head_dim * values + (2 * keys + values) * config.linear_conv_kernel_dim
    return int(convolved + linear * state * 4)
