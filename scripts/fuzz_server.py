#!/usr/bin/env python3
"""Sends malformed, huge, deep, truncated and non-UTF-8 requests to a server over raw sockets, and holds it to its word.

No answer may be a 5xx, nothing may leak, and no answer may be left in the making. What leaks shows in what malloc and
Python have given out (`/metrics`): resident memory also counts what is free and kept. The requests
follow from the seed. `scripts/fuzz_server.py STORE` starts a server of its own; `--url` and `--pid` take one that runs.
"""

import argparse
import json
import random
import socket
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.serving import Served

TIMEOUT_S = 60.0
SHORT_S = 2.0  # where the server may well wait for more
WARM_UP = 300
ROUNDS = 10  # memory is looked at between them
GROWTH_BYTES = 48 << 20  # of resident memory, from the warm-up to the end
LEAK_BYTES, LEAK_BLOCKS = 512.0, 1.0  # a request, from the median of the first half to that of the second
CACHED_WORDS = 12_000  # more than a tokenizer's cache of words holds: it is full before memory is looked at
IDLE_S = 15.0  # an idle server has given back by then what is free

USER = {"role": "user", "content": "Hello there"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m", "messages": [USER], "max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 1,
        "n": 1, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
        "logit_bias": {"5": 1}, "tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"},
    },
    "/v1/completions": {"model": "m", "prompt": "Hello", "max_tokens": 1, "logprobs": 1, "echo": False, "n": 1},
    "/v1/responses": {"model": "m", "input": "Hello", "max_output_tokens": 16, "stream": True},
    "/v1/messages": {"model": "m", "messages": [USER], "max_tokens": 1, "stream": True},
    "/v1/messages/count_tokens": {"model": "m", "messages": [USER]},
    "/tokenize": {"content": "Hello"},
    "/detokenize": {"tokens": [5, 6, 7]},
}  # fmt: skip
GETS = ("/", "/health", "/v1/models", "/metrics", "/live", "/openapi.json", "/static/app.js", "/v1/models/x")
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, 0.1, "", "x", "\x00", "\ud83d\ude42",
    "é" * 100, "a" * 10_000, "\u202e", [], {}, [[]], [None], {"": ""}, {"type": "text"}, ["x"] * 100, [0] * 1000,
    "../../etc/passwd", "<|im_end|>", "{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}", "%s%n", "'; drop table",
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"role": "user", "content": [{"type": "file"}]},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a+)+$"}}},
    {"type": "function", "function": {"name": "x"}},
)  # fmt: skip


@dataclass
class Shot:
    """One request as bytes; how it is sent. leave: close before the answer is read."""

    kind: str
    data: bytes
    leave: bool = False
    half_close: bool = False
    pieces: int = 1


@dataclass
class Tally:
    """What came back, by kind and by status."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def http(
    path: str, body: bytes, method: str = "POST", headers: str = "Connection: close\r\n", length: int | None = None
) -> bytes:
    size = len(body) if length is None else length
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n{headers}\r\n"
    return head.encode("latin-1") + body


def mutated(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """`value` with something in it changed."""
    if chance.random() < 0.3 or depth > 4:
        return chance.choice(NASTY)
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = chance.choice(list(changed))
        action = chance.random()
        if action < 0.2:
            del changed[key]
        elif action < 0.35:
            changed[chance.choice(("extra", "", "é", key + "_"))] = chance.choice(NASTY)
        else:
            changed[key] = mutated(chance, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value:
        changed_list = list(value)
        changed_list[chance.randrange(len(changed_list))] = mutated(chance, changed_list[0], depth + 1)
        return changed_list * chance.choice((1, 1, 1, 2, 50))
    return chance.choice(NASTY)


def shots(chance: random.Random) -> Iterator[Shot]:
    """Requests without end."""
    makers: list[tuple[int, Callable[[random.Random], Shot]]] = [
        (40, _mutant), (12, _bytes_in_body), (8, _truncated), (6, _deep), (4, _huge), (8, _bad_http), (6, _bad_chunks),
        (6, _bad_path), (4, _garbage), (6, _vanishing),
    ]  # fmt: skip
    weights = [weight for weight, _ in makers]
    while True:
        maker = chance.choices([maker for _, maker in makers], weights)[0]
        shot = maker(chance)
        shot.kind = maker.__name__.strip("_")
        yield shot


def _path(chance: random.Random) -> str:
    return chance.choice(list(BODIES))


def _mutant(chance: random.Random) -> Shot:
    path = _path(chance)
    body: Any = {**BODIES[path], "stream": chance.random() < 0.5} if "stream" in BODIES[path] else BODIES[path]
    for _ in range(chance.randint(0, 3)):
        body = mutated(chance, body)
    return Shot("", http(path, json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")))


def _bytes_in_body(chance: random.Random) -> Shot:
    body = bytearray(json.dumps(BODIES[path := _path(chance)]).encode())
    for _ in range(chance.randint(1, 8)):
        body[chance.randrange(len(body))] = chance.randrange(256)
    return Shot("", http(path, bytes(body)))


def _truncated(chance: random.Random) -> Shot:
    body = json.dumps(BODIES[path := _path(chance)]).encode()
    cut = body[: chance.randrange(len(body))]
    if chance.random() < 0.5:
        return Shot("", http(path, cut))
    return Shot("", http(path, cut, length=len(body)), half_close=chance.random() < 0.5, leave=True)


def _deep(chance: random.Random) -> Shot:
    levels = chance.choice((60, 70, 500, 1500, 20_000, 300_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    body = b'{"messages":' + opening * levels + b"1" + (closing * levels if chance.random() < 0.5 else b"") + b"}"
    return Shot("", http(_path(chance), body[: 8 << 20]))


def _huge(chance: random.Random) -> Shot:
    size = chance.choice((100_000, 1 << 20, 9 << 20, 20 << 20))
    filler = chance.choice((b"x", b"[],", b"1,", b'"\\u0041",', "é".encode(), b"\x00"))
    body = b'{"model":"m","messages":[{"role":"user","content":"' + filler * (size // len(filler)) + b'"}]}'
    return Shot("", http(_path(chance), body, length=chance.choice((None, None, 10**12, 10))), leave=size > 9 << 20)


def _bad_http(chance: random.Random) -> Shot:
    body = json.dumps(BODIES["/tokenize"]).encode()
    return Shot("", chance.choice((
        http("/tokenize", body, headers="Content-Length: 5\r\n"),
        http("/tokenize", body, headers="Transfer-Encoding: chunked\r\n"),
        http("/tokenize", body, headers="Transfer-Encoding: gzip\r\n"),
        http("/tokenize", body, headers="Content-Encoding: gzip\r\n"),
        http("/tokenize", body, headers="Expect: 100-continue\r\n"),
        http("/tokenize", body, headers="Expect: nonsense\r\n"),
        http("/tokenize", body, headers="Upgrade: websocket\r\nConnection: Upgrade\r\n"),
        http("/tokenize", body, headers="X: " + "y" * 100_000 + "\r\n"),
        http("/tokenize", body, headers="".join(f"X-{i}: y\r\n" for i in range(3000))),
        http("/tokenize", body, headers="Host: evil.example\r\n"),
        http("/tokenize", body, headers="Origin: http://[bad\r\n"),
        http("/tokenize", body, headers="Authorization: Bearer \xff\xfe\r\n"),
        http("/tokenize", body, headers=" folded: line\r\n"),
        http("/tokenize", body, headers="no colon\r\n"),
        http("/tokenize", body, method=chance.choice(("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"))),
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\n\r\n" + body,
        b"POST /tokenize HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        http("/tokenize", body, headers="") * 5,
    )))  # fmt: skip


def _bad_chunks(chance: random.Random) -> Shot:
    head = f"POST {_path(chance)} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = json.dumps(BODIES["/tokenize"]).encode()
    good = b"%x\r\n%s\r\n" % (len(body), body)
    return Shot("", head + chance.choice((
        good + b"0\r\n\r\n", good + b"0\r\nTrailer: x\r\n\r\n", b"zz\r\n" + body, b"ffffffffffffffff\r\n" + body,
        b"-1\r\n" + body, b"5;" + b"x" * 10_000 + b"\r\n", b"1\r\nab\r\n0\r\n\r\n", b"1\r\n{\r\n" * 3000 + b"0\r\n\r\n",
        b"0\r\n\r\n", good[:-3],
    )), half_close=chance.random() < 0.3)  # fmt: skip


def _bad_path(chance: random.Random) -> Shot:
    path = chance.choice((
        "/../../etc/passwd", "/static/..%2f..%2fetc%2fpasswd", "/static/%00", "/static/%ff", "/v1/models/%2e%2e%2f",
        "/%", "/v1/models/" + "x" * 5000, "/v1//models", "//evil.example/", "*", "http://evil.example/",
        "/live?x=" + "y" * 9000, "/v1/chat/completions/", "/static/", "/docs", "/v1/models/%F0%9F%99%82", *GETS,
    ))  # fmt: skip
    return Shot("", f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())


def _garbage(chance: random.Random) -> Shot:
    return Shot("", chance.randbytes(chance.choice((1, 10, 1000, 100_000))), half_close=chance.random() < 0.5)


def _vanishing(chance: random.Random) -> Shot:
    path = chance.choice(("/v1/chat/completions", "/v1/completions"))
    body = BODIES[path] | {"max_tokens": 400, "ignore_eos": True, "stream": chance.random() < 0.7}
    body.pop("stream_options", None)
    return Shot("", http(path, json.dumps(body).encode()), leave=True)


def fire(address: tuple[str, int], shot: Shot, tally: Tally) -> None:
    """Send one and look at the answer's first line."""
    started, answer, timed_out = time.monotonic(), b"", False
    try:
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S if not _may_wait(shot) else SHORT_S)
            connection.sendall(shot.data)
            if shot.half_close:
                connection.shutdown(socket.SHUT_WR)
            if shot.leave:
                connection.settimeout(0.05)
            answer = connection.recv(4096)
            if not shot.leave:
                # Whatever else comes; an answer that stays open ends by its keep-alive, so not all is waited for.
                connection.settimeout(0.2)
                while more := connection.recv(1 << 16):
                    answer = (answer + more)[: 1 << 16]
    except TimeoutError:
        timed_out = not answer and not shot.leave and not _may_wait(shot)
    except OSError:
        pass  # the server may close on what it does not understand
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - started)
    status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/") else "timeout" if timed_out else "closed"
    tally.statuses[status] += 1
    tally.kinds[f"{shot.kind} {status}"] += 1
    if status.startswith("5") or timed_out or b"Traceback" in answer:
        tally.bad.append(f"{shot.kind}: {status}: {shot.data[:600]!r} -> {answer[:300]!r}")


def _may_wait(shot: Shot) -> bool:
    """Whether the server may wait for more than it was sent."""
    return shot.kind in ("garbage", "bad_http", "bad_chunks", "truncated", "huge")


def settle(url: str, timeout_s: float = 60) -> list[dict[str, Any]]:
    """The models' health when nothing runs any more, or at the end of time."""
    deadline = time.monotonic() + timeout_s
    while True:
        models: list[dict[str, Any]] = json.load(urllib.request.urlopen(f"{url}/health", timeout=30))["models"]
        if all(model["running"] == model["waiting"] == 0 for model in models) or time.monotonic() > deadline:
            return models
        time.sleep(0.05)


@dataclass(frozen=True)
class Memory:
    """Of the server, at one moment."""

    resident_bytes: int
    allocated_bytes: int
    python_blocks: int


def memory(url: str, pid: int) -> Memory:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("stoker_process_")]
    told = {line[0]: int(float(line[1])) for line in lines}
    resident = psutil.Process(pid).memory_info().rss
    return Memory(resident, told.get("stoker_process_allocated_bytes", 0), told["stoker_process_python_blocks"])


def fill_caches(url: str) -> None:
    """What is bounded and fills slowly is filled first, so that it is not taken for a leak."""
    chance = random.Random(0)
    for _ in range(CACHED_WORDS // 500):
        words = " ".join(f"{chance.randrange(36**6):x}" for _ in range(500))
        request = urllib.request.Request(f"{url}/tokenize", json.dumps({"content": words}).encode())
        urllib.request.urlopen(request, timeout=60).read()


def fuzz(
    url: str, pid: int, requests: int, seed: int = 0, workers: int = 8, idle_s: float = 0
) -> tuple[Tally, list[Memory], list[dict[str, Any]]]:
    """Fire; (what came back, memory after the warm-up and after each of ROUNDS, health at the end).
    idle_s: how long the server rests before its memory is looked at."""
    host, port = url.removeprefix("http://").split(":")
    tally, seen = Tally(), list[Memory]()
    source = shots(random.Random(seed))
    fill_caches(url)
    with ThreadPoolExecutor(workers) as pool:
        for count in (min(WARM_UP, requests), *[max(0, requests - WARM_UP) // ROUNDS] * ROUNDS):
            batch = [next(source) for _ in range(count)]
            list(pool.map(lambda shot: fire((host, int(port)), shot, tally), batch))
            health = settle(url)
            time.sleep(idle_s)
            seen.append(memory(url, pid))
    if growth(seen) > GROWTH_BYTES:
        time.sleep(IDLE_S)
        seen[-1] = memory(url, pid)
    return tally, seen, health


def growth(seen: list[Memory]) -> int:
    """Bytes by which resident memory grew after the warm-up."""
    return seen[-1].resident_bytes - seen[0].resident_bytes


def leak(values: list[int], requests: int) -> float:
    """By how much a figure grows with each of `requests`: from the median of its first half to that of its second.
    The first value, after the warm-up, is left out."""
    half = (len(values) - 1) // 2
    between = (len(values) - 1 - half) * requests / (len(values) - 1)
    return (statistics.median(values[-half:]) - statistics.median(values[1 : half + 1])) / between


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", nargs="?")
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args()
    server = None
    if given.url is None:
        # So little KV that all of it is in use after the warm-up: kept prefixes take it bit by bit, as the ledger says.
        server = Served(given.store, "--memory", "2GiB", "--ctx-size", 1024, "--kv-tokens", 1024)
        given.url, given.pid = server.url, server.pid
    started = time.monotonic()
    tally, seen, health = fuzz(given.url, given.pid, given.requests, given.seed, given.workers, IDLE_S)
    for kind, count in sorted(tally.kinds.items()):
        print(f"{count:6}  {kind}")
    print(f"{given.requests} requests in {time.monotonic() - started:.0f} s, slowest {tally.slowest_s:.1f} s")
    leaks = [
        leak([getattr(each, name) for each in seen], given.requests) for name in ("allocated_bytes", "python_blocks")
    ]
    print(
        f"resident MiB after {WARM_UP} and then by tenths: {[round(each.resident_bytes / 2**20, 1) for each in seen]}"
    )
    print(f"allocated MiB: {[round(each.allocated_bytes / 2**20, 2) for each in seen]}")
    print(f"Python blocks: {[each.python_blocks for each in seen]}")
    print(
        f"resident {growth(seen) / 2**20:+.1f} MiB; a request {leaks[0]:+.0f} bytes allocated, {leaks[1]:+.2f} blocks"
    )
    print(f"at the end: {health}")
    for bad in tally.bad[:20]:
        print("BAD", bad)
    if server is not None:
        print("exit code", server.stop())
    stuck = any(model["running"] or model["waiting"] for model in health)
    grown = growth(seen) > GROWTH_BYTES or leaks[0] > LEAK_BYTES or leaks[1] > LEAK_BLOCKS
    return int(bool(tally.bad) or grown or stuck)


if __name__ == "__main__":
    sys.exit(main())
