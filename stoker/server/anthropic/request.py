"""The body of /v1/messages and of its count_tokens: fields, and how they become a turn.

A field is honoured, or refused by its name. cache_control is taken and changes nothing: every prompt's prefix is cached
without being asked.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.server.errors import RequestError, refused
from stoker.server.openai.fields import Off, Strict
from stoker.server.settings import Settings
from stoker.server.turn import JsonSchema, Turn

MOST_TOOLS = 512
Blocks = list[dict[str, Any]]

# Fields of Anthropic's API that would change the answer, or promise something, and are not there: why.
UNSUPPORTED = {
    "container": "there are no containers here",
    "diagnostics": "there are no cache diagnostics here",
    "inference_geo": "the model runs where this server runs",
    "mcp_servers": "this server calls no other servers",
}
# Some clients put a line about themselves, different each time, before the system prompt; it is no prompt.
_BILLING = "x-anthropic-billing-header:"


class Message(Strict):
    """content: text, or blocks of type text, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(Strict):
    """A tool of the client's own. input_schema: of its arguments."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: Off | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """budget_tokens: the most tokens of reasoning; adaptive: as many as the model likes."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=2**31)
    display: Literal["summarized"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """format: enforced while decoding."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(Strict):
    """What may be cleared from the context; all thinking is kept, so nothing is."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    edits: list[Edit] = Field(default_factory=list, max_length=16)


class CountRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: str = Field(min_length=1, max_length=1000)
    messages: list[Message] = Field(min_length=1)
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages. Extensions: seed, min_p, repetition_penalty."""

    max_tokens: int = Field(ge=1, le=2**31)
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)] | None
    ) = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises RequestError for the first field that is known and not supported. null means not given."""
    for name, why in UNSUPPORTED.items():
        if body.get(name):
            raise RequestError(f"not supported: {why}", field=name, code="unsupported_field")
        body.pop(name, None)


def to_turn(asked: CountRequest, settings: Settings) -> Turn:
    """The turn that is asked for."""
    if len(asked.messages) > settings.max_messages:
        raise refused("messages", "too many messages", expected=f"at most {settings.max_messages}")
    messages: list[dict[str, Any]] = []
    if asked.system:
        text = _system(asked.system)
        messages += [{"role": "system", "content": text}] if text else []
    for index, message in enumerate(asked.messages):
        messages += _messages(message, f"messages[{index}]")
    if asked.messages[-1].role == "assistant":
        raise refused(
            f"messages[{len(asked.messages) - 1}]", "an answer that is begun by the client is not supported",
            expected="a last message of the user", code="unsupported_content",
        )  # fmt: skip
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools or ()))
    choice = asked.tool_choice
    more = _of_the_answer(asked) if isinstance(asked, MessagesRequest) else {}
    thinking = asked.thinking
    return Turn(
        messages,
        tools=tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        format=_format(asked.output_config),
        template=_template(asked),
        thinking_tokens=thinking.budget_tokens if thinking and thinking.type == "enabled" else None,
        **more,
    )


def _of_the_answer(asked: MessagesRequest) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty")
    thinking = asked.thinking
    if thinking and thinking.budget_tokens and thinking.budget_tokens >= asked.max_tokens:
        raise refused("thinking.budget_tokens", "it leaves nothing for the answer", expected="less than max_tokens")
    return {
        "sampling": {name: getattr(asked, name) for name in names},
        "max_tokens": asked.max_tokens,
        "stop": tuple(asked.stop_sequences or ()),
    }


def _system(system: str | Blocks) -> str:
    if isinstance(system, str):
        return system
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _template(asked: CountRequest) -> dict[str, Any]:
    """Reasoning, as the model's template can have it."""
    effort = asked.output_config.effort if asked.output_config else None
    if asked.thinking is None:
        return {} if effort is None else {"reasoning_effort": effort}
    if asked.thinking.type == "enabled" and asked.thinking.budget_tokens is None:
        raise refused("thinking.budget_tokens", "this field is missing", code="missing_field")
    if asked.thinking.type != "enabled" and asked.thinking.budget_tokens is not None:
        raise refused("thinking.budget_tokens", f"it means nothing with type {asked.thinking.type}")
    return {"reasoning_effort": "none" if asked.thinking.type == "disabled" else effort or "medium"}


def _format(config: OutputConfig | None) -> JsonSchema | None:
    return JsonSchema(config.format.schema_) if config and config.format else None


def _tool_choice(choice: ToolChoice | None) -> str:
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        raise refused("tool_choice.name", "it is given with type tool, and only then")
    return choice.name or {"any": "required"}.get(choice.type, choice.type)


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"tools of type {tool.type[:40]!r} are not supported: this server runs no tools", field=f"{where}.type",
            code="unsupported_field", expected="custom",
        )  # fmt: skip
    description = tool.description or ""
    if tool.input_examples:
        description += "\nExamples of its input: " + json.dumps(tool.input_examples, ensure_ascii=False)
    function: dict[str, Any] = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _messages(message: Message, where: str) -> Iterator[dict[str, Any]]:
    """The messages that one message with blocks is to a chat template: results of tools stand for themselves."""
    content = message.content
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not blocks:
        raise refused(f"{where}.content", "there is nothing in it", expected="text, or at least one block")
    if message.role == "assistant":
        yield _assistant(blocks, where)
        return
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.get("type") == "tool_result" and message.role == "user":
            if texts:
                yield {"role": "user", "content": "\n\n".join(texts)}
                texts = []
            yield _result(block, place)
        else:
            texts.append(_text(block, place))
    if texts:
        yield {"role": message.role, "content": "\n\n".join(texts)}


def _assistant(blocks: Blocks, where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block.get("type"):
            case "thinking":
                _only(block, place, "thinking", "signature", "cache_control")
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                _only(block, place, "data", "cache_control")  # of another model: unreadable, and no part of the prompt
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                texts.append(_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    _only(block, where, "id", "name", "input", "cache_control", "caller")
    if not isinstance(block.get("input"), dict):
        raise refused(f"{where}.input", "an object is missing")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    _only(block, where, "tool_use_id", "content", "is_error", "cache_control")
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise refused(f"{where}.content", "text or blocks are wanted")
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise refused(f"{where}.is_error", "true or false is wanted")
    text = f"Error: {content}" if failed and not content.lower().startswith("error") else content
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _text(block: Any, where: str) -> str:
    """The text of a text block; anything else is refused by its name."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        if not isinstance(kind, str):
            raise refused(f"{where}.type", "this field is missing", code="missing_field", expected="text")
        raise RequestError(
            f"blocks of type {kind[:40]!r} are not supported here: this model reads text alone", field=where,
            code="unsupported_content", expected="type text",
        )  # fmt: skip
    _only(block, where, "text", "cache_control", "citations")
    if block.get("citations"):
        raise refused(f"{where}.citations", "citations are not supported", code="unsupported_content")
    return _string(block, "text", where)


def _only(block: dict[str, Any], where: str, *known: str) -> None:
    unknown = sorted(set(block) - {"type", *known})
    if unknown:
        raise refused(f"{where}.{unknown[0][:80]}", "unknown field", code="unknown_field")


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "a text is missing")
    return value
