"""Streams of events: signs of life where nothing comes, errors as last events, an end when the reader leaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stoker.errors import Closing, StokerError
from stoker.server.guard import Guard
from stoker.server.held import held
from stoker.server.settings import Settings
from stoker.server.sse import EventStream, data


class Client:
    """An ASGI client: what was sent to it, and a moment at which it leaves."""

    def __init__(self, body: bytes = b"") -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self) -> Any:
        if self._requests:
            return self._requests.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def scope(path: str, body: bytes = b"") -> dict[str, Any]:
    headers = [(b"content-length", str(len(body)).encode())] if body else []
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


async def sent(stream: EventStream, path: str = "/v1/chat/completions") -> Client:
    client = Client()
    await stream(scope(path), client.receive, client.send)
    return client


def test_chunks_in_order_and_signs_of_life_between() -> None:
    async def chunks(client: Client) -> AsyncIterator[bytes]:
        yield data({"n": 1})
        while client.body.count(b": keep-alive") < 3:
            await asyncio.sleep(0.005)
        yield data({"n": 2, "text": "ü\n"}, "named")

    async def scenario() -> None:
        client = Client()
        await EventStream(chunks(client), every_s=0.04)(scope("/v1/chat/completions"), client.receive, client.send)
        head, *_, last = client.sent
        names = dict(head["headers"])
        assert head["status"] == 200 and names[b"content-type"].startswith(b"text/event-stream")
        assert names[b"cache-control"] == b"no-cache" and b"content-length" not in names
        first, *between, second, end = client.body.split(b"\n\n")
        assert first == b'data: {"n":1}' and second == 'event: named\ndata: {"n":2,"text":"ü\\n"}'.encode()
        assert len(between) >= 3 and set(between) == {b": keep-alive"} and end == b""
        assert last == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "path", "event", "message"),
    [
        (Closing("the end"), "/v1/chat/completions", b"data: ", "the end"),
        (Closing("the end"), "/v1/messages", b"event: error\ndata: ", "the end"),
        (ValueError("secret"), "/v1/completions", b"data: ", "the server failed"),
        (StokerError("broken", where="/home/me/model"), "/v1/completions", b"data: ", "broken"),
    ],
)
def test_an_error_is_the_last_event(error: Exception, path: str, event: bytes, message: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield data(1)
        raise error

    async def scenario() -> None:
        client = await sent(EventStream(chunks()), path)
        last = client.body.split(b"\n\n")[1]
        assert last.startswith(event)
        told = json.loads(last.removeprefix(event))
        assert message in told["error"]["message"] and "/home" not in str(told) and "secret" not in str(told)

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_client_that_leaves_ends_everything(body: bytes) -> None:
    ended: list[str] = []

    async def chunks() -> AsyncIterator[bytes]:
        try:
            yield data(1)
            await asyncio.sleep(60)
        finally:
            ended.append("chunks")

    async def note(name: str) -> None:
        ended.append(name)

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        held().add(lambda: note("model"))
        held().add(lambda: note("body"), until_answer=True)
        while body and (await receive())["more_body"]:
            pass
        await EventStream(chunks())(scope, receive, send)

    async def working(scope: Any, receive: Any, send: Any) -> None:
        held().add(lambda: note("model"))
        held().add(lambda: note("body"), until_answer=True)
        while body and (await receive())["more_body"]:
            pass
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("chunks")

    async def scenario(app: Any, order: list[str]) -> None:
        ended.clear()
        client = Client(body)
        request = asyncio.create_task(Guard(app, Settings())(scope("/v1/x", body), client.receive, client.send))
        await asyncio.sleep(0.05)
        assert not request.done()
        client.left.set()
        await asyncio.wait_for(request, 60)
        assert ended == order

    asyncio.run(scenario(streaming, ["body", "chunks", "model"]))
    asyncio.run(scenario(working, ["chunks", "body", "model"]))


def test_what_fails_outside_of_every_rule_is_a_500_without_its_words() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("secret")

    async def scenario() -> None:
        for path, kind in (("/v1/messages", "api_error"), ("/v1/completions", "server_error")):
            client = Client()
            await Guard(failing, Settings())(scope(path), client.receive, client.send)
            assert client.sent[0]["status"] == 500 and b"secret" not in client.body
            assert json.loads(client.body)["error"]["type"] == kind

    asyncio.run(scenario())
