"""Parts of an answer as items of a response: reasoning, message, function call; each begun, filled and ended.

Pure: parts in, events out; the same events make the whole response. Knows no HTTP.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.generate.answers.parts import Content, Part, Reasoning, ToolArguments, ToolStart
from stoker.server.responses.request import seal

Event = dict[str, Any]
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class Items:
    """The items so far; the last one is open until `close`. sealed: reasoning goes out sealed too. namespaces: by the
    names of functions that are in one."""

    def __init__(self, *, sealed: bool = False, namespaces: Mapping[str, str] | None = None) -> None:
        self.output: list[dict[str, Any]] = []
        self._sealed, self._open, self._namespaces = sealed, False, namespaces or {}

    def push(self, part: Part) -> Iterator[Event]:
        """The events that a part is."""
        match part:
            case Reasoning(text):
                yield from self._enter("reasoning", summary=[], content=[])
                yield from self._say("reasoning_text", "response.reasoning_text.delta", text)
            case Content(text):
                yield from self._enter("message", role="assistant", content=[])
                yield from self._say("output_text", "response.output_text.delta", text)
            case ToolStart(_, call_id, name):
                yield from self.close()
                among = {"namespace": self._namespaces[name]} if name in self._namespaces else {}
                yield from self._enter("function_call", call_id=call_id, name=name, arguments="", **among)
            case ToolArguments(_, text):
                self.output[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item."""
        if not self._open:
            return
        item = self.output[-1]
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        if item["type"] == "reasoning" and self._sealed:
            item["encrypted_content"] = seal(item["content"][0]["text"])
        item["status"] = status
        self._open = False
        yield self._event("response.output_item.done", item=_copy(item))

    def _enter(self, kind: str, **fields: Any) -> Iterator[Event]:
        if self._open and self.output[-1]["type"] == kind:
            return
        yield from self.close()
        item = {"type": kind, "id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}", "status": "in_progress", **fields}
        self.output.append(item)
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": _copy(item)}

    def _say(self, kind: str, event: str, text: str) -> Iterator[Event]:
        content = self.output[-1]["content"]
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        if not content:
            content.append({"type": kind, "text": "", **more})
            yield self._event("response.content_part.added", content_index=0, part=dict(content[0]))
        content[0]["text"] += text
        yield self._event(event, content_index=0, delta=text, **({"logprobs": []} if kind == "output_text" else {}))

    def _event(self, kind: str, **fields: Any) -> Event:
        index = len(self.output) - 1
        event = {"type": kind, "item_id": self.output[-1]["id"], "output_index": index, **fields}
        if kind.startswith("response.output_item"):
            del event["item_id"]
        return event


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now."""
    return {key: [dict(each) for each in value] if isinstance(value, list) else value for key, value in item.items()}
