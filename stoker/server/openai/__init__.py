"""The OpenAI API: chat completions, completions, models, and the tokenizer beside them."""

from fastapi import APIRouter

from stoker.server.openai import chat, completions, models, tokens
from stoker.server.registry import Registry
from stoker.server.settings import Settings


def router(registry: Registry, settings: Settings) -> APIRouter:
    """Every path of this package."""
    routes = APIRouter()
    for part in (models, chat, completions, tokens):
        routes.include_router(part.router(registry, settings))
    return routes
