"""How requests, connections and the server end: clients that vanish, read slowly, idle or lie; signals; ports."""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from typer.testing import CliRunner

from stoker.cli.main import build_app
from stoker.generate.prefix import check_size
from stoker.generate.prefix.disk import borrow, give_back
from stoker.generate.price import price
from stoker.runtime.budget import parse_bytes
from stoker.server import wire
from tests.server.running import PATIENCE_S, Server, http

KEY = "a key: geheim-ü"
BUDGET = ("--memory", "1GiB", "--ctx-size", 16_384)


def headers(**more: str) -> dict[str, Any]:
    return {"Authorization": f"Bearer {KEY}".encode(), **more}


def long_answer(**more: Any) -> dict[str, Any]:
    """A prompt whose answer takes seconds."""
    messages = [{"role": "user", "content": "Count."}]
    return {"model": "x", "messages": messages, "max_tokens": 8000, "ignore_eos": True, **more}


def running(server: Server) -> tuple[int, int]:
    (model,) = http.get(f"{server.url}/health").json()["models"]
    return model["running"], model["waiting"]


def wait_until(server: Server, wanted: tuple[int, int]) -> None:
    """Until so many run and wait."""
    started = time.monotonic()
    while (now := running(server)) != wanted:
        assert time.monotonic() - started < PATIENCE_S, f"{now} run and wait, not {wanted}"
        time.sleep(0.01)


def raw(server: Server, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """A connection on which a request was sent and nothing read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.fixture(scope="module")
def server(long_store: Path) -> Iterator[Server]:
    options = (*BUDGET, "--kv-tokens", 40_000, "--parallel", 2, "--queue", 4, "--strict-model", "--alias", "x")
    with Server(long_store, *options, "--cors", "https://app.example", STOKER_API_KEY=KEY) as started:
        yield started


def test_a_client_that_vanishes_frees_its_place_within_a_step(server: Server) -> None:
    for body in (long_answer(stream=True), long_answer(), long_answer(n=2)):
        connection = raw(server, body)
        wait_until(server, (body.get("n", 1), 0))
        connection.close()
        wait_until(server, (0, 0))
    server.wait_for_line("cancelled", times=4)


def test_who_waits_may_vanish_too(server: Server) -> None:
    connections = [raw(server, long_answer(stream=True)) for _ in range(2)]
    wait_until(server, (2, 0))
    waiting = [raw(server, long_answer()) for _ in range(3)]
    wait_until(server, (2, 3))
    for connection in waiting:
        connection.close()
    wait_until(server, (2, 0))
    for connection in connections:
        connection.close()
    wait_until(server, (0, 0))


def test_slow_readers_and_idle_connections_disturb_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    slow = raw(server, long_answer(stream=True, logprobs=True, top_logprobs=20, max_tokens=1000))
    with httpx.Client(timeout=PATIENCE_S) as client:
        answer = client.post(
            f"{server.url}/v1/chat/completions", headers=headers(), json=long_answer(max_tokens=20)
        ).json()
        assert answer["usage"]["completion_tokens"] == 20
    wait_until(server, (0, 0))
    # Everything was kept for the one who reads late.
    slow.settimeout(PATIENCE_S)
    data = b""
    while b"[DONE]" not in data:
        data += slow.recv(1 << 16)
    assert data.count(b'"logprob":') == 1000 * 21 and len(data) > 1 << 20
    slow.close()
    for connection in idle:
        connection.close()


def test_bodies_that_are_too_large_or_never_end(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    big = b'{"model": "x", "messages": [], "user": "' + b"x" * (9 << 20) + b'"}'
    rss = server.rss_bytes
    for body in (big, iter([big])):
        refused = http.post(url, headers=headers(), content=body)  # type: ignore[arg-type]
        assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"
    with httpx.Client(timeout=PATIENCE_S) as client:  # one connection
        for _ in range(3):
            assert client.post(url, headers=headers(), content=b"{").status_code == 400
            assert client.get(f"{server.url}/health").status_code == 200
    lying = raw(server, {})
    lying.close()
    host, port = server.url.removeprefix("http://").split(":")
    half = socket.create_connection((host, int(port)))
    half.sendall(f"POST {url} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode())
    half.sendall(b"Content-Length: 100\r\n\r\n{")
    half.close()
    assert server.rss_bytes - rss < 64 << 20
    assert running(server) == (0, 0)


def test_keys_origins_and_names(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    body = long_answer(max_tokens=1)
    assert http.get(f"{server.url}/v1/models").status_code == 401
    refused = http.post(url, json=body, headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    message = http.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert message.status_code == 401 and message.json()["error"]["type"] == "authentication_error"
    assert message.json()["type"] == "error"
    rebound = http.post(url, json=body, headers=headers(Host="evil.example"))
    assert rebound.status_code == 403 and rebound.json()["error"]["code"] == "foreign_host"
    foreign = http.post(url, json=body, headers=headers(Origin="https://evil.example"))
    assert foreign.status_code == 403 and "access-control-allow-origin" not in foreign.headers
    named = http.post(url, json=body, headers=headers(Origin="https://app.example"))
    assert named.status_code == 200 and named.headers["access-control-allow-origin"] == "https://app.example"
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    preflight = http.options(url, headers=ask)
    assert preflight.status_code == 204 and "POST" in preflight.headers["access-control-allow-methods"]
    evil = http.options(url, headers=ask | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in evil.headers
    unknown = http.post(url, json=body | {"model": "gpt-4"}, headers=headers())
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    unnamed = http.post(url, json={k: v for k, v in body.items() if k != "model"}, headers=headers())
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"
    assert KEY not in server.log


def test_a_signal_lets_running_answers_finish(long_store: Path) -> None:
    with Server(long_store, *BUDGET, "--parallel", 1, "--queue", 4) as started:
        url = f"{started.url}/v1/chat/completions"
        with (
            ThreadPoolExecutor() as pool,
            http.stream("POST", url, json=long_answer(stream=True, max_tokens=1500)) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            waiting = pool.submit(http.post, url, json=long_answer())
            wait_until(started, (1, 1))
            started.signal(signal.SIGTERM)
            refused = waiting.result()
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_closing"
            late = http.post(url, json=long_answer())
            assert late.status_code == 503 and http.get(f"{started.url}/health").json()["status"] == "closing"
            text = "\n".join(lines)
        assert text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text
        assert started.wait() == 0, started.log
        assert "1 running answer may finish" in started.log and "Traceback" not in started.log


def test_a_second_signal_ends_it_now(long_store: Path) -> None:
    with Server(long_store, *BUDGET) as started:
        body = long_answer(stream=True)
        with http.stream("POST", f"{started.url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            started.signal(signal.SIGINT)
            started.wait_for_line("stopping:")
            started.signal(signal.SIGINT)  # as `timeout` and terminals send it twice: one request to end
            time.sleep(wire.SAME_SIGNAL_S + 0.1)
            assert "stopping now" not in started.log
            began = time.monotonic()
            started.signal(signal.SIGINT)
            try:
                text = "\n".join(lines)
            except httpx.RemoteProtocolError:  # the step in progress took longer than "now" allows
                text = "server_closing"
        assert "server_closing" in text and "[DONE]" not in text, "the client is told"
        assert started.wait() == 0 and time.monotonic() - began < PATIENCE_S, started.log
        assert "refused" not in started.log and "answer failed" not in started.log
        assert (
            "server_closing" not in started.log or started.log.count("cut off after its beginning: server_closing") == 1
        )


@mock.patch("stoker.server.loading.load")
def test_what_is_wrong_before_a_model_is_loaded(loading: mock.Mock, tiny_store: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        done = CliRunner().invoke(build_app(), ["serve", *map(str, arguments)])
        assert done.exit_code in (1, 2) and done.stdout == "", done.output
        return done.stderr

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in refused(tiny_store, "--port", port) and "--port" in refused(tiny_store, "--port", port)
    assert "two models" in refused(tiny_store, tiny_store, "--port", 0)
    assert "no such store" in refused(tmp_path / "nothing", "--port", 0)
    for more in ((), ("--keep-alive", 1)):
        assert "stoker pack SRC DST" in refused(tmp_path, *more, "--port", 0)
    assert "--temperature: out of range" in refused(tiny_store, "--temperature", -1, "--port", 0)
    loading.side_effect = AssertionError("a model is loaded")
    taken_by_a_file = refused(tiny_store, "--prefix-cache", "/dev/null", "--port", 0)
    assert "not a directory" in taken_by_a_file and "--prefix-cache /dev/null" in taken_by_a_file
    kept = tmp_path / "kept"
    tight = refused(tiny_store, "--prefix-cache", kept, "--prefix-cache-size", "1KiB", "--port", 0)
    assert "not one block" in tight and "got:      1KiB" in tight and not kept.exists()
    least = re.search(r"at least (\d+KiB)", tight)
    assert least is not None
    check_size(parse_bytes(least[1]), price(tiny_store).block_bytes, "tiny")
    used = borrow(kept, 1 << 30)
    try:
        with mock.patch("stoker.generate.prefix.disk._open", {}):
            for more in ((), ("--keep-alive", 1)):
                assert "another process" in refused(tiny_store, *more, "--prefix-cache", kept, "--port", 0)
    finally:
        give_back(used)
    assert "--prefix-cache DIR" in refused(tiny_store, "--prefix-cache-size", "1GiB", "--port", 0)
    assert "without --keep-alive" in refused(tiny_store, "--trace", tmp_path / "t", "--keep-alive", 1, "--port", 0)
    assert "not an origin" in refused(tiny_store, "--cors", "example.org", "--port", 0)
    assert "--host" in refused(tiny_store, "--host", "203.0.113.7", "--port", 0)
