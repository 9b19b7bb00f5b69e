"""Token ids to text, piece by piece, so that the pieces together are the text that decoding everything at once gives.

Tokens do not end where characters end: a piece is held back while its last character may still be completed. Each push
decodes only a short window of recent tokens, never the whole output. Knows a tokenizer's `decode`, nothing else of it.
"""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what decoders put where bytes are missing or wrong
# A character has at most 4 bytes, so at most 3 are waiting, each shown as a mark at most.
_MOST_WAITING = 3
# Tokens of context before new text: decoders strip or add a space by what stands before.
_CONTEXT_TOKENS = 4
# A window that never comes to a clean end (an endless run of invalid bytes) is cut here.
_WINDOW_TOKENS = 32


class Detokenizer:
    """The text of one output. `prompt_ids` gives the context of its first token and is never part of the text.

    Special tokens are left out unless `skip_special_tokens` is False.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._told = len(self._decode(self._window))  # characters of the window's text that are out already
        self._fresh = len(self._window)  # where the tokens begin whose text is not fully out

    def push(self, token: int) -> str:
        """The text that became certain with `token`; often empty, never part of a character."""
        self._window.append(token)
        text = self._decode(self._window)
        cut = len(self._window) - self._fresh >= _WINDOW_TOKENS
        certain = _certain(text, most_waiting=_MOST_WAITING if cut else len(text))
        piece = text[self._told : certain]
        self._told = max(self._told, certain)
        if certain == len(text) and piece:
            self._slide(self._fresh, waiting=0)
        elif cut:
            self._slide(len(self._window) - _CONTEXT_TOKENS, waiting=len(text) - certain)
        return piece

    def finish(self) -> str:
        """What was held back, now that nothing can complete it."""
        text = self._decode(self._window)
        piece = text[self._told :]
        self._told = max(self._told, len(text))
        return piece

    def _slide(self, start: int, waiting: int) -> None:
        """Forget the tokens before `start`; of the others, all text but the last `waiting` characters is out."""
        del self._window[:start]
        self._fresh = len(self._window)
        self._told = max(0, len(self._decode(self._window)) - waiting)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _certain(text: str, most_waiting: int) -> int:
    """How many characters of `text` no later token changes, given that it may change the last `most_waiting` marks.

    A byte-fallback decoder turns a whole run of bytes into marks while its last character is unfinished, good ones too.
    """
    end = len(text)
    while end > 0 and len(text) - end < most_waiting and text[end - 1] == _UNFINISHED:
        end -= 1
    return end
