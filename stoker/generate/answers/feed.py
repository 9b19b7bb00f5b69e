"""Text that arrives in pieces, for code that reads it in order: a reader is a generator that yields when it needs more.

What a reader returns never depends on how the text was cut: it takes from the buffer only what no later text changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from stoker.generate.answers.parts import Part

Result = TypeVar("Result")
Reader = Generator[None, None, Result]


class Feed:
    """The text that has arrived and was not taken; `ended` when no more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def more(self) -> Reader[bool]:
        """Wait for more text; False when there is none."""
        if self.ended:
            return False
        yield
        return True

    def skip_space(self) -> Reader[None]:
        """Take the whitespace that comes next."""
        while True:
            self.text = self.text.lstrip()
            if self.text or not (yield from self.more()):
                return

    def upto(self, mark: str, say: Callable[[str], None]) -> Reader[bool]:
        """Say everything before `mark`, which stays in the buffer; False when the text ends without it."""
        while True:
            at = self.text.find(mark)
            if at >= 0:
                say(self.take(at))
                return True
            say(self.take(len(self.text) - held_back(self.text, mark)))
            if not (yield from self.more()):
                say(self.take(len(self.text)))
                return False

    def begins(self, heads: Iterable[str], *, loose: bool = True) -> Reader["tuple[str, int] | None"]:
        """Which of `heads` the text begins with, the longest first, and its length in the text; nothing is taken.

        loose: whitespace in either may be missing or differ.
        """
        heads = sorted(heads, key=len, reverse=True)
        while True:
            lengths = [(head, match_loosely(self.text, head) if loose else match(self.text, head)) for head in heads]
            if not any(length is None for _, length in lengths) or self.ended:
                return next(((head, length) for head, length in lengths if length is not None and length >= 0), None)
            yield


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` begins."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def match(text: str, head: str) -> int | None:
    """Length of `head` where `text` begins with it; -1 where it does not; None where more text must tell."""
    if len(text) < len(head):
        return None if head.startswith(text) else -1
    return len(head) if text.startswith(head) else -1


def match_loosely(text: str, head: str) -> int | None:
    """`match`, whatever whitespace stands where; the length counts the text's own."""
    at = 0
    for char in head:
        if char.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return None
        if text[at] != char:
            return -1
        at += 1
    return at


class FeedParser(ABC):
    """A parser that is one reader: pieces of text in, the parts that became certain out."""

    def __init__(self) -> None:
        self._feed = Feed()
        self._parts: list[Part] = []
        self._reader = self._answer()
        self._running = True

    @abstractmethod
    def _answer(self) -> Reader[None]:
        """Reads the whole answer from `_feed` and appends to `_parts`."""

    def push(self, text: str) -> list[Part]:
        self._feed.text += text
        return self._run()

    def finish(self) -> list[Part]:
        self._feed.ended = True
        return self._run()

    def _run(self) -> list[Part]:
        if self._running:
            self._running = next(self._reader, "end") != "end"
        parts = self._parts[:]
        self._parts.clear()
        return parts
