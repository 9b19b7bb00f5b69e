"""What the next token of one output may be, by a grammar: the Constraint that sampling asks (job.py).

Compiles within limits, so that a schema from a client is refused before it costs much. Reasoning is free: where its end
is one token, the grammar begins behind it. Knows grammars as text; no layouts and no API.
"""

import time
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from stoker.errors import OptionError, StokerError
from stoker.generate.answers.harmony import CHANNEL, END, MESSAGE
from stoker.generate.vocabulary import Vocabulary

# Nothing that a grammar does in one step may hold the other sequences up for longer; of the processor's own time.
_SLOWEST_MASK_S = 1.0
# A state of the lexer takes up to 2 kB; what one request may make of them stays below 16 MB.
_LIMITS = {"max_lexer_states": 8_000, "max_grammar_size": 100_000, "verbose_errors": False}
_KEPT_GRAMMARS = 4


class Guided:
    """A grammar at work on one output; matcher None: reasoning is bounded, what follows is free.

    think_open, think_close: tokens around reasoning that comes before what the grammar describes; thinking: the prompt
    ended inside it. thinking_tokens: reasoning is closed after so many.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher | None,
        *,
        think_open: int | None = None,
        think_close: int | None = None,
        thinking: bool = False,
        thinking_tokens: int | None = None,
    ) -> None:
        self._matcher = matcher
        self._ends = np.asarray(vocabulary.ends, dtype=np.int64)
        self._words = np.zeros((vocabulary.tokens + 31) // 32, dtype=np.uint32)
        self._open, self._close = think_open, think_close
        self._thinking, self._begun = thinking, thinking
        self._left = thinking_tokens
        self._still_thinking = np.full_like(self._words, 0xFFFFFFFF)
        _set(self._still_thinking, self._ends, False)
        self._only_close = np.zeros_like(self._words)
        if think_close is not None:
            _set(self._only_close, np.asarray([think_close]), True)

    def mask(self) -> NDArray[np.uint32] | None:
        if self._thinking:
            return self._only_close if self._left is not None and self._left <= 0 else self._still_thinking
        if self._matcher is None:
            return None
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error() or time.thread_time() - begin > _SLOWEST_MASK_S:
            reason = _reason(self._matcher.get_error()) or "a slow step"
            raise OptionError("the grammar of the answer became too complex while it was held to", got=reason)
        if len(self._ends) and self._allows(int(self._ends[0])):
            _set(self._words, self._ends, True)
        if not self._begun and self._open is not None:
            _set(self._words, np.asarray([self._open]), True)
        return self._words

    def accept(self, token: int) -> None:
        if self._thinking:
            self._thinking = token != self._close
            self._left = None if self._left is None else self._left - 1
        elif not self._begun and token == self._open:
            self._thinking = True
        elif self._matcher is not None and not self._matcher.consume_token(token):
            raise StokerError(
                "a token that the grammar does not allow", got=f"token {token}: {self._matcher.get_error()}"
            )
        self._begun = True

    @property
    def ended(self) -> bool:
        return not self._thinking and self._begun and self._matcher is not None and bool(self._matcher.is_stopped())

    def _allows(self, token: int) -> bool:
        return bool(self._words[token // 32] >> np.uint32(token % 32) & np.uint32(1))


class Channels:
    """Bounds the reasoning of a gpt-oss answer: after `thinking_tokens` on the analysis channel its message is ended.

    Everything else is up to `inner`, the grammar, where there is one.
    """

    def __init__(self, vocabulary: Vocabulary, inner: Guided | None, thinking_tokens: int) -> None:
        self._inner, self._left, self._vocabulary = inner, thinking_tokens, vocabulary
        self._channel, self._message, self._end = (vocabulary.token(mark) for mark in (CHANNEL, MESSAGE, END))
        self._header: list[int] | None = None
        self._reasons = False
        self._only_end = np.zeros((vocabulary.tokens + 31) // 32, dtype=np.uint32)
        if self._end is not None:
            _set(self._only_end, np.asarray([self._end]), True)

    def mask(self) -> NDArray[np.uint32] | None:
        if self._reasons and self._left <= 0:
            return self._only_end
        return None if self._inner is None else self._inner.mask()

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        if token == self._channel:
            self._header = []
        elif token == self._message:
            text = self._vocabulary.ll.decode_str(self._header or [])
            self._reasons, self._header = text.strip().startswith("analysis"), None
        elif token == self._end:
            self._reasons = False
        elif self._header is not None:
            self._header.append(token)
        elif self._reasons:
            self._left -= 1

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended


def compile_grammar(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    """A matcher at the beginning of `grammar`; the last few are kept, since a conversation asks for the same again.

    Raises OptionError for one that llguidance does not take or that is too large; its `got` is llguidance's own reason.
    """
    kept = vocabulary.compiled
    with vocabulary.lock:
        if grammar in kept:
            kept.move_to_end(grammar)
            return kept[grammar].deep_copy()  # type: ignore[no-any-return]
    matcher = _compile(vocabulary, grammar)
    with vocabulary.lock:
        kept[grammar] = matcher.deep_copy()
        while len(kept) > _KEPT_GRAMMARS:
            kept.popitem(last=False)
    return matcher


def _compile(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary.ll, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))  # type: ignore[arg-type]
    if not matcher.is_error():
        words = np.zeros((vocabulary.tokens + 31) // 32, dtype=np.uint32)
        begin = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if time.thread_time() - begin > _SLOWEST_MASK_S:
            raise OptionError("the grammar is too complex", got="its first step alone took too long")
    if matcher.is_error():
        raise OptionError("the grammar cannot be held to", got=_reason(matcher.get_error()))
    return matcher


def _reason(error: str) -> str:
    """llguidance's message without the grammar that it quotes."""
    lines = [line for line in error.splitlines() if line.strip()]
    text = " ".join(line.strip() for line in lines if not line.lstrip()[:1].isdigit() and "<non-verbose/>" not in line)
    return text.partition("failed to compile JSON schema: ")[2][:500] or text[:500] or error[:200]


def _set(words: NDArray[np.uint32], tokens: NDArray[np.int64], allowed: bool) -> None:
    for token in tokens.tolist():
        bit = np.uint32(1 << token % 32)
        words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit


def reasoning_tokens(vocabulary: Vocabulary, think: Any) -> tuple[int | None, int | None]:
    """The single tokens that open and close reasoning; None where a mark is several tokens."""
    if think is None:
        return None, None
    return vocabulary.token(think.open), vocabulary.token(think.close)
