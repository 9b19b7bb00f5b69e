"""/metrics and /live of a real server, and the arithmetic behind them."""

import base64
import json
import math
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.errors import Closing, ContextError, OptionError, QueueFull
from stoker.generate.job import Done, Failed, Piece, Progress
from stoker.generate.report import Result, Timings, Usage
from stoker.server import live
from stoker.server.heat import FADE_TOKENS, Heat
from stoker.server.observe import TOKEN_EDGES_S, Histogram, Totals
from tests.server.running import PATIENCE_S, ROOT, Server, http

LAYERS, EXPERTS, CHOSEN = 2, 8, 2
Samples = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with Server(tiny_store, "--memory", "1GiB", "--parallel", 2, "--queue", 3) as server:
        yield server


def scrape(url: str) -> Samples:
    """Samples by (name, label values ...), labels in the order of their names."""
    answer = http.get(f"{url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


def ask(url: str, max_tokens: int, **more: object) -> dict[str, Any]:
    body = {"prompt": "The quick brown fox", "max_tokens": max_tokens, "temperature": 0, **more}
    answer = http.post(f"{url}/v1/completions", json={"model": "tiny", **body})
    found: dict[str, Any] = answer.json()
    return found


def test_metrics_count_what_was_asked(server: Server) -> None:
    before = scrape(server.url)
    usages = [ask(server.url, tokens)["usage"] for tokens in (5, 9, 1)]
    assert "error" in ask(server.url, 5, prompt="x " * 4000)
    http.get(f"{server.url}/no/such/path/1")
    http.get(f"{server.url}/no/such/path/2")
    after = scrape(server.url)

    def grown(name: str, *labels: str) -> float:
        return after[(f"stoker_{name}", *labels)] - before.get((f"stoker_{name}", *labels), 0)

    prompts, written = (sum(u[f"{kind}_tokens"] for u in usages) for kind in ("prompt", "completion"))
    assert grown("prompt_tokens_total", "tiny") == prompts
    assert grown("generated_tokens_total", "tiny") == written
    reasons = [key for key in after if key[0] == "stoker_requests_finished_total"]
    assert sum(after[key] - before.get(key, 0) for key in reasons) == 3
    assert grown("time_to_first_token_seconds_count", "tiny") == 3
    assert grown("token_latency_seconds_count", "tiny") == written - 3
    assert grown("queue_seconds_count", "tiny") == 3
    cached = grown("prompt_cached_tokens_total", "tiny")
    assert grown("prefill_tokens_total", "tiny") == prompts - cached
    assert grown("decode_tokens_total", "tiny") == written - 3, "an answer's last token is not fed back"
    assert grown("decode_seconds_total", "tiny") > 0 and grown("prefill_seconds_total", "tiny") > 0
    demands = grown("expert_hits_total", "tiny") + grown("expert_misses_total", "tiny")
    assert LAYERS * CHOSEN * (written - 3) <= demands and after[("stoker_expert_dropped_total", "tiny")] == 0
    assert grown("http_requests_total", "POST", "/v1/completions", "200") == 3
    assert grown("http_requests_total", "POST", "/v1/completions", "400") == 1
    assert grown("http_requests_total", "GET", "other", "404") == 2, "paths of strangers make no labels"
    assert after[("stoker_http_requests_in_flight",)] == 1, "the scrape itself"


def test_metrics_of_memory_and_limits(server: Server) -> None:
    found = scrape(server.url)
    budget = found[("stoker_memory_budget_bytes", "tiny")]
    parts = {key[2]: value for key, value in found.items() if key[0] == "stoker_memory_ledger_bytes"}
    assert budget == 2**30 and sum(parts.values()) == budget and parts["slots"] > 0
    assert 0 < found[("stoker_process_resident_bytes",)] <= budget
    assert found[("stoker_process_resident_bytes",)] <= found[("stoker_process_peak_resident_bytes", "tiny")] <= budget
    assert 0 < found[("stoker_process_allocated_bytes",)] <= budget
    assert found[("stoker_process_python_blocks",)] > 100_000
    assert found[("stoker_requests_running_limit", "tiny")] == 2
    assert found[("stoker_requests_waiting_limit", "tiny")] == 3
    assert found[("stoker_requests_running", "tiny")] == found[("stoker_requests_waiting", "tiny")] == 0
    assert found[("stoker_kv_tokens_limit", "tiny")] >= 512 and found[("stoker_model_loaded", "tiny")] == 1
    assert max(len(key) for key in found) <= 4, "few labels"


def test_every_metric_is_documented(server: Server) -> None:
    ask(server.url, 2)
    text = http.get(f"{server.url}/metrics").text
    served = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation and name.startswith("stoker_") for name, family in served.items())
    documented = set(re.findall(r"`(stoker_[a-z_]+)`", (ROOT / "docs/metrics.md").read_text()))
    shown = {f"{name}_total" if family.type == "counter" else name for name, family in served.items()}
    assert shown <= documented, sorted(shown - documented)
    assert documented == shown, f"documented and not served: {sorted(documented - shown)}"


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_live_tells_the_present_and_its_past(server: Server) -> None:
    with http.stream("GET", f"{server.url}/live/stream") as stream:
        coming = events(stream.iter_lines())
        first = next(coming)
        assert first["every_s"] == live.EVERY_S and set(first["history"]) == {"tiny"}
        for _ in range(3):
            usage = ask(server.url, 40, ignore_eos=True)["usage"]
        assert usage["completion_tokens"] == 40
        # Those sampled while the answers were made come first.
        seen = [first, next(coming)]
        while seen[-1]["models"]["tiny"]["tokens"]["completion"] < 120:
            seen.append(next(coming))
        seen.append(next(coming))
    times = [event["time_s"] for event in seen]
    assert times == sorted(set(times)) and min(late - early for early, late in pairwise(times)) < 3 * live.EVERY_S
    shown = seen[-1]["models"]["tiny"]
    assert any(event["models"]["tiny"]["rates"]["tok_s"] for event in seen)
    assert shown["loaded"] and shown["status"]["parallel"] == 2 and shown["counters"]["dropped_experts"] == 0
    assert 0 <= shown["rates"]["hit_rate"] <= 1
    assert shown["first_token_s"]["count"] >= 3 and shown["tokens"]["completion"] >= 120
    levels = np.frombuffer(base64.b64decode(shown["heat"]["levels"]), np.uint8)
    assert levels.size == LAYERS * EXPERTS and levels.max() == 255
    shares = levels.reshape(LAYERS, EXPERTS) / 255 * shown["heat"]["top_share"]
    assert shares.sum(axis=1) == pytest.approx([1.0, 1.0], abs=0.03), "shares of each layer's choices"
    history = http.get(f"{server.url}/live").json()["history"]["tiny"]
    assert any(row[0] for row in history) and len(history) <= live.HISTORY


def test_listeners_are_bounded(server: Server) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        streams = [client.build_request("GET", f"{server.url}/live/stream") for _ in range(live.MOST_LISTENERS)]
        opened = [client.send(request, stream=True) for request in streams]
        lines = [answer.iter_lines() for answer in opened]
        assert all(next(line).startswith("data: ") for line in lines)
        with client.stream("GET", f"{server.url}/live/stream") as refused:
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
            assert json.loads(refused.read())["error"]["code"] == "too_many_listeners"
        assert client.get(f"{server.url}/live").status_code == 200
        for answer in opened:
            answer.close()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with client.stream("GET", f"{server.url}/live/stream") as again:
                if again.status_code == 200:
                    break
            assert time.monotonic() < deadline, "those who left still count"
            time.sleep(0.1)


def test_heat_fades_with_use() -> None:
    heat, uses = Heat(), np.zeros((1, 4), np.int64)
    heat.add(uses, 0)
    uses = uses + np.array([[100, 0, 0, 0]])
    heat.add(uses, 100)
    assert heat.picture()["top_share"] == 1.0
    uses = uses + np.array([[0, FADE_TOKENS, 0, 0]])
    heat.add(uses, FADE_TOKENS)
    shown = heat.picture()
    # What is left of 100 uses after FADE_TOKENS more tokens, against the new ones, faded on the average.
    old = 100 * (1 - math.exp(-100 / FADE_TOKENS)) * FADE_TOKENS / 100 * math.exp(-1)
    new = FADE_TOKENS * (1 - math.exp(-1))
    assert shown["top_share"] == pytest.approx(new / (old + new))
    levels = np.frombuffer(base64.b64decode(shown["levels"]), np.uint8)
    assert levels.tolist() == [round(255 * old / new), 255, 0, 0]
    heat.add(uses, 0)
    assert heat.picture() == shown, "an idle model keeps its picture"


def test_histogram_edges_are_inclusive() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1] and histogram.total == 7.5


def test_watch_measures_from_submission() -> None:
    now = [100.0]
    totals = Totals(clock=lambda: now[0])
    watch = totals.watch()
    now[0] = 101.0
    watch.event(Progress(0, 8, 0))
    watch.event(Progress(8, 8, 0))
    one: Any = object()
    now[0] = 103.0
    watch.event(Piece("a", (one,)))
    now[0] = 103.5
    watch.event(Piece("", (one, one)))
    watch.event(Piece("tail", ()))
    assert totals.queue_s.total == 1.0 and totals.first_token_s.total == 3.0
    assert sum(totals.token_s.counts) == 2 and totals.token_s.total == pytest.approx(0.5)
    timings = Timings.of(0, 0, 0, [], 0)
    watch.event(Done(Result("atail", [1, 1, 1], "stop", Usage(8, 3, 3), timings, {}, 0)))
    assert (totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens) == (8, 3, 3)
    totals.watch().event(Failed(OptionError("x")))
    for error in (QueueFull("x"), Closing("x"), ContextError("x"), OptionError("x")):
        totals.watch().refused(error)
    assert totals.finished == {"stop": 1, "failed": 1}
    assert totals.refused == {"full": 1, "closing": 1, "context": 1, "invalid": 1}
    assert list(TOKEN_EDGES_S) == sorted(TOKEN_EDGES_S)
