"""The Anthropic API: messages, streamed or whole, and the count of their tokens."""

from stoker.server.anthropic.messages import router

__all__ = ["router"]
