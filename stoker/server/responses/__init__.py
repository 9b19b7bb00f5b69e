"""OpenAI's Responses API, without a memory of its own: text and functions, streamed or whole."""

from stoker.server.responses.responses import router

__all__ = ["router"]
