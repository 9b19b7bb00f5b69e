"""How a model writes tool calls and reasoning: the fixed text around names and arguments, as data.

A layout is learned from the model's own chat template (learn.py); HERMES is what stoker asks of models whose template
knows no tools. The parser, the grammar and the instructions all follow the same layout. Pure data.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Fixed text; between two pieces stands an id that the model chooses.
Fixed = tuple[str, ...]


@dataclass(frozen=True)
class JsonArguments:
    """`before` stands between a call's name and its arguments, which are one JSON object."""

    before: Fixed
    item_separator: str = ", "
    key_separator: str = ": "


@dataclass(frozen=True)
class TagArguments:
    """Each argument stands between tags: key_open, its key, text_key or json_key, its value, value_close.

    text_key is for strings, which stand there as they are; json_key for everything else, as JSON. `before` follows the
    call's name, `after` the last argument.
    """

    before: str
    key_open: str
    text_key: str
    json_key: str
    value_close: str
    after: str


@dataclass(frozen=True)
class Layout:
    """Calls in an answer: `open`, a name, its arguments, then `between` and the next name, or `close`.

    between: None where an answer holds one call at most. lead: whitespace between the content and `open`. at_start: a
    call is one only at the very beginning of the content, since `open` is ordinary text.
    """

    open: Fixed
    close: Fixed
    between: Fixed | None
    arguments: JsonArguments | TagArguments
    lead: str = ""
    at_start: bool = False

    @property
    def trigger(self) -> str:
        """The beginning of `open` that is enough to know that a call begins."""
        first = self.open[0]
        end = re.search(r"[>\]]", first)
        return first if end is None else first[: end.end()]

    @property
    def call_end(self) -> Fixed:
        """What stands after the arguments of every call, the last or not."""
        if self.between is None:
            return self.close
        if len(self.close) > 1 and len(self.between) > 1 and self.close[0] == self.between[0]:
            return (self.close[0], _shared(self.close[1], self.between[1]))
        return (_shared(self.close[0], self.between[0]),)

    def text(self, calls: Sequence[tuple[str, str, str]]) -> str:
        """The text of `calls`, each (name, arguments as JSON, id), as the model would write it."""
        pieces: list[str] = []
        for index, (name, arguments, call_id) in enumerate(calls):
            between = self.between or (*self.close[:-1], self.close[-1] + self.open[0], *self.open[1:])
            pieces += [call_id.join(self.open if index == 0 else between), name]
            pieces.append(self._arguments(arguments, call_id))
        last_id = calls[-1][2] if calls else ""
        return "".join([*pieces, last_id.join(self.close)])

    def _arguments(self, arguments: str, call_id: str) -> str:
        style = self.arguments
        if isinstance(style, JsonArguments):
            return call_id.join(style.before) + arguments
        pieces = [style.before]
        for key, value in json.loads(arguments).items():
            as_text = isinstance(value, str)
            pieces += [style.key_open, key, style.text_key if as_text else style.json_key]
            pieces += [value if as_text else json.dumps(value, ensure_ascii=False), style.value_close]
        return "".join([*pieces, style.after])


@dataclass(frozen=True)
class Think:
    """The marks around reasoning."""

    open: str = "<think>"
    close: str = "</think>"


def split_after(fixed: Fixed, head: Fixed) -> Fixed:
    """What is left of `fixed` behind its beginning `head`."""
    last = len(head) - 1
    return (fixed[last][len(head[last]) :], *fixed[last + 1 :])


def _shared(a: str, b: str) -> str:
    """The longest beginning of both, cut back to the end of a tag, bracket or quote where it ends within a word."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if length in (len(a), len(b)):
        return a[:length]
    end = max((a.rfind(char, 0, length) for char in ">]}\"'`\n"), default=-1)
    return a[: end + 1]


def tool_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; one without parameters takes an empty object."""
    parameters = tool["function"].get("parameters")
    return parameters if parameters else {"type": "object", "properties": {}}


HERMES = Layout(
    open=('<tool_call>\n{"name": "',),
    close=("}\n</tool_call>",),
    between=('}\n</tool_call>\n<tool_call>\n{"name": "',),
    arguments=JsonArguments(('", "arguments": ',)),
    lead="\n",
)
