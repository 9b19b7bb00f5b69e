"""One turn of a conversation: what every chat API becomes, and how it becomes a job and the parser of its answer.

Knows messages, tools and formats; no HTTP and no API's own names. `field` of the errors raised here names the field of
the turn; an API that calls it otherwise renames it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.errors import OptionError
from stoker.generate.answers.parts import AnswerParser, Plain
from stoker.generate.chat_template import chat_ids
from stoker.generate.job import Job
from stoker.generate.request import Request, resolve_sampling

Message = dict[str, Any]
Tool = dict[str, Any]


class Served(Protocol):
    """What is needed of a loaded model."""

    @property
    def model(self) -> Any: ...


@dataclass(frozen=True)
class JsonObject:
    """The answer is any one JSON object."""


@dataclass(frozen=True)
class JsonSchema:
    """The answer is one JSON value that `schema` accepts."""

    schema: Mapping[str, Any]
    name: str = "response"
    strict: bool = True


@dataclass(frozen=True)
class Turn:
    """messages: as chat templates take them (role, content as text, tool_calls, tool_call_id, reasoning_content).

    tools: in OpenAI's form, {"type": "function", "function": {name, description, parameters}}. tool_choice: auto, none,
    required, or the name of a function. sampling: names of SamplingOptions, None where not asked. template: variables
    for the chat template (enable_thinking, reasoning_effort ...).
    """

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    format: JsonObject | JsonSchema | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)


def refused(field_name: str, what: str, **more: Any) -> OptionError:
    """An OptionError about one field of the request."""
    error = OptionError(what, where=field_name, **more)
    error.field = field_name
    return error


def prepare(service: Served, turn: Turn) -> tuple[Job, AnswerParser]:
    """The job that answers `turn`, and the parser of its text. Raises OptionError with `.field`."""
    model = service.model
    if turn.tools:
        raise refused("tools", "tools are not supported yet")
    if turn.format is not None:
        raise refused("format", "formats are not supported yet")
    ids = tuple(chat_ids(model.tokenizer, turn.messages, **turn.template))
    sampling = resolve_sampling(turn.sampling, model.runtime.generation_config)
    return Job(Request(ids, sampling, max_tokens=turn.max_tokens, stop=turn.stop)), Plain()
