"""Reads arguments that stand between tags, and says them as the text of one JSON object.

A string's text goes out as it arrives; any other value when it is whole, since only then is it known to be JSON.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from stoker.generate.answers.feed import Feed, Reader
from stoker.generate.answers.layout import TagArguments

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class TagReader:
    """Reads the arguments of one call. schema: of its arguments."""

    def __init__(self, feed: Feed, style: TagArguments, schema: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._feed, self._style, self._say = feed, style, say
        self._properties: Mapping[str, Any] = schema.get("properties") or {}

    def read(self) -> Reader[None]:
        self._say("{")
        first = True
        while (yield from self._opens()):
            key = yield from self._key()
            if key is None:
                return
            self._say(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            if not (yield from self._value(key)):
                return
        if not (self._feed.ended and not self._feed.text):
            self._say("}")

    def _opens(self) -> Reader[bool]:
        found = yield from self._feed.begins([self._style.key_open])
        if found is None:
            return False
        self._feed.take(found[1])
        return True

    def _key(self) -> Reader[str | None]:
        """The key, up to the text that comes before a value, which is taken too."""
        marks = {self._style.text_key, self._style.json_key}
        ends = min((mark.strip()[:1] for mark in marks), key=len)
        pieces: list[str] = []
        if not (yield from self._feed.upto(ends, pieces.append)):
            return None
        found = yield from self._feed.begins(marks)
        if found is None:
            return None
        self._feed.take(len(found[0].rstrip()) if self._feed.text.startswith(found[0].rstrip()) else found[1])
        newline = found[0][len(found[0].rstrip()) :]
        if newline:
            exact = yield from self._feed.begins([newline], loose=False)
            self._feed.take(exact[1] if exact else 0)
        self._as_text = self._style.text_key != self._style.json_key and found[0] == self._style.text_key
        return "".join(pieces).strip()

    def _value(self, key: str) -> Reader[bool]:
        """False when the text ended inside."""
        types = _types(self._properties.get(key))
        close = self._style.value_close
        if self._as_text or types == {"string"}:
            return (yield from self._string(close))
        pieces: list[str] = []
        whole = yield from self._upto_close(close, pieces.append)
        text = "".join(pieces)
        self._say(json.dumps(_value_of(text, types), ensure_ascii=False) if whole else text)
        return whole

    def _string(self, close: str) -> Reader[bool]:
        self._say('"')
        whole = yield from self._upto_close(close, lambda text: self._say(_escaped(text)))
        if whole:
            self._say('"')
        return whole

    def _upto_close(self, close: str, say: Callable[[str], None]) -> Reader[bool]:
        """Everything before the closing tag and the whitespace that belongs to it; both are taken."""
        core = close.strip()
        lead = close[: len(close) - len(close.lstrip())]
        held = ""

        def keep(text: str) -> None:
            nonlocal held
            held += text
            certain = len(held) - next((n for n in range(len(lead), 0, -1) if held.endswith(lead[:n])), 0)
            say(held[:certain])
            held = held[certain:]

        found = yield from self._feed.upto(core, keep)
        if not found or held != lead:
            say(held)
        if found:
            self._feed.take(len(core))
        return found


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    options = [option for word in ("anyOf", "oneOf") for option in schema.get(word) or ()]
    if options:
        found = [_types(option) for option in options]
        return set().union(*found) if all(found) else set()
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {"string"} if values and all(isinstance(value, str) for value in values) else set()


def _value_of(text: str, types: set[str]) -> Any:
    """The value that `text` means: JSON where it is JSON of a type that is allowed, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    allowed = tuple(kind for name in types for kind in _JSON_TYPES.get(name, ()))
    if not types:
        return value
    fits = isinstance(value, allowed) and (not isinstance(value, bool) or "boolean" in types)
    return value if fits or "string" not in types else text
