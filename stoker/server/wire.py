"""The HTTP connection and the server process's life: uvicorn with h11, timeouts of its own, and an orderly end.

First SIGTERM or SIGINT: nothing new, running answers finish for a bounded time, those who wait are told. Second: now.
Either way the process ends with exit code 0, after everything that was being written is whole.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stoker.errors import OptionError
from stoker.server.registry import Registry
from stoker.server.settings import Settings

log = logging.getLogger("stoker.server")

# A connection that has not sent a whole request head by then is closed; so is one that does not take what is sent.
HEAD_S = 30.0
WRITE_S = 120.0
KEEP_ALIVE_S = 75
MOST_CONNECTIONS = 2000
HEAD_BYTES = 32 << 10
# After everything is told: how long connections may take to take it. After the second signal: how long a step may.
FLUSH_S = 5
NOW_S = 2.0
# `timeout` and shells send one signal to the process and to its group: what comes so soon after the first is no second.
SAME_SIGNAL_S = 0.5


class Connection(H11Protocol):
    """One client. Idle ones cost a file descriptor; ones that stall are closed."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._head_timer = self.loop.call_later(HEAD_S, self._no_head)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._stop(self._head_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._head_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop(self._write_timer)
        self._write_timer = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        """The bytes on the wire are no HTTP. Where a request is being answered, it ends as if its client had left."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        super().send_400_response(msg)

    def _no_head(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class _Server(uvicorn.Server):
    """uvicorn, with signals left to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OptionError for a taken port or an address that is not here."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, number)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        taken = isinstance(error, OSError) and "in use" in str(error).lower()
        raise OptionError(
            f"cannot bind {host} port {port}: {error.strerror or error}", where="--port" if taken else "--host",
            remedy=f"give another --port (0 takes a free one), or stop what listens on {port}" if taken
            else "give an address of this machine; 127.0.0.1 serves this machine alone",
        ) from error  # fmt: skip
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Any, registry: Registry, settings: Settings, sock: socket.socket, *, ready: Callable[[], None]) -> None:
    """Listen until a signal ends it. `ready` is called when the first request can come."""
    with contextlib.suppress(ImportError):
        _allow_connections()
    asyncio.run(_Life(app, registry, settings, sock, ready).run())


def _allow_connections() -> None:
    """Raise the soft limit of open files: each connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Life:
    """From the first connection to the last."""

    def __init__(
        self, app: Any, registry: Registry, settings: Settings, sock: socket.socket, ready: Callable[[], None]
    ) -> None:
        self._registry, self._settings, self._socket, self._ready = registry, settings, sock, ready
        config = uvicorn.Config(
            app, http=Connection, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=FLUSH_S,
            h11_max_incomplete_event_size=HEAD_BYTES, proxy_headers=False,
        )  # fmt: skip
        self._server = _Server(config)
        self._signals, self._first_signal_s = 0, 0.0
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        keep_alive = asyncio.create_task(self._registry.keep_alive())
        telling = asyncio.create_task(self._tell_ready())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            keep_alive.cancel()
            telling.cancel()
            await self._registry.close()
            if self._signals > 1:
                _leave()  # the interpreter's own end takes a second or more

    async def _tell_ready(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._ready()

    def _on_signal(self) -> None:
        now = time.monotonic()
        if self._signals == 1 and now - self._first_signal_s < SAME_SIGNAL_S:
            return
        self._signals += 1
        if self._signals == 1:
            self._first_signal_s = now
            self._ending = asyncio.create_task(self._end())
        elif self._signals == 2:
            _say("stopping now")
            self._ending = asyncio.create_task(self._end_now())
        else:
            _leave()

    async def _end(self) -> None:
        """Let running answers finish, for a while."""
        running, seconds = self._registry.running, self._settings.shutdown_s
        answers = "answer" if running == 1 else "answers"
        waits = f"{running} running {answers} may finish for {seconds:g} s; the same signal again stops now"
        _say(f"stopping: {waits}" if running else "stopping")
        if not await self._registry.drain(seconds):
            _say("time is up: the running answers end here")
            await self._registry.close()
        self._server.should_exit = True

    async def _end_now(self) -> None:
        # A step cannot be broken off: when it takes too long, the process ends around it. Files are written under
        # temporary names until they are whole, so nothing half-written stays.
        asyncio.get_running_loop().call_later(NOW_S, _leave)
        await self._registry.close()
        self._server.should_exit = self._server.force_exit = True


def _say(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr, flush=True)


def _leave() -> None:
    sys.stderr.flush()
    os._exit(0)
