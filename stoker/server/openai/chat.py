"""POST /v1/chat/completions: a conversation in, the next message out, whole or streamed.

Reads the request, makes a turn for each choice, and renders what comes. How text becomes parts (reasoning, content,
tool calls) is the answer parser's business.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from stoker.errors import OptionError
from stoker.generate.answers.parts import AnswerParser, Content, Part, Reasoning, ToolArguments, ToolStart
from stoker.generate.job import Done, Job, Piece, Progress
from stoker.generate.report import Result
from stoker.server.limits import parse, read_body
from stoker.server.openai import shapes
from stoker.server.openai.chat_request import ChatRequest, to_turn
from stoker.server.openai.fields import refuse_unsupported
from stoker.server.openai.logprobs import TokenTexts
from stoker.server.openai.merge import check_choices, merged, start
from stoker.server.openai.shapes import ChatCompletion
from stoker.server.openapi import json_body
from stoker.server.registry import Registry
from stoker.server.service import Answer, Service, Told
from stoker.server.settings import Settings
from stoker.server.sse import EventStream, data
from stoker.server.turn import Turn, prepare, renamed

# What a turn calls them, and what they are called here.
_NAMES = {"format": "response_format", "template": "chat_template_kwargs"}


def router(registry: Registry, settings: Settings) -> APIRouter:
    """The path."""
    routes = APIRouter(tags=["openai"])

    @routes.post(
        "/v1/chat/completions", openapi_extra=json_body(ChatRequest, ChatCompletion, stream=True), summary="Chat"
    )
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, settings)
        refuse_unsupported(body)
        asked = parse(ChatRequest, body)
        asked.check_stream()
        service = await registry.get(asked.model)
        turn = to_turn(asked, settings)
        check_choices(service, asked.n)
        prepared = await service.work(_prepare_all, service, asked, turn)
        answers = start(service, [job for job, _ in prepared])
        parsers = [parser for _, parser in prepared]
        reply = Reply(service, asked, [Choice(index, parser) for index, parser in enumerate(parsers)])
        if asked.stream:
            return EventStream(reply.events(answers), every_s=settings.sse_keep_alive_s)
        return JSONResponse(await reply.whole(answers))

    return routes


def _prepare_all(service: Service, asked: ChatRequest, turn: Turn) -> list[tuple[Job, AnswerParser]]:
    """A job and a parser for each choice. Runs off the event loop."""
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    turns = [replace(turn, sampling=asked.asked(logprobs, choice)) for choice in range(asked.n or 1)]
    try:
        return [_with_switches(asked, *prepare(service, one)) for one in turns]
    except OptionError as error:
        raise renamed(error, _NAMES) from error.__cause__


def _with_switches(asked: ChatRequest, job: Job, parser: AnswerParser) -> tuple[Job, AnswerParser]:
    request = replace(job.request, ignore_eos=bool(asked.ignore_eos))
    return replace(job, request=request, cache=asked.cache_prompt is not False), parser


@dataclass
class Choice:
    """One answer as it comes."""

    index: int
    parser: AnswerParser
    result: Result | None = None
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reasoning_tokens: int = 0
    _undecided_tokens: int = 0

    def push(self, event: Piece | Done) -> list[Part]:
        """The parts that an event brings; they are remembered too."""
        if isinstance(event, Piece):
            parts = self.parser.push(event.text)
            self._count(parts, len(event.samples))
        else:
            self.result, parts = event.result, self.parser.finish()
        for part in parts:
            self._keep(part)
        return parts

    @property
    def finish_reason(self) -> str:
        assert self.result is not None
        called = self.result.finish_reason == "stop" and self.parser.called_tools
        return "tool_calls" if called else self.result.finish_reason

    def _count(self, parts: list[Part], tokens: int) -> None:
        """Tokens of reasoning: up to the first part of anything else."""
        self._undecided_tokens += tokens
        if parts:
            if isinstance(parts[0], Reasoning):
                self.reasoning_tokens += self._undecided_tokens
            self._undecided_tokens = 0

    def _keep(self, part: Part) -> None:
        match part:
            case Reasoning(text):
                self.reasoning += text
            case Content(text):
                self.content += text
            case ToolStart(_, call_id, name):
                function = {"name": name, "arguments": ""}
                self.calls.append({"id": call_id, "type": "function", "function": function})
            case ToolArguments(index, text):
                self.calls[index]["function"]["arguments"] += text

    def message(self) -> dict[str, Any]:
        """The whole message."""
        content = self.content if self.content or not self.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Reply:
    """All choices of one request, rendered."""

    def __init__(self, service: Service, asked: ChatRequest, choices: list[Choice]) -> None:
        self._service, self._asked, self._choices = service, asked, choices
        self._id, self._created = shapes.new_id("chatcmpl"), int(time.time())
        self._texts = TokenTexts(service) if asked.logprobs else None

    async def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """The one answer, when everything is there."""
        async for index, event in merged(answers):
            if not isinstance(event, Progress):
                self._choices[index].push(event)
                self._choices[index].logprobs += self._logprobs(event)
        choices = [
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": self._logprobs_object(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in self._choices
        ]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage(), "stoker": self._extra()}

    async def events(self, answers: list[Answer]) -> AsyncIterator[bytes]:
        """The stream, one event a change."""
        for choice in self._choices:
            yield self._delta(choice.index, {"role": "assistant", "content": ""})
        async for index, event in merged(answers):
            for chunk in self._chunks(self._choices[index], event):
                yield chunk
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], usage=self._usage(), stoker=self._extra())
        yield shapes.DONE

    def _chunks(self, choice: Choice, event: Told) -> list[bytes]:
        if isinstance(event, Progress):
            options = self._asked.stream_options
            wanted = options is not None and options.include_progress
            return [self._chunk([], progress=shapes.progress(choice.index, event))] if wanted else []
        parts = choice.push(event)
        choice.logprobs += self._logprobs(event)
        chunks = [self._delta(choice.index, shapes.delta(part), self._take_logprobs(choice)) for part in parts]
        if isinstance(event, Done):
            chunks.append(self._delta(choice.index, {}, self._take_logprobs(choice), choice.finish_reason))
        return chunks

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return data(self._head("chat.completion.chunk") | {"choices": choices, "usage": None} | more)

    def _head(self, kind: str) -> dict[str, Any]:
        return shapes.head(self._service, self._id, kind, self._created)

    def _logprobs(self, event: Piece | Done) -> list[dict[str, Any]]:
        if self._texts is None or isinstance(event, Done):
            return []
        return [self._texts.chat_entry(sample) for sample in event.samples if not self._texts.ends(sample.token)]

    def _take_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        taken, choice.logprobs = choice.logprobs, []
        return self._logprobs_object(taken) if taken else None

    def _logprobs_object(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": entries, "refusal": None} if self._texts is not None else None

    def _usage(self) -> dict[str, Any]:
        results = [choice.result for choice in self._choices if choice.result is not None]
        return shapes.usage(results[:1], results, sum(choice.reasoning_tokens for choice in self._choices))

    def _extra(self) -> dict[str, Any]:
        return shapes.extra([choice.result for choice in self._choices if choice.result is not None])
