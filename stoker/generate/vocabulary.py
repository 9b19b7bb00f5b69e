"""A model's vocabulary as grammars see it: built once for each tokenizer (about a second), then shared by all requests.

The only place that makes llguidance's tokenizer. Knows tokens; no grammars and no models.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from stoker.errors import OptionError


class Vocabulary:
    """`ll`: llguidance's tokenizer over vocab_tokens ids, of which `ends` end the output.

    Holds no reference to the tokenizer that it is made from: it goes when the model does. compiled: what constraint.py
    keeps for this vocabulary, the last used at the end, under `lock`.
    """

    def __init__(self, tokenizer: Any, vocab_tokens: int, ends: Iterable[int]) -> None:
        from llguidance.hf import from_tokenizer

        self.ends = tuple(sorted(ends))
        self.tokens = vocab_tokens
        # A model without an end is stopped by its token limit alone; llguidance needs one all the same.
        first = list(self.ends) or [vocab_tokens - 1]
        self.ll = from_tokenizer(tokenizer, n_vocab=vocab_tokens, eos_token=first)
        self.compiled: OrderedDict[str, Any] = OrderedDict()
        self.lock = threading.Lock()
        self._added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self._special = special = special_tokens(tokenizer)
        words = sorted(special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None

    def pieces(self, text: str) -> list[str | int]:
        """`text` as plain text and the ids of the special tokens in it."""
        parts = self._split.split(text) if self._split else [text]
        return [self._special.get(part, part) for part in parts if part]

    def token(self, text: str) -> int | None:
        """The one added token that is `text`, special or not."""
        return self._added.get(text)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens by their text: those that decoding leaves out where it is told to."""
    return {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


_vocabularies: "WeakKeyDictionary[Any, Vocabulary]" = WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary_of(tokenizer: Any, vocab_tokens: int, ends: Iterable[int]) -> Vocabulary:
    """The vocabulary of a model's tokenizer; the first call builds it. Raises OptionError for a slow tokenizer."""
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None:
            if not hasattr(tokenizer, "backend_tokenizer"):
                raise OptionError(
                    "this model's tokenizer cannot be used with grammars",
                    expected="a tokenizer.json",
                    remedy="leave out tools and response formats",
                )
            known = _vocabularies[tokenizer] = Vocabulary(tokenizer, vocab_tokens, ends)
        return known
