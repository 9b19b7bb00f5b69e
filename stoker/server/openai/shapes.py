"""The shapes of OpenAI's answers: heads, usage, deltas, the end of a stream, and the models that describe them."""

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from stoker.generate.answers.parts import Content, Part, Reasoning, ToolArguments, ToolStart
from stoker.generate.job import Progress
from stoker.generate.report import Result
from stoker.server.service import Service

DONE = b"data: [DONE]\n\n"


class Usage(BaseModel):
    """Tokens. prompt_tokens_details.cached_tokens were not computed; completion_tokens counts the end-of-text token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatCompletion(BaseModel):
    """choices: index, message (role, content, reasoning_content, tool_calls), logprobs, finish_reason (stop, length,
    tool_calls). stoker: timings in ms, the seed in use, and what was read from disk, for each choice."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage
    stoker: dict[str, Any]


class Completion(ChatCompletion):
    """choices: index, text, logprobs, finish_reason (stop, length)."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def head(service: Service, id: str, kind: str, created: int) -> dict[str, Any]:
    """What every answer and chunk begins with. The fingerprint changes with the weights."""
    return {
        "id": id,
        "object": kind,
        "created": created,
        "model": service.name,
        "system_fingerprint": service.fingerprint,
    }


def usage(prompts: Sequence[Result], results: Sequence[Result], reasoning_tokens: int = 0) -> dict[str, Any]:
    """prompts: one result for each distinct prompt (choices share it); results: all of them."""
    prompt_tokens = sum(result.usage.prompt_tokens for result in prompts)
    completion_tokens = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens for result in prompts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def extra(results: Sequence[Result]) -> dict[str, Any]:
    """What OpenAI has no place for."""
    rows = []
    for result in results:
        plain = result.as_dict()
        rows.append({"seed": result.seed, "timings": plain["timings"], "stats": plain["stats"]})
    return {"choices": rows}


def delta(part: Part) -> dict[str, Any]:
    """The change that a part is to the message."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case ToolStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def progress(index: int, event: Progress) -> dict[str, int]:
    """Prompt tokens done, of how many, and how many of them were cached."""
    return {"index": index, "done": event.done, "total": event.total, "cached": event.cached}
