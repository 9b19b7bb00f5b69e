"""The parts of an answer, and what every parser of answers does. Pure data; knows no format and no model."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """A tool call begins; index counts the calls of this answer from 0, id is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """The next piece of the arguments of call `index`, as JSON text: all pieces together are one JSON object."""

    index: int
    text: str


Part = Reasoning | Content | ToolStart | ToolArguments


class AnswerParser(Protocol):
    """Turns the text pieces of one answer into parts; the same parts however the text is cut into pieces."""

    def push(self, text: str) -> list[Part]:
        """The parts that became certain with `text`."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, at the end of the output. The parser is not used again."""
        ...

    @property
    def called_tools(self) -> bool:
        """Whether a tool call has begun."""
        ...


@dataclass
class ToolCall:
    """A whole tool call; arguments as JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """A whole answer, gathered from parts."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case ToolStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case ToolArguments(index, text):
                    self.calls[index].arguments += text


class Plain:
    """The parser of answers that are content alone."""

    called_tools = False

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def new_call_id() -> str:
    """An id that no other call has; 9 letters and digits after the prefix, which every API takes."""
    letters = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
    return "call_" + "".join(secrets.choice(letters) for _ in range(24))
