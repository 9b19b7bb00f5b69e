"""POST /v1/completions: text or token ids continued as they are, without a chat template; whole or streamed.

Several prompts and n answers each become choices, numbered prompt by prompt.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from stoker.generate import request as generation
from stoker.generate.job import Done, Job, Piece, Progress
from stoker.generate.report import Result
from stoker.generate.sampler import Sample
from stoker.server.errors import refused
from stoker.server.limits import parse, read_body
from stoker.server.openai import shapes
from stoker.server.openai.fields import MOST_CHOICES, Sampling, refuse_unsupported
from stoker.server.openai.logprobs import TokenTexts
from stoker.server.openai.merge import check_choices, merged, start
from stoker.server.openai.shapes import Completion
from stoker.server.openapi import json_body
from stoker.server.registry import Registry
from stoker.server.service import Answer, Service, Told
from stoker.server.settings import Settings
from stoker.server.sse import EventStream, data

DEFAULT_MAX_TOKENS = 16  # OpenAI's own, for this path
Ids = list[Annotated[int, Field(ge=0, le=2**31)]]


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: a text, token ids, or a list of either. echo: the text begins with the prompt."""

    prompt: str | Ids | list[str] | list[Ids]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None


def router(registry: Registry, settings: Settings) -> APIRouter:
    """The path."""
    routes = APIRouter(tags=["openai"])

    @routes.post(
        "/v1/completions", openapi_extra=json_body(CompletionRequest, Completion, stream=True), summary="Complete"
    )
    async def completions(request: Request) -> Response:
        body = await read_body(request, settings)
        refuse_unsupported(body, allowed=("best_of",))
        asked = parse(CompletionRequest, body)
        _check(asked)
        service = await registry.get(asked.model)
        check_choices(service, len(_prompts(asked)) * (asked.n or 1))
        choices = await service.work(_choices, service, asked)
        answers = start(service, [choice.job for choice in choices])
        reply = Reply(service, asked, choices)
        if asked.stream:
            return EventStream(reply.events(answers), every_s=settings.sse_keep_alive_s)
        return JSONResponse(await reply.whole(answers))

    return routes


def _check(asked: CompletionRequest) -> None:
    asked.check_stream()
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise refused("best_of", "not supported: give n instead", code="unsupported_field")
    if asked.echo and asked.logprobs is not None:
        raise refused("echo", "not supported together with logprobs: prompts have none", code="unsupported_field")
    prompts = _prompts(asked)
    if not all(prompts) or not prompts:
        raise refused("prompt", "the prompt is empty", code="invalid_value", expected="at least one token")
    if len(prompts) * (asked.n or 1) > MOST_CHOICES:
        raise refused("prompt", "too many answers at once", code="invalid_value", expected=f"at most {MOST_CHOICES}")


def _prompts(asked: CompletionRequest) -> list[str] | list[Ids]:
    prompt: Any = asked.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


@dataclass
class Choice:
    """One answer as it comes. first: whether it is its prompt's first, for counting prompts once."""

    index: int
    job: Job
    echo: str
    first: bool
    text: str = ""
    samples: list[Sample] = field(default_factory=list)
    told_chars: int = 0
    result: Result | None = None


def _choices(service: Service, asked: CompletionRequest) -> list[Choice]:
    """Runs off the event loop."""
    choices: list[Choice] = []
    vocab_tokens = service.vocab_tokens
    for prompt in _prompts(asked):
        ids = service.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        outside = next((token for token in ids if token >= vocab_tokens), None)
        if outside is not None:
            raise refused(
                "prompt", "a token id lies outside the vocabulary", code="invalid_value",
                expected=f"0 to {vocab_tokens - 1}", got=outside,
            )  # fmt: skip
        max_tokens = service.limit_tokens(len(ids), asked.max_tokens, otherwise=DEFAULT_MAX_TOKENS)
        echo = (prompt if isinstance(prompt, str) else service.model.tokenizer.decode(ids)) if asked.echo else ""
        for number in range(asked.n or 1):
            request = generation.Request(
                tuple(ids),
                service.sampling(asked.asked(asked.logprobs, len(choices))),
                max_tokens=max_tokens,
                stop=asked.stops,
                ignore_eos=bool(asked.ignore_eos),
            )
            job = Job(request, cache=asked.cache_prompt is not False)
            choices.append(Choice(len(choices), job, echo, first=number == 0))
    return choices


class Reply:
    """All choices of one request, rendered."""

    def __init__(self, service: Service, asked: CompletionRequest, choices: list[Choice]) -> None:
        self._service, self._asked, self._choices = service, asked, choices
        self._id, self._created = shapes.new_id("cmpl"), int(time.time())
        self._texts = TokenTexts(service) if asked.logprobs is not None else None

    async def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """The one answer, when everything is there."""
        async for index, event in merged(answers):
            self._take(self._choices[index], event)
        choices = [
            self._choice(choice, choice.echo + choice.text, choice.samples, choice.result) for choice in self._choices
        ]
        return self._head() | {"choices": choices, "usage": self._usage(), "stoker": self._extra()}

    async def events(self, answers: list[Answer]) -> AsyncIterator[bytes]:
        """The stream, one event a change."""
        options = self._asked.stream_options
        for choice in self._choices:
            if choice.echo:
                yield self._chunk([self._choice(choice, choice.echo, [], None)])
        async for index, event in merged(answers):
            choice = self._choices[index]
            if isinstance(event, Progress):
                if options is not None and options.include_progress:
                    yield self._chunk([], progress=shapes.progress(index, event))
                continue
            fresh = self._take(choice, event)
            if fresh or choice.result is not None:
                samples, choice.samples = choice.samples, []
                yield self._chunk([self._choice(choice, fresh, samples, choice.result)])
        if options is not None and options.include_usage:
            yield self._chunk([], usage=self._usage(), stoker=self._extra())
        yield shapes.DONE

    def _take(self, choice: Choice, event: Told) -> str:
        """Remember an event; the text that it brings."""
        if isinstance(event, Done):
            choice.result = event.result
        elif isinstance(event, Piece):
            choice.text += event.text
            if self._texts is not None:
                choice.samples += [sample for sample in event.samples if not self._texts.ends(sample.token)]
            return event.text
        return ""

    def _choice(self, choice: Choice, text: str, samples: list[Sample], result: Result | None) -> dict[str, Any]:
        logprobs = None
        if self._texts is not None:
            logprobs = self._texts.completion_entries(samples, choice.told_chars)
            choice.told_chars += sum(map(len, logprobs["tokens"]))
        reason = None if result is None else result.finish_reason
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return data(self._head() | {"choices": choices, "usage": None} | more)

    def _head(self) -> dict[str, Any]:
        return shapes.head(self._service, self._id, "text_completion", self._created)

    def _usage(self) -> dict[str, Any]:
        done = [choice for choice in self._choices if choice.result is not None]
        prompts = [choice.result for choice in done if choice.first and choice.result is not None]
        return shapes.usage(prompts, [choice.result for choice in done if choice.result is not None])

    def _extra(self) -> dict[str, Any]:
        return shapes.extra([choice.result for choice in self._choices if choice.result is not None])
