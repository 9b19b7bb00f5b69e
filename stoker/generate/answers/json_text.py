"""Follows JSON text character by character: where a value ends, and where it stops being JSON. Keeps no values.

Knows RFC 8259 alone; no tool calls.
"""

from typing import Literal

_SPACE = " \t\n\r"
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_DIGITS = "0123456789"

# After a character of a number, the characters that may follow; a number may end after any key but "-", "." and "e".
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", "123456789": "i"},
    "0": {".": ".", "eE": "e"},
    "i": {_DIGITS: "i", ".": ".", "eE": "e"},
    ".": {_DIGITS: "f"},
    "f": {_DIGITS: "f", "eE": "e"},
    "e": {"+-": "s", _DIGITS: "x"},
    "s": {_DIGITS: "x"},
    "x": {_DIGITS: "x"},
}
_MAY_END = "0ifx"


class JsonObjectText:
    """One JSON object, as its text arrives. `push` takes characters until the object ends or is broken."""

    def __init__(self, *, inside: bool = False) -> None:
        """inside: the text begins after a value of the object, not with its brace."""
        self.state: Literal["open", "done", "broken"] = "open"
        self._open: list[str] = ["{"] if inside else []  # the brackets that are open
        self._expect = "after" if inside else "object"
        self._rest = ""  # what must still come of true, false, null; or hex digits as x
        self._number = ""

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the object: all of them while the state stays open."""
        for index, char in enumerate(text):
            if not self._take(char):
                self.state = "broken"
                return index
            if self.state == "done":
                return index + 1
        return len(text)

    def _take(self, char: str) -> bool:
        step = getattr(self, f"_in_{self._expect}")
        return bool(step(char))

    def _in_object(self, char: str) -> bool:
        return char in _SPACE or (char == "{" and self._enter(char))

    def _in_value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char in "{[":
            return self._enter(char)
        if char == '"':
            return self._go("text")
        if char in "tfn":
            self._rest = {"t": "rue", "f": "alse", "n": "ull"}[char]
            return self._go("word")
        self._number = "-" if char == "-" else "0" if char == "0" else "i" if char in _DIGITS else ""
        return bool(self._number) and self._go("number")

    def _in_first(self, char: str) -> bool:
        """Just after an opening bracket."""
        return (
            self._leave() if char == self._closing else self._in_key(char) if self._in_braces else self._in_value(char)
        )

    def _in_key(self, char: str) -> bool:
        return char in _SPACE or (char == '"' and self._go("key_text"))

    def _in_text(self, char: str, *, then: str = "after") -> bool:
        if char == "\\":
            return self._go("escape" if then == "after" else "key_escape")
        return self._go(then) if char == '"' else char >= " "

    def _in_key_text(self, char: str) -> bool:
        return self._in_text(char, then="colon")

    def _in_escape(self, char: str, *, then: str = "text") -> bool:
        if char == "u":
            self._rest = "xxxx"
            return self._go("hex" if then == "text" else "key_hex")
        return char in _ESCAPES and self._go(then)

    def _in_key_escape(self, char: str) -> bool:
        return self._in_escape(char, then="key_text")

    def _in_hex(self, char: str, *, then: str = "text") -> bool:
        self._rest = self._rest[1:]
        return char in _HEX and (bool(self._rest) or self._go(then))

    def _in_key_hex(self, char: str) -> bool:
        return self._in_hex(char, then="key_text")

    def _in_colon(self, char: str) -> bool:
        return char in _SPACE or (char == ":" and self._go("value"))

    def _in_word(self, char: str) -> bool:
        good, self._rest = char == self._rest[0], self._rest[1:]
        return good and (bool(self._rest) or self._go("after"))

    def _in_number(self, char: str) -> bool:
        for characters, kind in _NUMBER[self._number].items():
            if char in characters:
                self._number = kind
                return True
        return self._number in _MAY_END and self._go("after") and self._in_after(char)

    def _in_after(self, char: str) -> bool:
        """After a value."""
        if char in _SPACE:
            return True
        if char == ",":
            return self._go("key" if self._in_braces else "value")
        return char == self._closing and self._leave()

    @property
    def _in_braces(self) -> bool:
        return self._open[-1] == "{"

    @property
    def _closing(self) -> str:
        return "}" if self._in_braces else "]"

    def _enter(self, char: str) -> bool:
        self._open.append(char)
        return self._go("first")

    def _leave(self) -> bool:
        self._open.pop()
        if not self._open:
            self.state = "done"
        return self._go("after")

    def _go(self, expect: str) -> bool:
        self._expect = expect
        return True
