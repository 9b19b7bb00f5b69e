"""A model as the forecast sees it: axes, bytes that a token touches, multiply-accumulates. No files, no torch.

Built from a config and a planned or packed store's manifest (stoker/bench/shapes.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """One model in one storage format.

    record_bytes: of one expert, the mean over layers; expert_macs: of one expert for one token. dense_layer_bytes: what
    one layer's always-resident matrices weigh (a token reads them all), plain_layer_bytes: the part kept in float32
    (routers, norms), the mean over layers. head_bytes: the output matrix. kv_heads and head_dim: of attention layers;
    attention_layers keep keys and values, `plain_attention` of all layers run transformers' own attention.
    """

    name: str
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    hidden: int
    expert_width: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_layers: int
    plain_attention: int
    record_bytes: int
    expert_bytes: int
    dense_bytes: int
    total_bytes: int
    dense_layer_bytes: float
    plain_layer_bytes: float
    dense_layer_macs: float
    head_bytes: int
    head_macs: int

    @property
    def expert_macs(self) -> int:
        return 3 * self.hidden * self.expert_width

    @property
    def token_bytes(self) -> float:
        """Weight bytes that one decode step touches: what memory bandwidth bounds when everything is resident."""
        experts = self.moe_layers * self.top_k * self.record_bytes
        return self.layers * (self.dense_layer_bytes + self.plain_layer_bytes) + self.head_bytes + experts

    @property
    def kv_token_bytes(self) -> int:
        return self.attention_layers * 2 * self.kv_heads * self.head_dim * 2
