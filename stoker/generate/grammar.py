"""The grammar of an answer, as llguidance's Lark text: calls exactly as the model's layout writes them, JSON by schema.

Pure text from layouts and schemas; knows which words are special tokens, and no matcher. Free text between calls stays
free; a call that has begun can only be a valid one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.generate.answers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from stoker.generate.answers.layout import Fixed, JsonArguments, Layout, TagArguments, Think, split_after
from stoker.generate.vocabulary import Vocabulary

_TEXT = "TEXT: /(?s:.*)/"
# Where the text that follows is certain, which tokens it is made of stays the model's choice.
_OPTIONS = '%llguidance {"no_forcing": true}'
_ID = "/[A-Za-z0-9_-]{1,64}/"
# Escapes of JSON strings that the text of a template never has: characters stand there as they are.
_PLAIN_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True)
class Function:
    """A tool that may be called. strict: a schema that cannot be held in full is refused, not held in part."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Shape:
    """What an answer may be. calls: none, free (text and calls as the model likes) or only; schema: of the answer where
    it must be JSON; several: more than one call."""

    calls: str
    functions: tuple[Function, ...] = ()
    several: bool = True
    schema: Mapping[str, Any] | None = None


def answer_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of an answer that is one JSON value."""
    # Whitespace between tokens is the model's choice, but never without end.
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}})


class Grammar:
    """Writes the grammar of one shape of answer.

    space: whitespace may come first (behind reasoning). think: the marks of reasoning that may come first, where they
    are no single tokens; thinking: it has begun in the prompt.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        layout: Layout,
        shape: Shape,
        *,
        space: bool = False,
        think: Think | None = None,
        thinking: bool = False,
    ) -> None:
        self._vocabulary, self._layout, self._shape, self._space = vocabulary, layout, shape, space
        self._think, self._thinking = think, thinking
        self._rules: list[str] = []

    def text(self) -> str:
        shape = self._shape
        space = "SPACE? " if self._space else ""
        options: list[str] = []
        if shape.schema is not None:
            options.append(f"{space}value")
            self._rules.append(f"value: {answer_schema(shape.schema)}")
        if shape.calls == "only" or (shape.calls == "free" and shape.schema is not None):
            options.append(f"{space}run")
            self._run(several=shape.several)
        elif shape.calls == "free":
            options += self._free()
        elif shape.schema is None:
            options.append("QUIET")
            self._quiet(anywhere=not self._layout.at_start)
        start = f"({' | '.join(options)})"
        if self._think is not None:
            begin = "" if self._thinking else json.dumps(self._think.open) + " "
            self._rules.append(f"thought[lazy]: TEXT {json.dumps(self._think.close)}")
            start = f"{begin}thought {start}" + ("" if self._thinking else f" | {start}")
        head = [_OPTIONS, f"start: {start}", _TEXT]
        if self._space:
            head.append(r"SPACE: /[ \n]{1,4}/")
        return "\n".join([*head, *self._rules]) + "\n"

    def _free(self) -> list[str]:
        """Text with calls anywhere; a call that must come first comes instead of text."""
        if self._layout.at_start:
            self._run(several=self._shape.several)
            self._quiet(anywhere=False)
            return ["run", "QUIET"]
        trigger = self._vocabulary.pieces(self._layout.trigger)
        # Calls that follow each other directly begin with the trigger again, unless something closes them all.
        closes = any(piece.strip() for piece in split_after(self._layout.close, self._layout.call_end))
        self._run(several=self._shape.several and closes, behind=self._layout.trigger)
        if isinstance(trigger[0], int):
            self._rules.append(f"spoken: TEXT {_lark(trigger)} run")
        else:
            self._rules += [f"called[lazy]: TEXT {_lark(trigger)}", "spoken: called run"]
        return ["spoken* TEXT"] if self._shape.several else ["spoken | TEXT"]

    def _run(self, *, several: bool, behind: str = "") -> None:
        """The rule `run`: calls from the opening to the end of the last. behind: what of the opening came already."""
        layout = self._layout
        opening = self._fixed(split_after(layout.open, (behind,)))
        if not several or layout.between is None:
            self._rules.append(f"run: {opening} call {self._fixed(layout.close)}")
        else:
            # Where one is the beginning of the other they share it; else each is a word of its own, told apart inside.
            end = layout.call_end if layout.call_end == layout.close else ("",)
            next_call, close = split_after(layout.between, end), split_after(layout.close, end)
            again = f"({self._fixed(next_call)} call {self._fixed(end)})*"
            self._rules.append(f"run: {opening} call {self._fixed(end)} {again} {self._fixed(close)}")
        functions = self._shape.functions
        self._rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        for index, function in enumerate(functions):
            if isinstance(layout.arguments, JsonArguments):
                self._json_call(index, function, layout.arguments)
            else:
                self._tag_call(index, function, layout.arguments)

    def _json_call(self, index: int, function: Function, style: JsonArguments) -> None:
        before = (function.name + style.before[0], *style.before[1:])
        self._rules.append(f"call_{index}: {self._fixed(before)} arguments_{index}")
        separators = {"item_separator": style.item_separator, "key_separator": style.key_separator}
        self._rules.append(f"arguments_{index}: {_arguments(function, separators)}")

    def _tag_call(self, index: int, function: Function, style: TagArguments) -> None:
        """Arguments in the order of the schema; those that are not required may be left out."""
        fields: list[str] = []
        schema = function.parameters
        required = schema.get("required") or []
        for number, (key, kind) in enumerate((schema.get("properties") or {}).items()):
            rule = f"field_{index}_{number}"
            fields.append(rule if key in required else rule + "?")
            self._field(rule, key, kind, schema, style)
        begin = self._fixed((function.name + style.before,))
        self._rules.append(f"call_{index}: {begin} {' '.join(fields)} {self._fixed((style.after,))}")

    def _field(self, rule: str, key: str, kind: Any, schema: Mapping[str, Any], style: TagArguments) -> None:
        as_text = isinstance(kind, Mapping) and kind.get("type") == "string"
        words = kind.get("enum") if as_text else None
        begin = self._fixed((style.key_open + key + (style.text_key if as_text else style.json_key),))
        if words and all(isinstance(word, str) for word in words):
            value = "(" + " | ".join(json.dumps(word + style.value_close, ensure_ascii=False) for word in words) + ")"
        elif as_text:
            value = f"{rule}_text"
            self._rules.append(f"{value}[lazy]: TEXT {json.dumps(style.value_close, ensure_ascii=False)}")
        else:
            shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
            inner = {**(kind if isinstance(kind, Mapping) else {}), **shared}
            options = {"item_separator": ", ", "key_separator": ": "}
            value = f"{rule}_json {self._fixed((style.value_close,))}"
            self._rules.append(f"{rule}_json: {_json(inner, options, lenient=True)}")
        self._rules.append(f"{rule}: {begin} {value}")

    def _quiet(self, *, anywhere: bool) -> None:
        """Text in which no call begins."""
        trigger = self._vocabulary.pieces(self._layout.trigger)
        if isinstance(trigger[0], int):
            self._rules.append("QUIET: TEXT")
        else:
            lead = "TEXT " if anywhere else ""
            self._rules.append(f"QUIET: TEXT & ~({lead}{_lark(trigger)} TEXT)")

    def _fixed(self, fixed: Fixed) -> str:
        pieces = [_lark(self._vocabulary.pieces(piece)) for piece in fixed]
        return f" {_ID} ".join(pieces)


def harmony_grammar(vocabulary: Vocabulary, shape: Shape) -> str:
    """The grammar of a gpt-oss answer; it begins behind `<|start|>assistant`."""

    def marks(text: str) -> str:
        return _lark(vocabulary.pieces(text))

    rules: list[str] = []
    ends: list[str] = []
    if shape.schema is not None:
        ends.append(marks(f"{CHANNEL}final{MESSAGE}") + " value")
        rules.append(f"value: {answer_schema(shape.schema)}")
    elif shape.calls != "only":
        ends.append(marks(f"{CHANNEL}final{MESSAGE}") + " TEXT")
    if shape.calls != "none":
        ends.append("call")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(shape.functions))))
        kind = f'(" json" | " "? {marks(CONSTRAIN)} "json")?'
        for index, function in enumerate(shape.functions):
            to = f" to=functions.{function.name}"
            first, second = marks(f"{to}{CHANNEL}commentary"), marks(f"{CHANNEL}commentary{to}")
            rules.append(f"call_{index}: ({first} | {second}) {kind} {marks(MESSAGE)} arguments_{index}")
            separators = {"item_separator": r",\s?", "key_separator": r":\s?"}
            rules.append(f"arguments_{index}: {_arguments(function, separators)}")
    before = f'({marks(CHANNEL)} ("analysis" | "commentary") {marks(MESSAGE)} TEXT {marks(f"{END}{START}assistant")})*'
    return "\n".join([_OPTIONS, f"start: {before} ({' | '.join(ends)})", _TEXT, *rules]) + "\n"


def _lark(pieces: list[str | int]) -> str:
    """Fixed text and special tokens as the right side of a rule."""
    return " ".join(f"<[{each}]>" if isinstance(each, int) else json.dumps(each, ensure_ascii=False) for each in pieces)


def _arguments(function: Function, separators: dict[str, str]) -> str:
    schema = dict(function.parameters)
    if schema.get("properties") and "additionalProperties" not in schema and "patternProperties" not in schema:
        schema["additionalProperties"] = False  # nothing that the tool does not know
    return _json(schema, separators, lenient=not function.strict)


def _json(schema: Mapping[str, Any], separators: dict[str, str], *, lenient: bool) -> str:
    options = {**separators, "whitespace_flexible": False, "json_allowed_escapes": _PLAIN_ESCAPES, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
