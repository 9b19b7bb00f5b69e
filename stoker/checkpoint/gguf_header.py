"""The header of a GGUF file: metadata and tensor shapes, and what the model would be called as safetensors.

Enough for sizes; the names are those of Hugging Face's checkpoints, so that the packing plan can be drawn up. Reads
bytes through a callable, so that a file on a server does as well. No weights, no gguf package.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.safetensors_file import TensorEntry
from stoker.checkpoint.source import Checkpoint
from stoker.errors import CheckpointError

Reader = Callable[[int, int], bytes]  # (start, end) -> bytes
PIECE_BYTES = 1 << 20
MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 24  # entries of an array, characters of a string: more is damage
_PARTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_GATE_UP = "ffn_gate_up_exps"
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GgufHeader:
    """metadata: scalars and strings; of arrays the length alone. tensors: name -> dimensions, innermost first."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]


def read_gguf(read: Reader, size: int, where: str) -> GgufHeader:
    """Parse the header of a file of `size` bytes. Raises CheckpointError for what is no GGUF, or damaged."""
    cursor = _Cursor(read, size, where)
    if cursor.take(4) != MAGIC:
        raise CheckpointError("not a GGUF file", where=where)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise CheckpointError("a GGUF of an unknown version", where=where, expected=VERSIONS, got=version)
    n_tensors, n_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(cursor.counted(n_values)):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = {}
    for _ in range(cursor.counted(n_tensors)):
        name = cursor.string()
        axes = cursor.scalar("I")
        tensors[name] = tuple(cursor.scalar("Q") for _ in range(min(axes, 8)))
        cursor.take(12)  # type and offset
    return GgufHeader(metadata, tensors)


def read_gguf_file(path: Path) -> GgufHeader:
    """The header of a local file. Raises CheckpointError."""
    try:
        with path.open("rb") as file:

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            return read_gguf(read, path.stat().st_size, str(path))
    except OSError as error:
        raise CheckpointError("cannot read a file", where=str(path), got=error.strerror) from error


def as_checkpoint(headers: Iterable[GgufHeader], where: str) -> Checkpoint:
    """The model of all parts of a GGUF as its original would be published: bf16, one tensor for each expert's matrix.

    For sizes alone: the entries lead to no bytes.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, tuple[int, ...]] = {}
    for header in headers:
        metadata |= header.metadata
        tensors |= header.tensors
    arch = str(metadata.get("general.architecture", ""))
    entries = {
        name: TensorEntry(name, "BF16", shape, Path(where), 0, 2 * _product(shape))
        for source, dims in tensors.items()
        for name, shape in _published(source, tuple(reversed(dims)))
    }
    return Checkpoint(Path(where), _config(metadata, arch, tensors, where), entries)


def _published(source: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of everything that one tensor of a GGUF is made from."""
    name, _, role = source.rpartition(".")
    if not name.startswith("blk."):
        yield f"{_ENDS.get(name, name)}.{role}", shape
        return
    _, layer, part = name.split(".", 2)
    block = f"model.layers.{layer}"
    if len(shape) == 3 and (part in _PARTS or part == _GATE_UP):
        experts, rows, cols = shape
        matrices = [(_PARTS[part], rows)] if part in _PARTS else [("gate_proj", rows // 2), ("up_proj", rows // 2)]
        for expert in range(experts):
            for matrix, outputs in matrices:
                yield f"{block}.mlp.experts.{expert}.{matrix}.{role}", (outputs, cols)
        return
    yield f"{block}.{_BLOCK.get(part, part)}.{role}", shape


def _config(metadata: dict[str, Any], arch: str, tensors: dict[str, tuple[int, ...]], where: str) -> dict[str, Any]:
    def needed(key: str) -> int:
        value = metadata.get(f"{arch}.{key}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"the GGUF does not say {arch}.{key}", where=where)
        return value

    hidden, heads = needed("embedding_length"), needed("attention.head_count")
    optional = {
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv"),
        "num_experts": metadata.get(f"{arch}.expert_count"),
        "num_experts_per_tok": metadata.get(f"{arch}.expert_used_count"),
        "max_position_embeddings": metadata.get(f"{arch}.context_length"),
    }
    return {
        "model_type": arch,
        "num_hidden_layers": needed("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": metadata.get(f"{arch}.attention.key_length") or hidden // heads,
        "vocab_size": tensors.get("token_embd.weight", (0, 0))[-1],
        **{key: value for key, value in optional.items() if isinstance(value, int)},
    }


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


class _Cursor:
    """Reads on through a file, a piece at a time."""

    def __init__(self, read: Reader, size: int, where: str) -> None:
        self.read, self.size, self.where = read, size, where
        self.buffer, self.start, self.at = b"", 0, 0

    def take(self, count: int) -> bytes:
        if self.at + count > self.start + len(self.buffer):
            if self.at + count > self.size:
                raise CheckpointError(
                    "the GGUF header is cut short", where=self.where, expected=self.at + count, got=self.size
                )
            kept = self.buffer[self.at - self.start :]
            begin = self.at + len(kept)
            end = min(self.size, begin + max(PIECE_BYTES, count - len(kept)))
            self.buffer, self.start = kept + self.read(begin, end), self.at
        found = self.buffer[self.at - self.start : self.at - self.start + count]
        if len(found) != count:
            raise CheckpointError("the GGUF header is cut short", where=self.where, expected=count, got=len(found))
        self.at += count
        return found

    def scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def counted(self, count: int) -> int:
        if count > _MOST:
            raise CheckpointError("the GGUF header is damaged", where=self.where, got=f"a count of {count}")
        return count

    def string(self) -> str:
        return self.take(self.counted(self.scalar("Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError("the GGUF header is damaged", where=self.where, got=f"a value of type {kind}")
        inner, count = self.scalar("I"), self.counted(self.scalar("Q"))
        if inner in _SCALARS:
            self.take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        else:
            for _ in range(count):
                self.value(inner)
        return [count]
