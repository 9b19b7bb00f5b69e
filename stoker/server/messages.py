"""Messages of an API as a model's chat template takes them, and tools for models whose template knows none.

Where the template renders calls, they go to it as they were sampled, so that the prompt of the next turn begins with
this turn's tokens. Where it does not, calls and results become text in the layout that instructions describe. Knows
templates' customs; no HTTP.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.generate.answers.layout import Layout, TagArguments
from stoker.generate.answers.learn import Dialect

Message = dict[str, Any]
_REASONING = ("reasoning_content", "reasoning", "thinking")


def for_template(
    dialect: Dialect, template: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages that the template gets; with instructions where it does not list tools itself."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    given = [_plain(dialect, template, message, names) for message in messages]
    ours = bool(tools) and not dialect.described
    if not dialect.native and (ours or any(m.get("tool_calls") or m["role"] == "tool" for m in given)):
        given = _merged(_as_text(dialect.layout, given))
    return _with_instructions(dialect, given, tools) if ours else given


def _plain(dialect: Dialect, template: str, message: Message, names: Mapping[str, str]) -> Message:
    given = dict(message)
    if given["role"] == "developer" and not dialect.developer:
        given["role"] = "system"
    thought = next((given.pop(key) for key in _REASONING if given.get(key)), None)
    if thought:
        given |= {key: thought for key in _REASONING if key in template}
    if given["role"] == "tool":
        known = names.get(given.get("tool_call_id", ""))
        if known is not None:
            given.setdefault("name", known)
        given["tool_call_id"] = _call_id(dialect, given.get("tool_call_id", ""))
    if given.get("tool_calls"):
        given["tool_calls"] = [_call(dialect, call) for call in given["tool_calls"]]
        given["content"] = given.get("content") or (dialect.no_content if dialect.native else "")
        if dialect.harmony and given["content"] and thought:  # its template takes one of them beside calls
            given |= {"thinking": f"{thought}\n\n{given['content']}", "content": ""}
    return given


def _call(dialect: Dialect, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments: Any = function["arguments"]
    if dialect.native and not dialect.raw_arguments:
        arguments = _object(arguments)
    named = {"name": function["name"], "arguments": arguments}
    return {"id": _call_id(dialect, call["id"]), "type": "function", "function": named}


def _object(arguments: str) -> Any:
    """Arguments as the object that they are; text that is none (a call that was cut) stays what it is."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _call_id(dialect: Dialect, call_id: str) -> str:
    """The id, or one of 9 letters and digits that stands for it where the template takes no other."""
    if not dialect.short_ids or (len(call_id) == 9 and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


# ---- models that know no tools --------------------------------------------------------------------------------------


def _as_text(layout: Layout, messages: Sequence[Message]) -> list[Message]:
    """Calls as the text that the model wrote, results as messages of the user."""
    return [_message_as_text(layout, message) for message in messages]


def _message_as_text(layout: Layout, message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    tagged = isinstance(layout.arguments, TagArguments)
    triples = []
    for call in calls:
        arguments = call["function"]["arguments"]
        whole = isinstance(_object(arguments), dict)
        triples.append((call["function"]["name"], arguments if whole or not tagged else "{}", call["id"]))
    content = message.get("content") or ""
    text = content + (layout.lead if content else "") + layout.text(triples)
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
    return {**kept, "content": text}


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Messages of the user that follow each other become one: many templates insist that roles alternate."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def instructions(layout: Layout, tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told that has not learned to call tools by its template."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = layout.text([("NAME", '{"KEY": "VALUE"}', "ID")])
    return (
        "# Tools\n\nYou can call these functions, each given as JSON on a line of its own:\n"
        f"{listed}\n\n"
        "To call a function, answer with its name and its arguments, written exactly like this:\n"
        f"{example}\n\n"
        "You then get the result between <tool_response> and </tool_response>. Call a function only where it helps."
    )


def _with_instructions(dialect: Dialect, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    text = instructions(dialect.layout, tools)
    first = messages[0] if messages else {"role": "user", "content": ""}
    if first["role"] in ("system", "developer"):
        content = f"{first['content']}\n\n{text}" if first.get("content") else text
        return [{**first, "content": content}, *messages[1:]]
    if dialect.system:
        return [{"role": "system", "content": text}, *messages]
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    asked = {**messages[at], "content": f"{text}\n\n{messages[at]['content']}"}
    return [*messages[:at], asked, *messages[at + 1 :]]
