"""transformers' own eager model on the weights that a store stands for: the oracle of the runtime tests.

Built from the store's bytes by the torch reference alone; no kernel, no residency, no streamed experts.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stoker.quant.formats import MatrixSpec, PlacedMatrix
from stoker.quant.reference import SCALE_DTYPES, Parts, dequantize
from stoker.runtime.skeleton import NameMap, moe_blocks
from stoker.store.reader import Store


def oracle_of(store: Store) -> PreTrainedModel:
    """The float32 eager model that computes with the store's dequantised weights."""
    config = AutoConfig.from_pretrained(store.path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    names, state = NameMap(model), model.state_dict()
    with torch.no_grad():
        for tensor in store.dense.values():
            parts = tensor.read()
            value = (
                parts["data"] if tensor.spec is None else dequantize(Parts(*_parts(tensor.spec, parts)), tensor.spec)
            )
            if (name := names(tensor.name)) in state:
                state[name].copy_(value.view(state[name].shape).to(torch.float32))
        pool_of = {layer: pool for pool in store.pools for layer in pool.layers}
        for block in moe_blocks(model):
            pool = pool_of[block.layer]
            for expert in range(pool.experts):
                _fill(
                    block.experts,
                    expert,
                    Path(store.record(pool.id, expert).file),
                    store.record(pool.id, expert).offset,
                    pool.layout,
                )
    return model.eval()


def _parts(spec: MatrixSpec, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return parts["codes"], parts.get("scales"), parts.get("biases")


def _fill(module: torch.nn.Module, expert: int, file: Path, offset: int, layout) -> None:
    with file.open("rb") as handle:
        handle.seek(offset)
        record = torch.frombuffer(bytearray(handle.read(layout.record_bytes)), dtype=torch.uint8)
    gate, up, down = (_matrix(record, placed) for placed in (layout.gate, layout.up, layout.down))
    joined = torch.cat([gate, up]) if module.is_concatenated else torch.stack([gate, up], 1).flatten(0, 1)
    module.gate_up_proj[expert].copy_(joined.T if module.is_transposed else joined)
    module.down_proj[expert].copy_(down.T if module.is_transposed else down)
    if module.has_bias:
        g, u, d = (_row_bias(record, placed) for placed in (layout.gate, layout.up, layout.down))
        module.gate_up_proj_bias[expert].copy_(
            torch.cat([g, u]) if module.is_concatenated else torch.stack([g, u], 1).flatten()
        )
        module.down_proj_bias[expert].copy_(d)


def _matrix(record: Tensor, placed: PlacedMatrix) -> Tensor:
    spec = placed.spec
    codes = record[placed.codes : placed.codes + spec.codes_bytes].clone()
    codes = codes.view(torch.float32 if spec.format.kind == "f32" else torch.uint32).view(spec.codes_shape)
    if spec.format.kind != "affine":
        return dequantize(Parts(codes, None, None), spec)
    dtype = SCALE_DTYPES[spec.format.scale_dtype]
    scales, biases = (
        record[start : start + spec.scales_bytes].clone().view(dtype).view(spec.scales_shape)
        for start in (placed.scales, placed.biases)
    )
    return dequantize(Parts(codes, scales, biases), spec)


def _row_bias(record: Tensor, placed: PlacedMatrix) -> Tensor:
    assert placed.row_bias is not None
    return record[placed.row_bias : placed.row_bias + 4 * placed.spec.rows].clone().view(torch.float32)


def relative_l2(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
