"""The layer around the app: refuses before anything runs, and ends what a client no longer waits for.

One ASGI layer for every request: Host, Origin and key; CORS headers; an endpoint whose client left is cancelled at
once; what the request held is given back; an error becomes an answer in the shape of its API.
"""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.server.auth import allowed_origin, check_host, check_key, check_origin
from stoker.server.errors import RequestError, dialect_of, log_cut, log_refusal, render
from stoker.server.held import Held, begin
from stoker.server.settings import Settings

# How much of an unwanted body is taken, and for how long, before the connection is closed on it.
SKIP_BYTES = 64 << 20
SKIP_S = 3.0

_CORS_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"


class Guard:
    """Wraps the app."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._cors(Headers(scope=scope)))
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await exchange.fail(refusal)
            elif exchange.is_preflight and self._settings.cors:
                await exchange.preflight()
            else:
                await exchange.run(self._app)
        finally:
            await exchange.held.end()

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers, settings = Headers(scope=scope), self._settings
        try:
            check_host(headers, settings)
            check_origin(headers, scope["method"], scope["path"], settings)
            if not (scope["method"] == "OPTIONS" and settings.cors):
                check_key(headers, scope["path"], settings)
        except RequestError as error:
            return error
        return None

    def _cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The headers by which a browser lets a named origin's script read the answer."""
        origin = headers.get("origin")
        if origin is None or not allowed_origin(origin, self._settings):
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, cors: list[tuple[bytes, bytes]]) -> None:
        self._scope, self._receive, self._send, self._cors = scope, receive, send, cors
        names = {name for name, _ in scope["headers"]}
        self._started = False
        self._unread = bool(names & {b"content-length", b"transfer-encoding"})  # a body is there, or more of it
        self._read = asyncio.Event()  # the app has all of the body
        self.held: Held = begin()

    @property
    def is_preflight(self) -> bool:
        return self._scope["method"] == "OPTIONS" and "access-control-request-method" in Headers(scope=self._scope)

    async def run(self, app: ASGIApp) -> None:
        """Run the app in a task of its own, which ends when the client leaves."""
        task: asyncio.Task[None] = asyncio.create_task(self._run(app))
        watch = asyncio.create_task(self._gone())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            await task
        except asyncio.CancelledError:
            if not task.done():  # the server itself gives up
                task.cancel()
                await asyncio.wait((task,))
                raise
        except Exception as error:
            await self.fail(error)
        finally:
            watch.cancel()

    async def _run(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive_body, self._send_part)

    async def fail(self, error: Exception) -> None:
        """Answer with the error; where the answer has begun, its end comes without one and the connection closes."""
        if self._started:
            log_cut(self._scope["method"], self._scope["path"], error)
            return
        log_refusal(self._scope["method"], self._scope["path"], error)
        status, body, headers = render(error, dialect_of(self._scope["path"]))
        await self._answer(status, json.dumps(body).encode(), headers.items())

    async def preflight(self) -> None:
        """What a browser asks before it lets a named origin's script ask."""
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": _CORS_HEADERS,
            "Access-Control-Max-Age": "600",
        }
        await self._answer(204, b"", headers.items())

    async def _answer(self, status: int, body: bytes, headers: Iterable[tuple[str, str]]) -> None:
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        if status != 204:
            raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send_part({"type": "http.response.start", "status": status, "headers": raw})
        await self._send_part({"type": "http.response.body", "body": body})

    async def _send_part(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            await self.held.answering()
            closing = [] if await self._skip_body() else [(b"connection", b"close")]
            names = [(name, self.held.id.encode()) for name in (b"x-request-id", b"request-id")]
            message["headers"] = [*message["headers"], *self._cors, *names, *closing]
        await self._send(message)

    async def _skip_body(self) -> bool:
        """Take what is left of a body that is not wanted: a client that still sends would not see the answer, but the
        end of the connection. False where that would take too long."""
        skipped = 0
        try:
            async with asyncio.timeout(SKIP_S):
                while self._unread and skipped < SKIP_BYTES:
                    skipped += len((await self._receive_body()).get("body", b""))
        except TimeoutError:
            pass
        return not self._unread

    async def _receive_body(self) -> Message:
        if self._read.is_set():
            await asyncio.Event().wait()  # what comes next is the end, and the watcher's to see
        if not self._unread:
            self._read.set()
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._unread = False
            self._read.set()
        return message

    async def _gone(self) -> None:
        """Returns when the client has left. The body is the app's to read; what comes after it is the end."""
        if self._unread:
            await self._read.wait()
        message: Any = {"type": "http.request"}
        while message["type"] != "http.disconnect":
            message = await self._receive()
