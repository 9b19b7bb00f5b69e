"""A tokenizer for models that have no language: every byte is a token, the rest are fillers that text never makes.

Owns tokenizer.json and its settings, and the same vocabulary as a plain list for other containers.
"""

import json
from typing import Any


def token_list(vocabulary: int) -> list[str]:
    """Token texts by id: 256 bytes (in the byte-level alphabet), fillers, and at the end the end-of-text token."""
    fillers = [f"<|{i}|>" for i in range(256, vocabulary - 1)]
    return [*byte_alphabet(), *fillers, END]


END = "<|endoftext|>"


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte 0..255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, spare = [], 256
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(spare))
        spare += byte not in printable
    return letters


def tokenizer_files(vocabulary: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, as bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": vocabulary - 1, "content": END, "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(token_list(vocabulary))},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 40960,
        "chat_template": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
