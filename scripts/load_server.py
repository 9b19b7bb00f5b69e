#!/usr/bin/env python3
"""An hour of mixed load on a real server, then kill -9, and the same questions to its successor.

Every API, streamed and not, tools, schemas, conversations, long prompts; clients that vanish, read slowly, idle, send
rubbish or come all at once.

    scripts/load_server.py STORE [--minutes 60] [--memory 1GiB] [--clients 8] [--result FILE.json]

Held to: every request answered or refused in its API's shape, no 5xx, the same greedy answer at all times, memory flat
and within the budget, no expert dropped, nothing left running or held at the end, and a prefix cache on disk that is
intact or cleanly discarded after the kill. That all of it is stopped for a while does no harm (load_watch.Clock);
SIGTERM ends the load early, and the result says how long it was.
"""

import argparse
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts import load_clients as asks
from scripts.fuzz_server import Tally, fire, shots
from scripts.load_clients import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Ask, Outcome
from scripts.load_watch import Clock, Sample, Watch, by_minute, verdicts
from scripts.serving import Served

PARALLEL, QUEUE = 4, 8
BURST = PARALLEL + QUEUE + 12
CONTEXT, KV_TOKENS = 1024, 3072
STUCK_S = 240.0  # of the clock, without a token computed while something runs
SHOWN = 20  # bad outcomes that the result names
KINDS = {
    "plain": 30, "conversation": 12, "tools": 10, "schema": 10, "reference": 6, "long_prompt": 5, "too_long": 2,
    "vanishing": 8, "slow_reader": 4, "idle": 2, "rubbish": 6, "looks": 6, "burst": 2, "choices": 3,
}  # fmt: skip
REFERENCES = (
    asks.ask(CHAT, [{"role": "user", "content": "Why is the sky blue?"}], 24, False, temperature=0),
    asks.ask(COMPLETIONS, [{"role": "user", "content": "The river was quiet and"}], 24, True, temperature=0),
    asks.ask(MESSAGES, [{"role": "user", "content": "Name three colours. " * 20}], 24, True, temperature=0),
    asks.with_tools(
        asks.ask(RESPONSES, [{"role": "user", "content": "Weather in Oslo?"}], 24, False, temperature=0),
        [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}], True,
    ),
)  # fmt: skip


class Load:
    """Clients of one server, and what became of their requests. kinds: methods that make one request, and how often."""

    def __init__(self, url: str, clock: Clock, kinds: dict[str, int]) -> None:
        self.url, self.clock, self.kinds = url, clock, kinds
        self.verdicts: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.bad: list[str] = []
        self.expected: list[str] = []
        self.slowest_s = 0.0
        self.enough = threading.Event()
        self._lock = threading.Lock()
        self._client = self.open()
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))

    def open(self) -> httpx.Client:
        """A client without time limits of its own (main sees what is stuck) and a connection for every request, since
        one that is kept may be closed by the server at the moment of its use."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, timeout=None, limits=limits)

    def run(self, seed: int, until_s: float) -> None:
        """One client: requests one after the other, until the clock says so."""
        chance = random.Random(seed)
        while self.clock.now_s < until_s and len(self.bad) < 100 and not self.enough.is_set():
            (name,) = chance.choices(list(self.kinds), list(self.kinds.values()))
            try:
                getattr(self, name)(chance)
            except Exception as error:
                self.count(name, Outcome("bad", detail=repr(error)[:300]))

    def count(self, kind: str, outcome: Outcome) -> None:
        with self._lock:
            self.verdicts[f"{kind} {outcome.verdict}"] += 1
            self.statuses[outcome.status] += 1
            if outcome.verdict == "bad":
                self.bad.append(f"{kind}: {outcome.status} {outcome.detail}")

    def send(self, kind: str, request: Ask) -> Outcome:
        """One request, counted; who is told to come back later waits a little."""
        began_s = self.clock.now_s
        outcome = asks.send(self._client, request)
        self.slowest_s = max(self.slowest_s, self.clock.now_s - began_s)
        self.count(kind, outcome)
        if outcome.retry_after_s:
            self.sleep(min(outcome.retry_after_s, 2.0))
        return outcome

    def sleep(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            time.sleep(0.05)

    # ---- kinds of requests ------------------------------------------------------------------------------------------

    def plain(self, chance: random.Random) -> None:
        path, text = chance.choice(APIS), asks.sentence(chance, chance.randint(3, 60))
        more = {"temperature": chance.choice((0, 0, 0.7, 1.0)), "top_p": chance.choice((1.0, 0.9))}
        messages = [{"role": "user", "content": text}]
        self.send("plain", asks.ask(path, messages, chance.choice((1, 8, 16, 32)), chance.random() < 0.5, **more))

    def choices(self, chance: random.Random) -> None:
        request = asks.ask(CHAT, [{"role": "user", "content": asks.sentence(chance, 9)}], 12, False, temperature=0.8)
        request.body.update(n=3, logprobs=True, top_logprobs=5, stop=["zzz"], seed=chance.randrange(1000))
        self.send("choices", request)

    def conversation(self, chance: random.Random) -> None:
        path, messages = chance.choice((CHAT, MESSAGES, RESPONSES)), list[dict[str, str]]()
        for _ in range(chance.randint(2, 4)):
            messages.append({"role": "user", "content": asks.sentence(chance, chance.randint(5, 40))})
            outcome = self.send("conversation", asks.ask(path, messages, 16, chance.random() < 0.5, temperature=0))
            if outcome.verdict != "answered":
                return
            messages.append({"role": "assistant", "content": outcome.text or "."})
        if chance.random() < 0.5:  # an edit in the middle
            messages[0] = {"role": "user", "content": asks.sentence(chance, 8)}
            self.send("conversation", asks.ask(path, messages[:-1], 16, True, temperature=0))

    def tools(self, chance: random.Random) -> None:
        path = chance.choice((CHAT, MESSAGES, RESPONSES))
        request = asks.ask(path, [{"role": "user", "content": asks.sentence(chance, 8)}], 32, chance.random() < 0.5)
        tools = asks.functions(chance, chance.randint(1, 3))
        self.send("tools", asks.with_tools(request, tools, forced=chance.random() < 0.7))

    def schema(self, chance: random.Random) -> None:
        path = chance.choice((CHAT, MESSAGES, RESPONSES))
        request = asks.ask(path, [{"role": "user", "content": "An answer in JSON, please."}], 32, chance.random() < 0.5)
        self.send("schema", asks.with_schema(request, asks.schema(chance, chance.choice((5, 5, 5, 100)))))

    def reference(self, chance: random.Random) -> None:
        """A question whose answer is known: it must not depend on what else runs."""
        index = chance.randrange(len(REFERENCES))
        outcome = self.send("reference", REFERENCES[index])
        if outcome.verdict == "answered" and outcome.text != self.expected[index]:
            detail = f"another answer: {outcome.text!r}, not {self.expected[index]!r}"
            self.count("reference", Outcome("bad", "200", detail=detail))

    def long_prompt(self, chance: random.Random) -> None:
        text = asks.sentence(chance, chance.randint(CONTEXT // 4, CONTEXT // 2))
        messages = [{"role": "user", "content": text}]
        self.send("long_prompt", asks.ask(chance.choice(APIS), messages, 8, chance.random() < 0.5, temperature=0))

    def too_long(self, chance: random.Random) -> None:
        messages = [{"role": "user", "content": asks.sentence(chance, 2 * CONTEXT)}]
        outcome = asks.send(self._client, asks.ask(chance.choice(APIS), messages, 8, chance.random() < 0.5))
        if outcome.status != "400":
            outcome = Outcome("bad", outcome.status, detail="a prompt longer than the context was taken")
        self.count("too_long", outcome)

    def vanishing(self, chance: random.Random) -> None:
        """A client that leaves before the answer, in it, or without waiting for one that comes whole."""
        stream, words = chance.random() < 0.7, chance.choice((5, 5, CONTEXT // 3))
        messages = [{"role": "user", "content": asks.sentence(chance, words)}]
        request = asks.ask(chance.choice(APIS), messages, 400, stream)
        with self.open() as client:
            if stream and chance.random() < 0.6:
                with client.stream("POST", request.path, json=request.body) as answer:
                    if answer.status_code != 200:
                        answer.read()
                        self.count("vanishing", asks.refusal(answer))
                        return
                    for _, _ in zip(range(chance.randint(1, 30)), answer.iter_lines(), strict=False):
                        pass
            else:
                head = client.build_request("POST", request.path, json=request.body)
                with socket.create_connection(self._address) as connection:
                    connection.sendall(_as_bytes(head))
                    self.sleep(chance.random())
        self.count("vanishing", Outcome("left"))

    def slow_reader(self, chance: random.Random) -> None:
        request = asks.ask(CHAT, [{"role": "user", "content": asks.sentence(chance, 5)}], 48, True, temperature=0)
        request.body.update(logprobs=True, top_logprobs=20, ignore_eos=True)
        with self._client.stream("POST", request.path, json=request.body) as answer:
            if answer.status_code != 200:
                answer.read()
                self.count("slow_reader", asks.refusal(answer))
                return
            text = bytearray()
            for chunk in answer.iter_raw():
                text += chunk
                self.sleep(0.2)
        told = text.count(b'"logprob":')
        whole = b"[DONE]" in text and told > 40 * 21  # tokens that end an answer are not told
        detail = "" if whole else f"{len(text)} bytes, {told} logprobs"
        self.count("slow_reader", Outcome("answered" if whole else "bad", "200", detail=detail))

    def idle(self, chance: random.Random) -> None:
        connections = [socket.create_connection(self._address) for _ in range(25)]
        for connection in connections[:10]:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        self.sleep(3.0)
        for connection in connections:
            connection.close()
        self.count("idle", Outcome("left"))

    def rubbish(self, chance: random.Random) -> None:
        """Malformed requests, as scripts/fuzz_server.py makes them. A time-out while all stood still is no fault."""
        source = shots(chance)
        for _ in range(5):
            tally, stops = Tally(), self.clock.stops
            fire(self._address, next(source), tally)
            bad = [each for each in tally.bad if stops == self.clock.stops or ": timeout: " not in each]
            (status,) = tally.statuses
            self.count("rubbish", Outcome("bad" if bad else "refused", status, detail="".join(bad)[:500]))

    def looks(self, chance: random.Random) -> None:
        for path in ("/", "/v1/models", "/health", "/metrics", "/live", "/openapi.json"):
            answer = self._client.get(path)
            outcome = Outcome("answered", "200") if answer.status_code == 200 else asks.refusal(answer)
            self.count("looks", outcome)
        answer = self._client.post("/tokenize", json={"content": asks.sentence(chance, 50)})
        back = self._client.post("/detokenize", json={"tokens": answer.json()["tokens"]})
        self.count("looks", Outcome("answered" if back.status_code == 200 else "bad", str(back.status_code)))

    def burst(self, chance: random.Random) -> None:
        """More at once than the queue holds: some are refused, the others answered."""
        messages = [{"role": "user", "content": asks.sentence(chance, 4)}]

        def one(index: int) -> None:
            try:
                self.count("burst", asks.send(self._client, asks.ask(APIS[index % 4], messages, 4, index % 2 == 0)))
            except Exception as error:
                self.count("burst", Outcome("bad", detail=repr(error)[:300]))

        threads = [threading.Thread(target=one, args=(index,)) for index in range(BURST)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _as_bytes(request: httpx.Request) -> bytes:
    first = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1"
    lines = [first, *(f"{name}: {value}" for name, value in request.headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + request.content


# ---- the course of it


def references(url: str) -> list[Outcome]:
    """The questions whose answers are known, one after the other."""
    with httpx.Client(base_url=url, timeout=None) as client:
        return [asks.send(client, request) for request in REFERENCES]


def under_load(load: Load, watch: Watch, minutes: float, clients: int) -> str:
    """Let all clients work for so long, or until SIGTERM; why they were stuck, or nothing."""
    signal.signal(signal.SIGTERM, lambda number, frame: load.enough.set())
    until_s = load.clock.now_s + 60 * minutes
    threads = [threading.Thread(target=load.run, args=(seed, until_s), daemon=True) for seed in range(clients)]
    for thread in threads:
        thread.start()
    moved_s, tokens, told_s = load.clock.now_s, -1, 0.0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        last = watch.rows[-1] if watch.rows else None
        if last is not None and (last.tokens != tokens or last.running + last.waiting == 0):
            moved_s, tokens = load.clock.now_s, last.tokens
        if watch.failure or load.clock.now_s - moved_s > STUCK_S:
            return watch.failure or f"nothing has moved for {STUCK_S:.0f} s: {last}"
        if last is not None and load.clock.now_s - told_s > 60:
            told_s = load.clock.now_s
            print(f"{told_s / 60:5.1f} min, {load.verdicts.total()} requests, {len(load.bad)} bad, {last}", flush=True)
    return ""


def settled(watch: Watch, clock: Clock) -> Sample:
    """The server when nothing runs any more, or after a minute."""
    until_s = clock.now_s + 60
    while (now := watch.look()).running + now.waiting and clock.now_s < until_s:
        time.sleep(0.2)
    return now


def whole_context(url: str) -> Outcome:
    """A prompt and an answer that take all of the context: there is room for it again."""
    tokens = httpx.post(f"{url}/tokenize", json={"content": "river stone " * CONTEXT}, timeout=None).json()["tokens"]
    body = {"prompt": tokens[: CONTEXT * 3 // 4], "max_tokens": CONTEXT, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=None)
    if answer.status_code != 200:
        return Outcome("bad", str(answer.status_code), detail=answer.text[:300])
    full = answer.json()["usage"]["total_tokens"] >= CONTEXT
    return Outcome("answered" if full else "bad", "200", detail=str(answer.json()["usage"]))


def killed(server: Served, load: Load) -> None:
    """kill -9 in the middle of work."""
    requests = [asks.ask(CHAT, [{"role": "user", "content": f"{i} " + "river " * 200}], 200, True) for i in range(4)]

    def one(request: Ask) -> None:
        with suppress(httpx.HTTPError):  # as it must be
            asks.send(load.open(), request)

    threads = [threading.Thread(target=one, args=(request,), daemon=True) for request in requests]
    for thread in threads:
        thread.start()
    load.sleep(3.0)
    server.kill()
    for thread in threads:
        thread.join(60)


def after_the_kill(server: Served, expected: list[str]) -> dict[str, Any]:
    """What the next server has of the cache, and whether it answers alike."""
    texts = [outcome.text for outcome in references(server.url)]
    (model,) = httpx.get(f"{server.url}/live", timeout=None).json()["models"].values()
    prefix = model["prefix"]
    kept = prefix["disk_hit_tokens"] > 0
    return {
        "ok": texts == expected and (kept or prefix["discarded"] > 0 or prefix["disk_bytes"] == 0),
        "same answers": texts == expected, "prefix": prefix,
    }  # fmt: skip


def hold(store: str, minutes: float, clients: int, memory: str, kinds: dict[str, int]) -> dict[str, Any]:
    """The whole course; the result, with a verdict for every promise under `checks`."""
    from stoker.runtime.budget import parse_bytes

    clock, directory = Clock(), Path(tempfile.mkdtemp(prefix="stoker-load-"))
    options = [
        store, "--memory", memory, "--parallel", PARALLEL, "--queue", QUEUE, "--ctx-size", CONTEXT,
        "--kv-tokens", KV_TOKENS, "--prefix-cache", directory, "--prefix-cache-size", "192MiB",
    ]  # fmt: skip
    server = Served(*options)
    try:
        load, watch = Load(server.url, clock, kinds), Watch(server.url, server.pid, clock)
        first = references(server.url)
        load.expected = [outcome.text for outcome in first]
        files_before, began_s = settled(watch, clock).files, clock.now_s
        failure = under_load(load, watch, minutes, clients)
        loaded_min = (clock.now_s - began_s) / 60
        end = settled(watch, clock)
        full = whole_context(server.url) if not failure else Outcome("bad", detail=failure)
        watch.close()
        peak_bytes = watch.peak_bytes()
        killed(server, load)
        errors = server.log.count("Traceback")
        server = Served(*options)
        checks = verdicts(watch.rows, parse_bytes(memory, option="--memory"), peak_bytes) | {
            "every request answered or refused": {"ok": not load.bad and not failure, "bad": load.bad[:SHOWN]},
            "came to its end": {"ok": not failure, "why not": failure},
            "bursts were refused in part": {
                "ok": load.statuses["429"] > 0 or "burst" not in kinds, "429": load.statuses["429"],
            },
            "nothing runs or is held": {
                "ok": end.running == end.waiting == 0 and end.held_tokens <= end.cached_tokens
                and full.verdict == "answered" and end.files <= files_before + 4,
                "end": vars(end), "files_before": files_before, "whole context": full.detail,
            },
            "no traceback in the log": {"ok": errors == 0},
            "after kill -9": after_the_kill(server, load.expected),
        }  # fmt: skip
        checks["no traceback in the log"]["ok"] &= server.stop() == 0 and "Traceback" not in server.log
    except Exception as error:
        code = server.process.poll()
        raise SystemExit(f"{error!r}; the server's exit code is {code}, its log:\n{server.log[-3000:]}") from error
    finally:
        if server.process.poll() is None:
            server.kill()
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "minutes": round(loaded_min, 1), "stopped_s": round(clock.stopped_s), "clients": clients,
        "requests": load.verdicts.total(), "slowest_s": round(load.slowest_s, 1), "checks": checks,
        "verdicts": dict(sorted(load.verdicts.items())), "statuses": dict(sorted(load.statuses.items())),
        "by_minute": by_minute(watch.rows),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--only", action="append", choices=KINDS, help="this kind of request alone; may be repeated")
    parser.add_argument("--result", type=Path, help="write what was measured to this file")
    given = parser.parse_args()
    kinds = {name: KINDS[name] for name in given.only or KINDS}
    result = hold(given.store, given.minutes, given.clients, given.memory, kinds)
    for name, check in result["checks"].items():
        print("held  " if check["ok"] else "BROKEN", name, {k: v for k, v in check.items() if k != "ok"})
    if given.result is not None:
        from stoker.bench.provenance import write_result

        write_result(given.result, result)
    return int(not all(check["ok"] for check in result["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
