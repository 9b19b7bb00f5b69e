"""The weights of a synthetic Qwen3-MoE as a Q4_0 GGUF, so that another engine can run the very same model.

Owns llama.cpp's names and the order of nibbles in a Q4_0 block. Exact: group 32, f16 scale d, w = d * (q - 8).
Needs the optional `gguf` package, for metadata alone; the weights are written in one streaming pass.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import OptionError
from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.quant.reference import Parts, unpack_tiles
from stoker.store.disk import PARTIAL, disk_errors, pwrite, require_room, sync_data
from stoker.store.synth import RandomWeights, parts_of
from stoker.store.synth_shapes import SynthShape, SynthTensor
from stoker.store.synth_tokenizer import END, token_list
from stoker.store.threads import one_torch_thread

FORMAT = WeightFormat("affine", 4, 32, "f16")
_BLOCK_BYTES = 18  # f16 d, then 16 bytes of nibbles, for 32 weights
_ALIGNMENT = 32

_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
_EXPERT_PARTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def check_gguf_options(shape: SynthShape, fmt: WeightFormat) -> None:
    """Refuse what Q4_0 or this writer cannot express. Raises OptionError."""
    if fmt != FORMAT:
        raise OptionError(
            "Q4_0 has groups of 32 weights: a GGUF cannot hold the same weights",
            where="--gguf",
            expected="--group-size 32",
            got=f"--group-size {fmt.group_size}",
        )
    if shape.config["model_type"] != "qwen3_moe":
        raise OptionError("GGUF is written for the qwen3 shapes alone", where="--gguf", got=shape.name)


def write_gguf(path: Path, shape: SynthShape, seed: int, progress: Callable[[int], None] | None = None) -> int:
    """Write the GGUF, whole or not at all. `progress` gets bytes. Returns its size."""
    weights = RandomWeights(shape, FORMAT, seed)
    shapes = dict(_tensor_shapes(shape, weights))
    require_room(path, gguf_bytes(shape))
    partial = path.with_name(path.name + PARTIAL)
    with one_torch_thread(), disk_errors(path):
        start = _write_metadata(partial, shape, shapes)
        offsets = _offsets(start, shapes)
        fd = os.open(partial, os.O_RDWR)
        try:
            for name, offset, block in _pieces(shape, weights):
                pwrite(fd, block.reshape(-1).view(np.uint8).data, offsets[name] + offset)
                if progress is not None:
                    progress(block.nbytes)
            end = max(offsets[name] + _padded(_nbytes(*shapes[name])) for name in shapes)
            os.truncate(partial, end)
            sync_data(fd)
        finally:
            os.close(fd)
        partial.rename(path)
    return end


def gguf_bytes(shape: SynthShape) -> int:
    """The file's size, up to a few MB of metadata."""
    weights = 3 * shape.layers * shape.experts * shape.hidden * shape.width // 32 * _BLOCK_BYTES
    return weights + sum(_nbytes(t.shape, t.fill == "affine") for t in shape.dense) + (16 << 20)


def q4_0_blocks(parts: Parts, spec: MatrixSpec) -> np.ndarray:
    """tile16 affine-4 group 32 -> Q4_0 blocks uint8 [R, C / 32, 18]: d, then byte j = column j | column j + 16 << 4."""
    rows = unpack_tiles(parts, spec)
    assert rows.scales is not None
    pairs = rows.codes.numpy().view(np.uint8).reshape(spec.rows, -1, 2, 8)  # byte i: columns 2i (low), 2i + 1
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    blocks = np.empty((*low.shape[:2], _BLOCK_BYTES), dtype=np.uint8)
    blocks[..., :2] = rows.scales.numpy().view(np.uint8).reshape(spec.rows, -1, 2)
    blocks[..., 2::2] = (low & 15) | (high << 4)
    blocks[..., 3::2] = (low >> 4) | (high & 0xF0)
    return blocks


def gguf_name(name: str) -> str:
    """llama.cpp's name for a dense tensor of Qwen3-MoE."""
    if name in _ENDS:
        return _ENDS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_BLOCK[rest.removesuffix('.weight')]}.weight"


def _tensor_shapes(shape: SynthShape, weights: RandomWeights) -> Iterator[tuple[str, tuple[tuple[int, ...], bool]]]:
    """(name, (shape, is Q4_0)) in file order."""
    for tensor in shape.dense:
        yield gguf_name(tensor.name), (tensor.shape, tensor.fill == "affine")
    for layer in range(shape.layers):
        for part, name in _EXPERT_PARTS.items():
            spec = getattr(weights.layout, part).spec
            yield f"blk.{layer}.{name}.weight", ((shape.experts, spec.rows, spec.cols), True)


def _pieces(shape: SynthShape, weights: RandomWeights) -> Iterator[tuple[str, int, np.ndarray]]:
    """(tensor, byte offset inside it, bytes), one expert's matrix at a time."""
    for tensor in shape.dense:
        yield gguf_name(tensor.name), 0, _dense(weights, tensor)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            record = weights.record(layer, expert)
            for part, name in _EXPERT_PARTS.items():
                placed = getattr(weights.layout, part)
                block = q4_0_blocks(parts_of(record, placed), placed.spec)
                yield f"blk.{layer}.{name}.weight", expert * block.nbytes, block


def _dense(weights: RandomWeights, tensor: SynthTensor) -> np.ndarray:
    if tensor.fill == "affine":
        return q4_0_blocks(weights.matrix(tensor), tensor.matrix(FORMAT))
    return weights.plain(tensor).float().numpy()


def _nbytes(shape: tuple[int, ...], quantised: bool) -> int:
    count = int(np.prod(shape))
    return count // 32 * _BLOCK_BYTES if quantised else 4 * count


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _offsets(start: int, shapes: dict[str, tuple[tuple[int, ...], bool]]) -> dict[str, int]:
    offsets, cursor = {}, start
    for name, described in shapes.items():
        offsets[name] = cursor
        cursor += _padded(_nbytes(*described))
    return offsets


def _write_metadata(path: Path, shape: SynthShape, shapes: dict[str, tuple[tuple[int, ...], bool]]) -> int:
    """Header, key-values and tensor infos. Returns where tensor data starts."""
    gguf = _gguf()
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _add_keys(writer, gguf, shape)
    _add_tokenizer(writer, gguf, shape)
    for name, (dims, quantised) in shapes.items():
        kind = gguf.GGMLQuantizationType.Q4_0 if quantised else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(name, dims, np.dtype(np.float32), _nbytes(dims, quantised), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return _padded(path.stat().st_size)


def _add_keys(writer: Any, gguf: Any, shape: SynthShape) -> None:
    c = shape.text
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(c["vocab_size"])


def _add_tokenizer(writer: Any, gguf: Any, shape: SynthShape) -> None:
    tokens = token_list(shape.vocabulary)
    kinds = [gguf.TokenType.CONTROL if token == END else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["<| |>"])  # the key must exist and not be empty; this pair never occurs
    writer.add_eos_token_id(shape.vocabulary - 1)
    writer.add_add_bos_token(False)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as problem:
        raise OptionError(
            "writing a GGUF needs the gguf package", where="--gguf", remedy="pip install 'stoker[gguf]'"
        ) from problem
    return gguf
