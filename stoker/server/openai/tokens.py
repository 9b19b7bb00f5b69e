"""POST /tokenize and /detokenize: the model's tokenizer, for clients that count before they ask.

The names of llama.cpp's server (content, tokens) and of vLLM's (prompt, messages, count) both work.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from stoker.server.errors import refused
from stoker.server.limits import parse, read_body
from stoker.server.openai.chat_request import ChatRequest, Message, Tool, to_turn
from stoker.server.openai.fields import Strict
from stoker.server.openai.logprobs import TokenTexts
from stoker.server.openapi import json_body
from stoker.server.registry import Registry
from stoker.server.service import Service
from stoker.server.settings import Settings
from stoker.server.turn import prompt_ids


class TokenizeRequest(Strict):
    """One of content (or prompt), continued as it is, and messages, through the chat template as a chat would be.

    add_special: what the tokenizer puts around a text. with_pieces: each token's text too.
    """

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special: bool = False
    with_pieces: bool = False


class Tokens(BaseModel):
    """tokens: ids; with_pieces: {id, piece} each. max_model_len: the context."""

    tokens: list[Any]
    count: int
    max_model_len: int


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(max_length=1_000_000)]


class Text(BaseModel):
    """The text under both names."""

    content: str
    prompt: str


def router(registry: Registry, settings: Settings) -> APIRouter:
    """Both paths."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", openapi_extra=json_body(TokenizeRequest, Tokens), summary="Text to tokens")
    async def tokenize(request: Request) -> JSONResponse:
        asked = parse(TokenizeRequest, await read_body(request, settings))
        given = [name for name in ("content", "prompt", "messages") if getattr(asked, name) is not None]
        if len(given) != 1:
            raise refused("content", "one text is wanted", code="invalid_value", expected="content, prompt or messages")
        if asked.tools and asked.messages is None:
            raise refused("tools", "it means nothing without messages", code="invalid_value")
        service = await registry.get(asked.model)
        ids = await service.work(_ids, service, asked, settings)
        tokens: list[Any] = ids
        if asked.with_pieces:
            texts = TokenTexts(service)
            tokens = [{"id": token, "piece": texts.of(token)[0]} for token in ids]
        return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": service.ctx_size})

    @routes.post("/detokenize", openapi_extra=json_body(DetokenizeRequest, Text), summary="Tokens to text")
    async def detokenize(request: Request) -> JSONResponse:
        asked = parse(DetokenizeRequest, await read_body(request, settings))
        service = await registry.get(asked.model)
        outside = next((token for token in asked.tokens if token >= service.vocab_tokens), None)
        if outside is not None:
            raise refused("tokens", "a token id lies outside the vocabulary", code="invalid_value", got=outside)
        text = await service.work(service.model.tokenizer.decode, asked.tokens)
        return JSONResponse({"content": text, "prompt": text})

    return routes


def _ids(service: Service, asked: TokenizeRequest, settings: Settings) -> list[int]:
    if asked.messages is None:
        return service.encode(
            asked.content if asked.content is not None else asked.prompt or "", special=asked.add_special
        )
    chat = ChatRequest.model_validate({"messages": asked.messages, "tools": asked.tools})
    turn = to_turn(chat, settings)
    return prompt_ids(service, turn)
