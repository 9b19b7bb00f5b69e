"""The body of a chat completion: its fields, and how it becomes a turn.

Messages are checked one by one here, so that what is refused is refused by its name; templates see text alone.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.server.errors import RequestError, refused
from stoker.server.openai.fields import Sampling, Strict
from stoker.server.settings import Settings
from stoker.server.turn import JsonObject, JsonSchema, Turn

Text = str | list[dict[str, Any]]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MOST_TOOLS = 512


class Function(Strict):
    """A call's function; arguments as JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class Call(Strict):
    """A tool call of an earlier answer. index: what some clients keep from streams; it says nothing."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class Message(Strict):
    """role: system, developer, user, assistant or tool. content: text, or parts of type text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[Call] | None = Field(None, max_length=MOST_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionTool(Strict):
    """parameters: a JSON schema of the arguments; none means no arguments."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class Named(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: Named


class Schema(Strict):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """json_schema: enforced while decoding."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions. Extensions: those of Sampling, and chat_template_kwargs (variables for the model's
    chat template)."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None


def to_turn(asked: ChatRequest, settings: Settings) -> Turn:
    """The turn that is asked for, without its sampling."""
    if len(asked.messages) > settings.max_messages:
        raise refused(
            "messages", "too many messages", code="invalid_value", expected=f"at most {settings.max_messages}"
        )
    if asked.top_logprobs is not None and not asked.logprobs:
        raise refused("top_logprobs", "it means nothing without logprobs", code="invalid_value")
    return Turn(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(asked.messages)],
        tools=tuple(tool.model_dump(exclude_none=True) for tool in asked.tools or ()),
        tool_choice=_tool_choice(asked),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        format=_format(asked.response_format),
        max_tokens=_max_tokens(asked),
        stop=asked.stops,
        template=_template(asked),
    )


def _max_tokens(asked: ChatRequest) -> int | None:
    """Both names mean one thing; where both are given, the smaller bound holds."""
    given = [value for value in (asked.max_tokens, asked.max_completion_tokens) if value is not None]
    return min(given) if given else None


def _template(asked: ChatRequest) -> dict[str, Any]:
    variables = dict(asked.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template"):
        if name in variables:
            raise refused(f"chat_template_kwargs.{name}", "this variable is the server's to set", code="invalid_value")
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    return variables


def _tool_choice(asked: ChatRequest) -> str:
    choice = asked.tool_choice
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if not asked.tools:
        raise refused("tool_choice", "there are no tools to choose from", code="invalid_value")
    if isinstance(choice, str):
        return choice
    name = choice.function.name
    if name not in (tool.function.name for tool in asked.tools):
        raise refused("tool_choice", "there is no such tool", code="invalid_value", got=repr(name[:64]))
    return name


def _format(asked: ResponseFormat | None) -> JsonObject | JsonSchema | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return JsonObject()
    if asked.json_schema is None:
        raise refused("response_format.json_schema", "this field is missing", code="missing_field")
    return JsonSchema(asked.json_schema.schema_, asked.json_schema.name, asked.json_schema.strict is not False)


def _message(message: Message, where: str) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = "system" if message.role == "developer" else message.role
    _check_belonging(message, where)
    plain: dict[str, Any] = {"role": role, "content": _text(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    return plain


def _check_belonging(message: Message, where: str) -> None:
    """Fields that belong to one role alone."""
    for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
        if getattr(message, name) and message.role != "assistant":
            raise refused(f"{where}.{name}", "it belongs to messages of the assistant", code="invalid_value")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        what = "a tool's message names its call" if message.role == "tool" else "it belongs to messages of tools"
        raise refused(f"{where}.tool_call_id", what, code="invalid_value")


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and (message.tool_calls or message.refusal or message.reasoning_content):
            return message.refusal or ""
        raise refused(f"{where}.content", "this field is missing", code="missing_field")
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: dict[str, Any], where: str) -> str:
    """The text of a content part; anything but text is refused by its name."""
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        name = "refusal" if kind == "refusal" else "text"
        text = part.get(name)
        if not isinstance(text, str):
            raise refused(f"{where}.{name}", "a text is missing", code="invalid_value")
        unknown = sorted(set(part) - {"type", name, "cache_control", "annotations"})
        if unknown:
            raise refused(f"{where}.{unknown[0][:80]}", "unknown field", code="unknown_field")
        return text
    if not isinstance(kind, str):
        raise refused(f"{where}.type", "this field is missing", code="missing_field", expected="text")
    raise RequestError(
        f"parts of type {kind[:40]!r} are not supported: this model reads text alone", field=where,
        code="unsupported_content", expected="type text",
    )  # fmt: skip
