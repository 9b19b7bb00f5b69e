"""Parts of an answer as Anthropic's content blocks: one after the other, each begun, filled and ended.

Pure: parts in, events out; the same events make the whole message. Knows no HTTP.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from stoker.generate.answers.parts import Content, Part, Reasoning, ToolArguments, ToolStart

Event = dict[str, Any]


@dataclass
class Blocks:
    """The blocks so far; the last one is open until `close`."""

    content: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False
    _arguments: str = ""

    def push(self, part: Part) -> Iterator[Event]:
        """The events that a part is."""
        match part:
            case Reasoning(text):
                yield from self._enter("thinking", {"thinking": "", "signature": ""})
                self.content[-1]["thinking"] += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text):
                yield from self._enter("text", {"text": ""})
                self.content[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case ToolStart(_, call_id, name):
                yield from self.close()
                yield from self._enter("tool_use", {"id": _tool_id(call_id), "name": name, "input": {}})
            case ToolArguments(_, text):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[Event]:
        """End the open block."""
        if not self._open:
            return
        block = self.content[-1]
        if block["type"] == "thinking":
            # Nobody else checks it: it tells a client that the block is whole.
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
            self._arguments = ""
        self._open = False
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _enter(self, kind: str, empty: dict[str, Any]) -> Iterator[Event]:
        if self._open and self.content[-1]["type"] == kind:
            return
        yield from self.close()
        self.content.append({"type": kind, **empty})
        self._open = True
        yield {
            "type": "content_block_start",
            "index": len(self.content) - 1,
            "content_block": {"type": kind, **empty},
        }

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _input(arguments: str) -> dict[str, Any]:
    """The object that the arguments are; of arguments that were cut, what there is of it."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
