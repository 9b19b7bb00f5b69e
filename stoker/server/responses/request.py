"""The body of /v1/responses: its fields, and how its items become a turn.

Nothing is stored: the client sends the whole conversation each time. A field is honoured, or refused by its name.
"""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.server.errors import RequestError, refused
from stoker.server.openai.fields import Off, Strict
from stoker.server.settings import Settings
from stoker.server.turn import JsonObject, JsonSchema, Turn

MOST_TOOLS = 512
SEALED = "stoker:"  # how reasoning begins that a client keeps and gives back

# Fields of OpenAI's API that would change the answer, or promise something, and are not there: why.
UNSUPPORTED = {
    "access_programs": "there are none here",
    "background": "an answer ends with its request",
    "background_options": "an answer ends with its request",
    "context_management": "what is too long is refused, not shortened",
    "conversation": "nothing is stored: send the whole conversation as input",
    "image": "the answer is text",
    "max_tool_calls": "this server runs no tools",
    "moderation": "there is no moderation here",
    "previous_response_id": "nothing is stored: send the whole conversation as input",
    "prompt": "nothing is stored: send the prompt itself",
    "prompt_cache_options": "every prompt's prefix is cached without being asked",
    "store": "nothing is stored",
    "top_logprobs": "use /v1/chat/completions",
}


class Reasoning(Strict):
    """summary auto: there is none, the reasoning itself is given."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None


class Format(Strict):
    """json_schema: enforced while decoding."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Function(Strict):
    """A function of the client's own."""

    type: str
    name: str = Field("", max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Function):
    """A function, or a namespace of several (Codex groups its own so). A call says which namespace it is from."""

    tools: Annotated[list[Function], Field(max_length=MOST_TOOLS)] | None = None


class ToolChoice(Strict):
    type: Literal["function"]
    name: str


class StreamOptions(Strict):
    include_obfuscation: Off = False


class ResponsesRequest(Strict):
    """POST /v1/responses. Extensions: seed, top_k, min_p, repetition_penalty, stop."""

    model: str | None = Field(None, max_length=1000)
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    store: Off | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)] | None = None


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises RequestError for the first field that is known and not supported. null and false mean not given."""
    for name, why in UNSUPPORTED.items():
        if body.get(name):
            raise RequestError(f"not supported: {why}", field=name, code="unsupported_field")
        if name != "store":
            body.pop(name, None)


def to_turn(asked: ResponsesRequest, settings: Settings) -> Turn:
    """The turn that is asked for."""
    names = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty")
    effort = asked.reasoning.effort if asked.reasoning else None
    return Turn(
        messages(asked, settings),
        tools=tuple(_tool(tool, where) for where, _, tool in functions(asked)),
        tool_choice=asked.tool_choice.name
        if isinstance(asked.tool_choice, ToolChoice)
        else asked.tool_choice or "auto",
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        format=_format(asked.text.format if asked.text else None),
        sampling={name: getattr(asked, name) for name in names},
        max_tokens=asked.max_output_tokens,
        stop=tuple(asked.stop or ()),
        template={} if effort is None else {"reasoning_effort": effort},
    )


def _format(asked: Format | None) -> JsonObject | JsonSchema | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return JsonObject()
    if asked.schema_ is None:
        raise refused("text.format.schema", "this field is missing", code="missing_field")
    return JsonSchema(asked.schema_, asked.name or "response", asked.strict is not False)


def functions(asked: ResponsesRequest) -> list[tuple[str, str | None, Function]]:
    """The functions that may be called, in order: (where each stands, its namespace, itself)."""
    found: list[tuple[str, str | None, Function]] = []
    for index, tool in enumerate(asked.tools or ()):
        where = f"tools[{index}]"
        if tool.type == "namespace":
            if tool.parameters is not None or not tool.tools:
                raise refused(f"{where}.tools", "a namespace holds functions, at least one, and has no parameters")
            found += [(f"{where}.tools[{place}]", tool.name, inner) for place, inner in enumerate(tool.tools)]
        elif tool.tools is not None:
            raise refused(f"{where}.tools", "only a namespace holds tools", got=tool.type[:40])
        else:
            found.append((where, None, tool))
    return found


def _tool(tool: Function, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise RequestError(
            f"tools of type {tool.type[:40]!r} are not supported: this server runs no tools", field=f"{where}.type",
            code="unsupported_field", expected="function, or a namespace of functions",
        )  # fmt: skip
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def messages(asked: ResponsesRequest, settings: Settings) -> list[dict[str, Any]]:
    """The items as messages for a chat template: what the assistant thought, said and called in a row is one."""
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    if not items:
        raise refused("input", "there is nothing in it", expected="text, or at least one item")
    if len(items) > settings.max_messages:
        raise refused("input", "too many items", expected=f"at most {settings.max_messages}")
    made: list[dict[str, Any]] = []
    if asked.instructions:
        made.append({"role": "system", "content": asked.instructions})
    for index, item in enumerate(items):
        _add(made, item, f"input[{index}]")
    if not any(message["role"] == "user" for message in made):
        raise refused("input", "there is no message of the user")
    return made


def _add(made: list[dict[str, Any]], item: Any, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message":
            _add_message(made, item, where)
        case "function_call":
            _only(item, where, "id", "call_id", "name", "arguments", "status", "namespace", "caller")
            function = {name: _string(item, name, where) for name in ("name", "arguments")}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            _assistant(made).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            _only(item, where, "id", "call_id", "output", "status", "name", "namespace", "caller")
            output = _text(item.get("output"), f"{where}.output")
            made.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
        case "reasoning":
            _only(item, where, "id", "summary", "content", "encrypted_content", "status")
            thought = _thought(item, where)
            if thought:
                message = {"role": "assistant", "content": "", "reasoning_content": thought}
                made.append(message)
        case _:
            raise RequestError(
                f"items of type {str(kind)[:40]!r} are not supported",
                field=f"{where}.type",
                code="unsupported_content",
                expected="message, function_call, function_call_output or reasoning",
            )


def _add_message(made: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    _only(item, where, "id", "role", "content", "status", "phase")
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise refused(
            f"{where}.role", "not a role", expected="user, assistant, system or developer", got=repr(role)[:80]
        )
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant" and made and made[-1]["role"] == "assistant" and not made[-1]["content"]:
        message = _assistant(made)
        message["content"] = text
    else:
        made.append({"role": "system" if role == "developer" else role, "content": text})


def _assistant(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the assistant is in the middle of."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _thought(item: dict[str, Any], where: str) -> str:
    """Reasoning that comes back: as text, or sealed by this server."""
    content = item.get("content")
    if content:
        return _text(content, f"{where}.content")
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise refused(f"{where}.encrypted_content", "not what this server has given") from error
    return ""  # another server's: unreadable, and no part of the prompt


def seal(text: str) -> str:
    """Reasoning as a client may keep it for the next request: not secret, and not to be read either."""
    return SEALED + base64.b64encode(text.encode()).decode()


def _text(content: Any, where: str) -> str:
    """The text of content: text, or parts of text alone."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, "text or parts are wanted")
    texts: list[str] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text", "text", "refusal"):
            raise RequestError(
                f"parts of type {str(kind)[:40]!r} are not supported: this model reads text alone", field=place,
                code="unsupported_content", expected="input_text or output_text",
            )  # fmt: skip
        name = "refusal" if kind == "refusal" else "text"
        _only(part, place, name, "annotations", "logprobs")
        texts.append(_string(part, name, place))
    return "".join(texts)


def _only(item: dict[str, Any], where: str, *known: str) -> None:
    unknown = sorted(set(item) - {"type", *known})
    if unknown:
        raise refused(f"{where}.{unknown[0][:80]}", "unknown field", code="unknown_field")


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "a text is missing")
    return value
