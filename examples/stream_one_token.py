"""Streaming at its smallest: a Mixtral whose experts stay on disk; memory for the two that one token uses in one layer.

python examples/stream_one_token.py models/demo/store "The capital of France is"
No reuse, no prediction, no batch: read what the router chose, compute, forget. The full engine is stoker/runtime.
"""

import sys
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stoker.native.attention import rms_norm, topk_softmax
from stoker.native.io import Arena, ReadQueue
from stoker.native.kernels import Experts, Matrix, combine, gather_rows, matmul
from stoker.store.reader import DenseTensor, open_store

path, text = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"
store, queue = open_store(path), ReadQueue()
config, top_k, record_bytes = store.config, store.config["num_experts_per_tok"], store.pools[0].layout.record_bytes
head_dim, eps, rope = config["head_dim"], config["rms_norm_eps"], config["rope_parameters"]
slots = Arena(top_k * record_bytes)
addresses = [slots.address + slot * record_bytes for slot in range(top_k)]
files = {name: queue.open(name) for name in {store.record(p.id, e).file for p in store.pools for e in range(p.experts)}}
kernels = [Experts(pool.layout, config["hidden_act"]) for pool in store.pools]
turns = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim).repeat(2)
past: list[list[Tensor]] = [[torch.empty(1, config["num_key_value_heads"], 0, head_dim)] * 2 for _ in store.pools]


def load(tensor: DenseTensor) -> Any:
    parts: dict[str, Any] = {name: part.clone() for name, part in tensor.read().items()}  # clones are aligned
    return parts["data"].float() if tensor.spec is None else Matrix(tensor.spec, **parts)


dense = {name: load(tensor) for name, tensor in store.dense.items()}


def experts(layer: int, x_TD: Tensor) -> Tensor:
    """Route, read, compute: the whole of streaming. Writes over x."""
    gate = dense[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
    weights_TK, experts_TK = topk_softmax(x_TD @ gate.T, top_k, renormalise=True)
    extents = [store.record(layer, expert) for expert in experts_TK[0].tolist()]
    reads = [queue.submit(files[e.file], e.offset, e.length, to) for e, to in zip(extents, addresses, strict=True)]
    out_KD, row = torch.empty(top_k, x_TD.shape[1]), torch.arange(2, dtype=torch.int32)
    for slot, read in enumerate(reads):
        queue.wait(read)  # raises where the record did not arrive whole
        kernels[layer].forward(torch.tensor(addresses[slot : slot + 1]), row, row[:1], row[:1] + slot, x_TD, out_KD)
    combine(out_KD, weights_TK, x_TD)
    return x_TD


def attention(layer: int, position: int, x_TD: Tensor) -> Tensor:
    at = f"model.layers.{layer}.self_attn."
    q, k, v = (matmul(dense[f"{at}{name}_proj.weight"], x_TD).view(1, -1, 1, head_dim) for name in "qkv")
    cos, sin, half = (position * turns).cos(), (position * turns).sin(), head_dim // 2
    q, k = (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin for y in (q, k))
    k, v = past[layer] = [torch.cat(pair, dim=2) for pair in zip(past[layer], (k, v), strict=True)]
    heads = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return matmul(dense[at + "o_proj.weight"], heads.view(1, -1))


def step(token: int, position: int) -> int:
    """One token through the model; the most likely next one."""
    x_TD = gather_rows(dense["model.embed_tokens.weight"], torch.tensor([token]))
    for layer in range(len(store.pools)):
        at = f"model.layers.{layer}."
        x_TD += attention(layer, position, rms_norm(x_TD, dense[at + "input_layernorm.weight"], eps))
        x_TD += experts(layer, rms_norm(x_TD, dense[at + "post_attention_layernorm.weight"], eps))
    head = dense["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return int(matmul(head, rms_norm(x_TD, dense["model.norm.weight"], eps)).argmax())


tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
ids = tokenizer.encode(text).ids
following = [step(token, position) for position, token in enumerate(ids)]
print(text + tokenizer.decode(following[-1:]))
print(f"{queue.stats()['demand_bytes'] / len(ids) / 1e6:.0f} MB read a token, {slots.nbytes / 1e6:.1f} MB of slots")
