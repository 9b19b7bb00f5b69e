"""POST /v1/responses: items in, the next items out, whole or as the events that OpenAI's SDKs follow.

Stateless: a response cannot be asked for again, and says so (store is false).
"""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from stoker.errors import OptionError
from stoker.generate.answers.parts import AnswerParser, Reasoning
from stoker.generate.job import Done, Job, Piece
from stoker.generate.report import Result
from stoker.server.errors import as_request_error
from stoker.server.limits import parse, read_body
from stoker.server.openapi import json_body
from stoker.server.registry import Registry
from stoker.server.responses.items import Items
from stoker.server.responses.request import ResponsesRequest, functions, refuse_unsupported, to_turn
from stoker.server.service import Answer, Service
from stoker.server.settings import Settings
from stoker.server.sse import EventStream, data
from stoker.server.turn import Turn, prepare, renamed

# What a turn calls fields, and what they are called here.
_NAMES = {
    "format": "text.format.schema",
    "messages": "input",
    "thinking_tokens": "reasoning.effort",
    r"template\.(enable_)?thinking": "reasoning.effort",
}


class ResponseAnswer(BaseModel):
    """output: items of type reasoning, message and function_call."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


def router(registry: Registry, settings: Settings) -> APIRouter:
    """The path."""
    routes = APIRouter(tags=["openai"])

    @routes.post(
        "/v1/responses", openapi_extra=json_body(ResponsesRequest, ResponseAnswer, stream=True), summary="Responses"
    )
    async def responses(request: Request) -> Response:
        body = await read_body(request, settings)
        refuse_unsupported(body)
        asked = parse(ResponsesRequest, body)
        service = await registry.get(asked.model)
        turn = to_turn(asked, settings)
        job, parser = await service.work(_prepare, service, turn, [where for where, *_ in functions(asked)])
        reply = Reply(service, asked, job, parser)
        answer = service.run(job)
        if asked.stream:
            return EventStream(reply.events(answer), failed=reply.failed, every_s=settings.sse_keep_alive_s)
        return JSONResponse(await reply.whole(answer))

    return routes


def _prepare(service: Service, turn: Turn, places: list[str]) -> tuple[Job, AnswerParser]:
    """places: where each of the turn's tools stands in the request."""
    try:
        return prepare(service, turn)
    except OptionError as error:
        tools = {rf"tools\[{index}\]\.function": where for index, where in enumerate(places)}
        raise renamed(error, _NAMES | tools) from error.__cause__


class Reply:
    """The answer to one request, rendered."""

    def __init__(self, service: Service, asked: ResponsesRequest, job: Job, parser: AnswerParser) -> None:
        self._service, self._asked, self._job, self._parser = service, asked, job, parser
        self._id, self._created = "resp_" + secrets.token_hex(12), int(time.time())
        among = {function.name: name for _, name, function in functions(asked) if name is not None}
        self._items = Items(sealed=bool(asked.include), namespaces=among)
        self._number = 0
        self._reasoning_tokens = self._undecided_tokens = 0

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The response, when everything is there."""
        async with aclosing(answer.events()) as events:
            async for event in events:
                if isinstance(event, Piece | Done):
                    self._push(event)
                if isinstance(event, Done):
                    return self._response(event.result)
        raise AssertionError("an answer ends with its result")

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """The stream."""
        yield self._event({"type": "response.created", "response": self._response()})
        yield self._event({"type": "response.in_progress", "response": self._response()})
        async with aclosing(answer.events()) as events:
            async for event in events:
                if isinstance(event, Piece | Done):
                    for each in self._push(event):
                        yield self._event(each)
                if isinstance(event, Done):
                    response = self._response(event.result)
                    yield self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that fails."""
        told = as_request_error(error)
        response = self._response() | {
            "status": "failed",
            "error": {"code": told.code or "server_error", "message": told.what},
        }
        return self._event({"type": "response.failed", "response": response})

    def _push(self, event: Piece | Done) -> list[dict[str, Any]]:
        parts = self._parser.push(event.text) if isinstance(event, Piece) else self._parser.finish()
        if isinstance(event, Piece):
            self._undecided_tokens += len(event.samples)
            if parts:
                self._reasoning_tokens += self._undecided_tokens if isinstance(parts[0], Reasoning) else 0
                self._undecided_tokens = 0
        events = [each for part in parts for each in self._items.push(part)]
        if isinstance(event, Done):
            events += self._items.close("completed" if event.result.finish_reason == "stop" else "incomplete")
        return events

    def _event(self, event: dict[str, Any]) -> bytes:
        self._number += 1
        return data(event | {"sequence_number": self._number - 1}, event["type"])

    def _response(self, result: Result | None = None) -> dict[str, Any]:
        asked = self._asked
        status = "in_progress" if result is None else "completed" if result.finish_reason == "stop" else "incomplete"
        choice = asked.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._service.name,
            "output": self._items.output if result is not None else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": False,
            "temperature": self._job.request.sampling.temperature,
            "text": {"format": _format(asked)},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(exclude=None if tool.tools else {"tools"}) for tool in asked.tools or ()],
            "top_p": self._job.request.sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage(result) if result is not None else None,
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        usage = result.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _format(asked: ResponsesRequest) -> dict[str, Any]:
    given = asked.text.format if asked.text else None
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
