"""Sparse upcycling: one dense MLP becomes many experts, each the same function in another order of its neurons.

The records of the experts then differ byte by byte, one put together from two experts computes nonsense, and a weighted
mean of experts equals the dense MLP up to rounding. 4-bit codes only change places. Knows no files, no model.
"""

import numpy as np
import torch
from torch import Tensor

from stoker.quant.reference import Parts, pack_codes, unpack_codes

BITS = 4
NEURON_BLOCK = 32  # the source's 4-bit groups along the inputs of `down`: they move whole, so that its grid stays exact

_PLAIN = {torch.uint32: torch.int32, torch.float16: torch.float16}  # torch indexes int32, but not uint32


def neuron_order(neurons: int, seed: int, layer: int, expert: int) -> Tensor:
    """A permutation [neurons] that shuffles the blocks of 32 and the neurons inside each."""
    generator = np.random.default_rng([seed, layer, expert])
    blocks = generator.permutation(neurons // NEURON_BLOCK)
    inside = np.stack([generator.permutation(NEURON_BLOCK) for _ in blocks])
    return torch.from_numpy((blocks[:, None] * NEURON_BLOCK + inside).reshape(-1))


def reorder_outputs(matrix: Parts, order_R: Tensor) -> Parts:
    return Parts(*(part.view(_PLAIN[part.dtype])[order_R].view(part.dtype) for part in matrix))


def reorder_inputs(matrix: Parts, order_C: Tensor) -> Parts:
    """Columns in another order that moves whole groups of NEURON_BLOCK."""
    groups_G = order_C[::NEURON_BLOCK] // NEURON_BLOCK
    codes_RC = unpack_codes(matrix.codes, BITS)[:, order_C]
    return Parts(pack_codes(codes_RC, BITS), matrix.scales[:, groups_G], matrix.biases[:, groups_G])


def expert_parts(
    gate_FD: Parts, up_FD: Parts, down_DF: Parts, *, seed: int, layer: int, expert: int
) -> dict[str, Parts]:
    """One expert under the names that Mixtral checkpoints use: w1 is gate, w3 is up, w2 is down."""
    order_F = neuron_order(gate_FD.codes.shape[0], seed, layer, expert)
    return {
        "w1": reorder_outputs(gate_FD, order_F),
        "w2": reorder_inputs(down_DF, order_F),
        "w3": reorder_outputs(up_FD, order_F),
    }
