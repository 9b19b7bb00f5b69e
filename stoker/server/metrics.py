"""`/metrics`: the server in Prometheus' text format. docs/metrics.md lists every name.

Nothing is stored here but the counts of HTTP requests: models, batchers and Totals are read when asked. Labels come
from bounded sets alone: served names, route templates, reasons.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker import __version__
from stoker.server.memory import allocated_bytes
from stoker.server.observe import FIRST_TOKEN_EDGES_S, Histogram, Totals
from stoker.server.registry import Registry
from stoker.server.service import Service
from stoker.server.settings import Settings

# Counter of Runtime.stats() -> (metric without prefix and `_total`, scale, help).
ENGINE: dict[str, tuple[str, float, str]] = {
    "prefill_tokens": ("prefill_tokens", 1, "Prompt tokens computed"),
    "prefill_ns": ("prefill_seconds", 1e-9, "Time in prefill steps"),
    "decode_tokens": ("decode_tokens", 1, "Tokens fed one at a time"),
    "decode_ns": ("decode_seconds", 1e-9, "Time in decode steps"),
    "hits": ("expert_hits", 1, "Experts asked for that were whole in memory"),
    "misses": ("expert_misses", 1, "Experts asked for that were not whole in memory"),
    "hit_bytes": ("expert_hit_bytes", 1, "Bytes of the hits"),
    "miss_bytes": ("expert_miss_bytes", 1, "Bytes of the misses"),
    "reads": ("expert_reads", 1, "Expert records read"),
    "demand_bytes": ("expert_demand_read_bytes", 1, "Bytes read because a step waited for them"),
    "prefetch_bytes": ("expert_prefetch_read_bytes", 1, "Bytes read ahead of demand"),
    "read_errors": ("expert_read_errors", 1, "Reads that failed or came short"),
    "stall_ns": ("expert_stall_seconds", 1e-9, "Time that steps waited for reads"),
    "evictions": ("expert_evictions", 1, "Whole records that made room"),
    "prefetch_submitted": ("expert_prefetches", 1, "Prefetches submitted"),
    "prefetch_used": ("expert_prefetches_used", 1, "Prefetches that a step then asked for"),
    "prefetch_on_time": ("expert_prefetches_on_time", 1, "Used prefetches that were whole when asked for"),
    "prefetch_late": ("expert_prefetches_late", 1, "Used prefetches that were still being read when asked for"),
    "prefetch_wasted": ("expert_prefetches_wasted", 1, "Prefetches that landed and left without use"),
    "prefetch_wasted_bytes": ("expert_prefetch_wasted_bytes", 1, "Bytes of the wasted prefetches"),
    "prefetch_cancelled": ("expert_prefetches_cancelled", 1, "Prefetches given up before they started"),
    "prefetch_expired": ("expert_prefetches_expired", 1, "Prefetches that had not started at their deadline"),
    "prerouter_routes": ("prerouter_routes", 1, "Routes (a token in a layer) that a prerouter's heads chose"),
    "prerouter_fallbacks": ("prerouter_fallbacks", 1, "Routes of answer tokens that had no prediction"),
    "roster_pins": ("roster_pins", 1, "Sequences whose rosters were pinned in every layer"),
    "roster_shifts": ("roster_shifts", 1, "Sequences that gave a pinned roster up after a shift of topic"),
    "routed_choices": ("routed_choices", 1, "Choices (an expert of a token in a layer) that a routing mode looked at"),
    "swapped_choices": ("swapped_choices", 1, "Choices of the gates that a routing mode replaced"),
    "dropped_experts": ("expert_dropped", 1, "Experts left out of a step: 0 always"),
}
LEDGER_PARTS = ("process", "dense", "kv", "prefix", "grammar", "scratch", "slots", "ring", "reserve", "free")
# Entry of PrefixCache.stats() -> (whether it is an amount now rather than a count since the start, help).
PREFIX: dict[str, tuple[bool, str]] = {
    "lookups": (False, "Prompts that were looked up"),
    "hits": (False, "Prompts of which a beginning was found"),
    "lookup_tokens": (False, "Tokens of the prompts that were looked up"),
    "hit_tokens": (False, "Tokens of them that were found, in memory or on disk"),
    "disk_hit_tokens": (False, "Tokens of them that were found on disk"),
    "evictions": (False, "Pieces of prefixes that left memory"),
    "ram_blocks": (True, "Pieces of prefixes in memory"),
    "ram_bytes": (True, "Bytes of prefixes in memory"),
    "disk_bytes": (True, "Bytes of prefixes on disk, of all models that share the directory"),
    "disk_pending": (True, "Pieces that wait to be written to disk"),
    "disk_reads": (False, "Pieces read from disk"),
    "disk_read_bytes": (False, "Bytes read from disk"),
    "disk_writes": (False, "Pieces written to disk"),
    "disk_written_bytes": (False, "Bytes written to disk"),
    "disk_evictions": (False, "Pieces removed from disk to keep to its limit"),
    "discarded": (False, "Pieces on disk that were damaged or foreign, and removed"),
}


# Entry of QualityProbe.stats() -> (whether it is an amount now rather than a count since the start, name, help).
PROBE: dict[str, tuple[bool, str, str]] = {
    "probes": (False, "quality_probes", "Answer tokens computed a second time by the gates' own routes"),
    "seconds": (False, "quality_probe_seconds", "Time that those took"),
    "read_bytes": (False, "quality_probe_read_bytes", "Expert bytes that those read"),
    "kl_mean": (True, "quality_kl", "KL of the served mode from the gates' routes, mean of the latest probes, nats"),
    "kl_limit": (True, "quality_kl_limit", "The bound that it is held to, nats"),
    "broken": (True, "quality_broken", "Whether the bound was broken: answers are exact from then on"),
}


class RequestCounts:
    """HTTP requests by route template, method and status; how long their answers took to the last byte."""

    def __init__(self) -> None:
        self.finished: Counter[tuple[str, str, str]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.in_flight = 0


class RequestCounter:
    """The outermost middleware: counts every HTTP request, refused ones too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counts, start_s = request_counts(scope["app"]), time.monotonic()
        status = "gone"  # no answer was begun: the client left first

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        counts.in_flight += 1
        try:
            await self._app(scope, receive, watched)
        finally:
            counts.in_flight -= 1
            route = getattr(scope.get("route"), "path", None) or "other"
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            counts.finished[route, method, status] += 1
            counts.seconds.setdefault(route, Histogram(FIRST_TOKEN_EDGES_S)).add(time.monotonic() - start_s)


def request_counts(app: Any) -> RequestCounts:
    """The application's counts, made at the first request."""
    if not hasattr(app.state, "request_counts"):
        app.state.request_counts = RequestCounts()
    counts: RequestCounts = app.state.request_counts
    return counts


class ServerCollector(Collector):
    """Reads everything at the moment of the scrape."""

    def __init__(self, registry: Registry, counts: RequestCounts) -> None:
        self._registry, self._counts = registry, counts

    def collect(self) -> Iterator[Metric]:
        entries = self._registry.entries
        loaded = {entry.spec.name: entry.service for entry in entries if entry.service is not None}
        yield _gauge("build_info", "The version of stoker", [({"version": __version__}, 1)])
        rss = psutil.Process().memory_info().rss
        yield _gauge("process_resident_bytes", "Memory of the process that is resident now", [({}, rss)])
        if (allocated := allocated_bytes()) is not None:
            yield _gauge("process_allocated_bytes", "What malloc has given out and not got back", [({}, allocated)])
        yield _gauge("process_python_blocks", "Python objects that are alive now", [({}, sys.getallocatedblocks())])
        yield from self._http()
        yield from _requests({entry.spec.name: entry.totals for entry in entries})
        shown = [({"model": entry.spec.name}, int(entry.service is not None)) for entry in entries]
        yield _gauge("model_loaded", "Whether the model is in memory now", shown)
        yield from _batchers(loaded)
        yield from _engines(loaded)
        yield from _ledgers(loaded)
        yield from _prefixes(loaded)
        yield from _probes(loaded)

    def _http(self) -> Iterator[Metric]:
        counts = self._counts
        rows = [
            ({"route": route, "method": method, "status": status}, count)
            for (route, method, status), count in sorted(counts.finished.items())
        ]
        yield _counter("http_requests", "HTTP requests answered, by route template", rows)
        yield _gauge("http_requests_in_flight", "HTTP requests being answered now", [({}, counts.in_flight)])
        by_route = [({"route": route}, seconds) for route, seconds in sorted(counts.seconds.items())]
        yield _histogram("http_request_duration_seconds", "From the request's head to the answer's last byte", by_route)


def _requests(totals: Mapping[str, Totals]) -> Iterator[Metric]:
    def by(field: str) -> list[tuple[dict[str, str], float]]:
        return [
            ({"model": name, "reason": reason}, count)
            for name, total in totals.items()
            for reason, count in sorted(getattr(total, field).items())
        ]

    yield _counter("requests_finished", "Generations that ended, by finish reason", by("finished"))
    yield _counter("requests_refused", "Generations that were not begun, by reason", by("refused"))
    for name, field, text in (
        ("prompt_tokens", "prompt_tokens", "Prompt tokens of generations that ended"),
        ("prompt_cached_tokens", "cached_tokens", "Prompt tokens whose state was in the prefix cache"),
        ("generated_tokens", "completion_tokens", "Tokens generated by generations that ended"),
    ):
        yield _counter(name, text, [({"model": model}, getattr(total, field)) for model, total in totals.items()])
    for name, field, text in (
        ("queue_seconds", "queue_s", "From submission to admission"),
        ("time_to_first_token_seconds", "first_token_s", "From submission to the first token"),
        ("token_latency_seconds", "token_s", "From one token of a generation to its next"),
    ):
        yield _histogram(name, text, [({"model": model}, getattr(total, field)) for model, total in totals.items()])


def _batchers(loaded: Mapping[str, Service]) -> Iterator[Metric]:
    states = {name: service.batcher.status() for name, service in loaded.items()}
    for name, field, text in (
        ("requests_running", "running", "Generations admitted now"),
        ("requests_waiting", "waiting", "Generations in the queue now"),
        ("requests_running_limit", "parallel", "Generations that may run together"),
        ("requests_waiting_limit", "queue", "Generations that the queue holds"),
        ("kv_used_tokens", "kv_used_tokens", "Tokens whose state is held, cached prefixes included"),
        ("kv_tokens_limit", "kv_total_tokens", "Tokens that the KV cache has room for"),
    ):
        yield _gauge(name, text, [({"model": model}, getattr(state, field)) for model, state in states.items()])


def _engines(loaded: Mapping[str, Service]) -> Iterator[Metric]:
    stats = {name: service.model.stats() for name, service in loaded.items()}
    for field, (name, scale, text) in ENGINE.items():
        yield _counter(
            name, text, [({"model": model}, counts.get(field, 0) * scale) for model, counts in stats.items()]
        )
    peaks = [({"model": model}, counts["peak_rss_bytes"]) for model, counts in stats.items()]
    yield _gauge("process_peak_resident_bytes", "Most memory that the process held while the model ran", peaks)


def _ledgers(loaded: Mapping[str, Service]) -> Iterator[Metric]:
    ledgers = {name: service.model.ledger() for name, service in loaded.items()}
    budgets = [({"model": model}, ledger["budget_bytes"]) for model, ledger in ledgers.items()]
    yield _gauge("memory_budget_bytes", "The budget that the model was loaded with", budgets)
    parts = [
        ({"model": model, "part": part}, ledger[f"{part}_bytes"])
        for model, ledger in ledgers.items()
        for part in LEDGER_PARTS
    ]
    yield _gauge("memory_ledger_bytes", "How the budget is divided", parts)


def _prefixes(loaded: Mapping[str, Service]) -> Iterator[Metric]:
    stats = {name: service.prefix.stats() for name, service in loaded.items() if service.prefix is not None}
    for field, (now, text) in PREFIX.items():
        rows = [({"model": model}, counts[field]) for model, counts in stats.items()]
        yield (_gauge if now else _counter)(f"prefix_{field}", f"Prefix cache: {text[0].lower()}{text[1:]}", rows)


def _probes(loaded: Mapping[str, Service]) -> Iterator[Metric]:
    probes = {name: service.batcher.probe for name, service in loaded.items()}
    stats = {name: probe.stats() for name, probe in probes.items() if probe is not None}
    for field, (now, name, text) in PROBE.items():
        yield (_gauge if now else _counter)(
            name, text, [({"model": model}, one[field]) for model, one in stats.items()]
        )


Rows = Sequence[tuple[Mapping[str, str], float]]


def _labelled(family: Any, rows: Rows) -> Any:
    """Add the rows to a family that was made with their label names."""
    for labels, value in rows:
        family.add_metric(list(labels.values()), value)
    return family


def _names(rows: Rows) -> list[str]:
    return list(rows[0][0]) if rows else []


def _counter(name: str, text: str, rows: Rows) -> CounterMetricFamily:
    family: CounterMetricFamily = _labelled(CounterMetricFamily(f"stoker_{name}", text, labels=_names(rows)), rows)
    return family


def _gauge(name: str, text: str, rows: Rows) -> GaugeMetricFamily:
    family: GaugeMetricFamily = _labelled(GaugeMetricFamily(f"stoker_{name}", text, labels=_names(rows)), rows)
    return family


def _histogram(name: str, text: str, rows: Sequence[tuple[Mapping[str, str], Histogram]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"stoker_{name}", text, labels=list(rows[0][0]) if rows else [])
    for labels, histogram in rows:
        buckets, below = [], 0
        for edge, count in zip((*histogram.edges, float("inf")), histogram.counts, strict=True):
            below += count
            buckets.append(("+Inf" if edge == float("inf") else str(edge), float(below)))
        family.add_metric(list(labels.values()), buckets, histogram.total)
    return family


def router(registry: Registry, settings: Settings) -> APIRouter:
    """`GET /metrics`; needs the server's key where there is one."""
    routes = APIRouter(tags=["watch"])

    @routes.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
    async def metrics(request: Request) -> Response:
        collected = CollectorRegistry()
        collected.register(ServerCollector(registry, request_counts(request.app)))
        return Response(generate_latest(collected), media_type=CONTENT_TYPE_LATEST)

    return routes
