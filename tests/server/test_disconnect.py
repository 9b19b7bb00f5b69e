"""A client that vanishes: no step after the one in progress has work for it, also while its prompt is read.

The server is whole (sockets, guard, engine), in this process, so that its steps can be let through one by one.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from stoker.runtime.step import Part
from stoker.server import wire
from stoker.server.app import create_app
from stoker.server.loading import Batching, loader
from stoker.server.registry import Registry, Spec
from stoker.server.service import Service
from stoker.server.settings import Settings

CHUNK = 64
LIMIT_S = 180.0
USER = [{"role": "user", "content": "fox"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4000, "ignore_eos": True},
    "/v1/completions": {"prompt": "fox", "max_tokens": 4000, "ignore_eos": True},
    "/v1/messages": {"model": "x", "messages": USER, "max_tokens": 4000},
    "/v1/responses": {"input": USER, "max_output_tokens": 4000},
}


class Steps:
    """The engine's steps, which wait until they are let. begun: for each the sequences at work, the waiting one too."""

    def __init__(self, service: Service) -> None:
        runtime = service.model.runtime
        self.begun: list[list[int]] = []
        self._kept: list[Any] = []  # so that no two sequences have the same id
        self._advance, self._permits, self._free = runtime.advance, threading.Semaphore(0), False
        runtime.advance = self._one  # type: ignore[method-assign]

    def _one(self, parts: Sequence[Part]) -> Any:
        self._kept += [part.sequence for part in parts]
        self.begun.append([id(part.sequence) for part in parts])
        if not self._free:
            assert self._permits.acquire(timeout=LIMIT_S), "no step was let for a long time"
        return self._advance(parts)

    def let(self, count: int) -> None:
        """Let so many steps be computed, and wait until the next one stands at the door."""
        wanted = len(self.begun) + count
        self._permits.release(count)
        until(lambda: len(self.begun) >= wanted)

    def let_all(self) -> None:
        self._free = True
        self._permits.release()


def until(true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def served(long_store: Path) -> Iterator[tuple[str, Service]]:
    """(url, the one model)."""
    settings = Settings()
    load = loader(settings, {"prefill_chunk": CHUNK, "ctx_size": 8192}, Batching(parallel=2, queue=2))
    registry = Registry([Spec(("x",), str(long_store))], load, settings, budget_bytes=8 << 30, keep_alive_s=None)
    service, sock = registry.adopt(registry.entries[0]), wire.bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(registry, settings), http=wire.Connection, lifespan="off", log_config=None)
    server = wire._Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    until(lambda: server.started)
    yield wire.url_of(sock), service
    server.should_exit = True
    thread.join(LIMIT_S)
    service.close()


@pytest.fixture
def steps(served: tuple[str, Service], monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    service = served[1]
    monkeypatch.setattr(service.model.runtime, "advance", service.model.runtime.advance)  # undone at the end
    steps = Steps(service)
    yield steps
    steps.let_all()
    until(lambda: service.batcher.status().running == 0)


def send(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, of which nothing is read yet."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def noticed(service: Service) -> bool:
    return any(ticket.cancelled for ticket in list(service.batcher._tickets.values()))


@pytest.mark.parametrize("path", BODIES)
def test_in_the_middle_of_a_stream(served: tuple[str, Service], steps: Steps, path: str) -> None:
    url, service = served
    leaver = send(url, path, BODIES[path] | {"stream": True})
    until(lambda: len(steps.begun) == 1)
    gone = steps.begun[0][0]
    steps.let(3)
    assert leaver.recv(1 << 16).startswith(b"HTTP/1.1 200")
    with ThreadPoolExecutor() as pool:
        body = BODIES["/v1/completions"] | {"max_tokens": 20}
        other = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        until(lambda: service.batcher.status().running + service.batcher.status().waiting == 2)
        steps.let(3)
        assert len(steps.begun[-1]) == 2 and gone in steps.begun[-1], "both are at work"
        leaver.close()
        until(lambda: noticed(service))
        begun = len(steps.begun)
        steps.let_all()
        assert other.result().json()["usage"]["completion_tokens"] == 20, "the others do not notice"
    assert len(steps.begun) > begun + 5
    assert all(gone not in step for step in steps.begun[begun:]), "the step in progress was the last for who has gone"
    assert service.batcher.status().running == 0


@pytest.mark.parametrize("stream", [True, False])
def test_while_a_long_prompt_is_read(served: tuple[str, Service], steps: Steps, stream: bool) -> None:
    url, service = served
    body = {"prompt": [5 + i % 200 for i in range(6000)], "max_tokens": 5, "cache_prompt": False, "stream": stream}
    leaver = send(url, "/v1/completions", body)
    until(lambda: len(steps.begun) == 1)
    steps.let(3)
    done = service.model.stats()["prefill_tokens"]
    (row,) = service.batcher.status().sequences
    leaver.close()
    until(lambda: noticed(service))
    begun = len(steps.begun)
    steps.let_all()
    until(lambda: service.batcher.status().running == 0)
    assert len(steps.begun) == begun, "of some 90 more chunks none was begun"
    assert service.model.stats()["prefill_tokens"] == done, "and the one in progress was given up between two layers"
    assert row.prefilled_tokens == 3 * CHUNK
