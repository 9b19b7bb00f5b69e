"""Tokens as text and bytes, for log probabilities: a token may be a part of a character, and then its bytes tell it.

Knows tokenizers, and the two shapes in which OpenAI tells log probabilities.
"""

import re
from functools import lru_cache
from typing import Any

from stoker.generate.sampler import Sample
from stoker.server.service import Service

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The least log probability that is told: JSON has no infinity, and SDKs expect a number.
_LEAST = -9999.0


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes bytes as letters: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """The texts of one model's tokens."""

    def __init__(self, service: Service) -> None:
        self._tokenizer = service.model.tokenizer
        self._ends = frozenset(service.model.runtime.eos_token_ids)
        self._known: dict[int, tuple[str, list[int]]] = {}

    def ends(self, token: int) -> bool:
        """Whether it is an end-of-text token, which is no part of the text."""
        return token in self._ends

    def of(self, token: int) -> tuple[str, list[int]]:
        """(text, UTF-8 bytes); where the bytes are no whole characters, the text shows them as marks."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def chat_entry(self, sample: Sample) -> dict[str, Any]:
        """One entry of a chat completion's `logprobs.content`."""
        entry = self._entry(sample.token, sample.logprob)
        return entry | {"top_logprobs": [self._entry(token, logprob) for token, logprob in sample.top or ()]}

    def completion_entries(self, samples: list[Sample], offset: int) -> dict[str, Any]:
        """The `logprobs` of a completion whose first token's text begins at character `offset`."""
        texts = [self.of(sample.token)[0] for sample in samples]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = [{self.of(token)[0]: _finite(logprob) for token, logprob in sample.top or ()} for sample in samples]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(sample.logprob) for sample in samples],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self.of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}

    def _find(self, token: int) -> tuple[str, list[int]]:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" not in text:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            # Decoders strip the space before a text's first word; here it is a part of the token.
            text = f" {text}" if piece is not None and piece.startswith("▁") and not text.startswith(" ") else text
            return text, list(text.encode())
        raw = _raw_bytes(self._tokenizer.convert_ids_to_tokens(token))
        return (text, list(text.encode())) if raw is None else (raw.decode(errors="replace"), list(raw))


def _raw_bytes(piece: str | None) -> bytes | None:
    """The bytes that a vocabulary entry stands for, in either notation; None where it is in neither."""
    if piece is None:
        return None
    match = _BYTE_TOKEN.fullmatch(piece)
    if match is not None:
        return bytes([int(match[1], 16)])
    letters = _byte_of_letter()
    return bytes(letters[letter] for letter in piece) if all(letter in letters for letter in piece) else None


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None or logprob < _LEAST else logprob
