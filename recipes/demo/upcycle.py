"""Sparse upcycling: one dense MLP becomes many experts, each the same function in another order of its neurons.

The records of the experts then differ byte by byte, one put together from two experts computes nonsense, and a weighted
mean of experts equals the dense MLP up to rounding. Arithmetic on tensors alone: knows no files, no model.
"""

import numpy as np
import torch
from torch import Tensor

NEURON_BLOCK = 32  # the source's 4-bit groups along the inputs of `down`: they move whole, so that its grid stays exact


def neuron_order(neurons: int, seed: int, layer: int, expert: int) -> Tensor:
    """A permutation [neurons] that shuffles the blocks of 32 and the neurons inside each."""
    generator = np.random.default_rng([seed, layer, expert])
    blocks = generator.permutation(neurons // NEURON_BLOCK)
    inside = np.stack([generator.permutation(NEURON_BLOCK) for _ in blocks])
    return torch.from_numpy((blocks[:, None] * NEURON_BLOCK + inside).reshape(-1))


def expert_tensors(
    gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, *, layer: int, experts: int, seed: int
) -> dict[str, Tensor]:
    """The experts of one layer under the names that Mixtral checkpoints use: w1 is gate, w3 is up, w2 is down."""
    tensors = {}
    for expert in range(experts):
        order_F = neuron_order(len(gate_FD), seed, layer, expert)
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        tensors[f"{prefix}.w1.weight"] = gate_FD[order_F].contiguous()
        tensors[f"{prefix}.w2.weight"] = down_DF[:, order_F].contiguous()
        tensors[f"{prefix}.w3.weight"] = up_FD[order_F].contiguous()
    return tensors
