"""A stream of server-sent events: chunks as they come, a sign of life where nothing comes, an error as its last event.

Knows bytes; what an event looks like is each API's own. A client that leaves ends it (the app's outermost layer
cancels the request), and the iteration is closed then.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.server.errors import Dialect, dialect_of, log_cut, render

KEEP_ALIVE = b": keep-alive\n\n"


def data(value: Any, event: str | None = None) -> bytes:
    """One event with JSON data."""
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends `chunks`; `keep_alive` after every `every_s` seconds without one. `failed` makes the last chunk from an
    error of the iteration, since the status has been sent by then (None: in the shape of the path's API)."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        failed: Callable[[Exception], bytes] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
        every_s: float = 5.0,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._keep_alive, self._every_s = chunks, keep_alive, every_s
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        failed = self._failed or partial(failed_event, dialect_of(scope["path"]))
        coming = _next(self._chunks)
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=self._every_s)
                if not done:
                    await _write(send, self._keep_alive)
                    continue
                chunk = coming.result()
                if chunk is None:
                    break
                coming = _next(self._chunks)
                await _write(send, chunk)
        except Exception as error:
            log_cut(scope["method"], scope["path"], error)
            await _write(send, failed(error))
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
            await self._chunks.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def failed_event(dialect: Dialect, error: Exception) -> bytes:
    """The last event of a stream that fails, in the API's shape; SDKs raise it."""
    _, body, _ = render(error, dialect)
    return data(body, "error" if dialect == "anthropic" else None)


def _next(chunks: AsyncIterator[bytes]) -> "asyncio.Task[bytes | None]":
    """The next chunk, or None at the end, as a task: waiting for it may be broken off without losing it."""

    async def step() -> bytes | None:
        return await anext(chunks, None)

    return asyncio.create_task(step())


async def _write(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
