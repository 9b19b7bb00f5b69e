"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages in, the next one out, whole or streamed.

The order of events is that of Anthropic's own streams, which its SDKs insist on. What is not in the API's own shape
(errors) is rendered by errors.py.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from stoker.errors import ContextError, OptionError
from stoker.generate.answers.parts import AnswerParser
from stoker.generate.job import Done, Job, Piece
from stoker.generate.report import Result
from stoker.server.anthropic.blocks import Blocks
from stoker.server.anthropic.request import CountRequest, MessagesRequest, refuse_unsupported, to_turn
from stoker.server.errors import RequestError
from stoker.server.limits import parse, read_body
from stoker.server.openapi import json_body
from stoker.server.registry import Registry
from stoker.server.service import Answer, Service
from stoker.server.settings import Settings
from stoker.server.sse import EventStream, data
from stoker.server.turn import Turn, prepare, prompt_ids, renamed

PING = data({"type": "ping"}, "ping")
# What a turn calls fields, and what they are called here.
_NAMES = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "format": "output_config.format.schema",
    "thinking_tokens": "thinking.budget_tokens",
    r"template\.(enable_)?thinking": "thinking",
}


class MessageAnswer(BaseModel):
    """content: blocks of type thinking, text and tool_use."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    input_tokens: int


def router(registry: Registry, settings: Settings) -> APIRouter:
    """Both paths."""
    routes = APIRouter(tags=["anthropic"])

    @routes.post(
        "/v1/messages", openapi_extra=json_body(MessagesRequest, MessageAnswer, stream=True), summary="Messages"
    )
    async def messages(request: Request) -> Response:
        body = await read_body(request, settings)
        refuse_unsupported(body)
        asked = parse(MessagesRequest, body)
        service = await registry.get(asked.model)
        turn = to_turn(asked, settings)
        job, parser = await service.work(_prepare, service, turn)
        reply = Reply(service, job, parser)
        answer = service.run(job)
        if asked.stream:
            return EventStream(reply.events(answer), keep_alive=PING, every_s=settings.sse_keep_alive_s)
        return JSONResponse(await reply.whole(answer))

    @routes.post("/v1/messages/count_tokens", openapi_extra=json_body(CountRequest, TokenCount), summary="Count tokens")
    async def count_tokens(request: Request) -> JSONResponse:
        body = await read_body(request, settings)
        refuse_unsupported(body)
        asked = parse(CountRequest, body)
        service = await registry.get(asked.model)
        ids = await service.work(_count, service, to_turn(asked, settings))
        return JSONResponse({"input_tokens": ids})

    return routes


def _prepare(service: Service, turn: Turn) -> tuple[Job, AnswerParser]:
    try:
        return prepare(service, turn)
    except ContextError as error:
        raise _too_long(error) from error
    except OptionError as error:
        raise renamed(error, _NAMES) from error.__cause__


def _count(service: Service, turn: Turn) -> int:
    try:
        return len(prompt_ids(service, turn))
    except ContextError as error:
        raise _too_long(error) from error
    except OptionError as error:
        raise renamed(error, _NAMES) from error.__cause__


def _too_long(error: ContextError) -> RequestError:
    """In the words by which clients know that a conversation must be made shorter."""
    return RequestError(
        f"prompt is too long: {error.asked_tokens} tokens > {error.limit_tokens} maximum",
        code="context_length_exceeded",
    )


class Reply:
    """The answer to one request, rendered."""

    def __init__(self, service: Service, job: Job, parser: AnswerParser) -> None:
        self._service, self._job, self._parser = service, job, parser
        self._id = "msg_" + secrets.token_hex(12)
        self._blocks = Blocks()
        self._cached_tokens = 0

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The message, when everything is there."""
        async with aclosing(answer.events()) as events:
            async for event in events:
                if isinstance(event, Piece | Done):
                    self._push(event)
                if isinstance(event, Done):
                    reason, stop = self._ending(event.result)
                    return self._message(event.result) | {"stop_reason": reason, "stop_sequence": stop}
        raise AssertionError("an answer ends with its result")

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """The stream. It begins when the prompt's cached tokens are known."""
        begun = False
        async with aclosing(answer.events()) as events:
            async for event in events:
                if not begun:
                    self._cached_tokens = getattr(event, "cached", 0)
                    begun = True
                    yield _event({"type": "message_start", "message": self._message(None)})
                    yield PING
                if isinstance(event, Piece | Done):
                    for each in self._push(event):
                        yield _event(each)
                if isinstance(event, Done):
                    reason, stop = self._ending(event.result)
                    delta = {"stop_reason": reason, "stop_sequence": stop}
                    yield _event({"type": "message_delta", "delta": delta, "usage": self._usage(event.result)})
                    yield _event({"type": "message_stop"})

    def _push(self, event: Piece | Done) -> list[dict[str, Any]]:
        parts = self._parser.push(event.text) if isinstance(event, Piece) else self._parser.finish()
        events = [each for part in parts for each in self._blocks.push(part)]
        return [*events, *self._blocks.close()] if isinstance(event, Done) else events

    def _ending(self, result: Result) -> tuple[str, str | None]:
        """stop_reason, and the stop sequence where one ended the answer."""
        if result.stop_string is not None:
            return "stop_sequence", result.stop_string
        if result.finish_reason == "length":
            return "max_tokens", None
        return ("tool_use" if self._parser.called_tools else "end_turn"), None

    def _message(self, result: Result | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
            "content": self._blocks.content if result is not None else [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(result),
        }

    def _usage(self, result: Result | None) -> dict[str, Any]:
        """input_tokens were computed; cache_read_input_tokens were not."""
        cached = result.usage.cached_tokens if result is not None else self._cached_tokens
        return {
            "input_tokens": len(self._job.request.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": result.usage.completion_tokens if result is not None else 0,
        }


def _event(event: dict[str, Any]) -> bytes:
    return data(event, event["type"])
