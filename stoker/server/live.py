"""`/live` and `/live/stream`: what the server does right now, as JSON, once a second.

One sampler for all who look: it reads counters of the models in memory and keeps the last minutes of the main rates.
Holds no prompt and no text. Needs the server's key where there is one.
"""

import asyncio
import json
import logging
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import psutil
from fastapi import APIRouter, Response

from stoker import __version__
from stoker.errors import StokerError
from stoker.generate.rates import Window
from stoker.server.errors import RequestError
from stoker.server.heat import Heat
from stoker.server.observe import Totals
from stoker.server.registry import Registry
from stoker.server.service import Service
from stoker.server.settings import Settings
from stoker.server.sse import EventStream, data

LOG = logging.getLogger("stoker.server")
EVERY_S = 1.0
MOST_LISTENERS = 16
HISTORY = 120  # samples kept of the main rates
COUNTERS = (
    "hits",
    "misses",
    "demand_bytes",
    "prefetch_bytes",
    "prefetch_used",
    "prefetch_on_time",
    "prefetch_wasted_bytes",
    "stall_ns",
    "evictions",
    "dropped_experts",
    "prefill_tokens",
    "decode_tokens",
)


class ModelView:
    """What has been seen of one model in memory."""

    def __init__(self) -> None:
        self.window, self.heat = Window(), Heat()
        self.history: deque[tuple[float | None, float | None, float | None, float | None]] = deque(maxlen=HISTORY)
        self._tokens = 0

    def add(self, now_s: float, service: Service, keep: bool) -> dict[str, Any]:
        """Take a sample, and `keep` its rates in the history; the model as JSON."""
        model, stats, status = service.model, service.model.stats(), service.batcher.status()
        tokens = int(stats["prefill_tokens"] + stats["decode_tokens"])
        self.window.add(now_s, stats)
        self.heat.add(model.expert_uses(), tokens - self._tokens)
        self._tokens = tokens
        rates = self.window.rates()
        if keep:
            self.history.append((rates.tok_s, rates.stall_of_steps, rates.hit_rate, rates.read_bytes_s))
        return {
            "loaded": True,
            "rates": asdict(rates),
            "status": asdict(status),
            "counters": {name: stats[name] for name in COUNTERS},
            "ledger": model.ledger(),
            "prefix": None if service.prefix is None else service.prefix.stats(),
            "quality": _quality(service),
            "heat": self.heat.picture(),
            "path": stats["path"],
            "context_tokens": model.runtime.ctx_size,
        }


class Sampler:
    """Samples every model that is in memory. `latest` is the last sample."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._start_s = clock()
        # Weak: a model that was let go must not be held by who looked at it.
        self._views: dict[str, tuple[weakref.ref[Service], ModelView]] = {}
        self._process = psutil.Process()
        self._next = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._looked_s = self._start_s
        self.listeners = 0
        self.latest: dict[str, Any] = {}

    def sample(self, keep: bool = True) -> dict[str, Any]:
        """Take a sample now; `keep`: it is one of those that come every EVERY_S."""
        now_s = self._clock()
        models: dict[str, dict[str, Any]] = {}
        for entry in self._registry.entries:
            name, service = entry.spec.name, entry.service
            shown: dict[str, Any] = {"loaded": False}
            if service is None:
                self._views.pop(name, None)
            else:
                shown = self._view(name, service).add(now_s, service, keep)
            models[name] = {"state": entry.state} | shown | _requests(entry.totals)
        draining = [shown["status"]["draining"] for shown in models.values() if shown["loaded"]]
        self.latest = {
            "version": __version__,
            "time_s": time.time(),
            "uptime_s": now_s - self._start_s,
            "rss_bytes": int(self._process.memory_info().rss),
            "draining": self._registry.closing or (bool(draining) and all(draining)),
            "models": models,
        }
        return self.latest

    def _view(self, name: str, service: Service) -> ModelView:
        """What was seen of this service; a model that was loaded again begins anew."""
        known = self._views.get(name)
        if known is None or known[0]() is not service:
            known = self._views[name] = (weakref.ref(service), ModelView())
        return known[1]

    def with_history(self) -> dict[str, Any]:
        """The latest sample, with the last minutes: per model [tok_s, stall_of_steps, hit_rate, read_bytes_s] rows."""
        history = {name: list(view.history) for name, (_, view) in self._views.items()}
        return self.latest | {"every_s": EVERY_S, "history": history}

    def start(self) -> None:
        """Somebody looks: sample from now on, until nobody has looked for a while."""
        self._looked_s = self._clock()
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._views.clear()
            self._next = asyncio.Event()
            self.sample()
            self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        while self.listeners or self._clock() - self._looked_s < HISTORY * EVERY_S:
            await asyncio.sleep(EVERY_S)
            try:
                self.sample()
            except StokerError:  # a model was closed while it was read: the next sample no longer lists it
                pass
            except Exception:
                LOG.exception("the live figures could not be read")
            self._next.set()
            self._next = asyncio.Event()

    async def events(self) -> AsyncIterator[bytes]:
        """The present with its history, then one event a sample. Who reads slowly misses samples, not memory."""
        self.listeners += 1
        try:
            yield data(self.with_history())
            while not self.latest.get("draining"):
                await self._next.wait()
                yield data(self.latest)
        finally:
            self.listeners -= 1


def _quality(service: Service) -> dict[str, Any]:
    """How experts are chosen, the bound that was promised, and what the probe saw."""
    promise, probe = service.model.promise, service.batcher.probe
    return {
        "routing": service.model.runtime.mode.about(),
        "promise": None if promise is None else promise.about(),
        "probe": None if probe is None else probe.stats(),
    }


def _requests(totals: Totals) -> dict[str, Any]:
    recent = sorted(totals.recent_first_token_s)
    return {
        "finished": dict(totals.finished),
        "refused": dict(totals.refused),
        "first_token_s": {
            "last": totals.recent_first_token_s[-1] if recent else None,
            "median": recent[len(recent) // 2] if recent else None,
            "count": len(recent),
        },
        "tokens": {
            "prompt": totals.prompt_tokens,
            "cached": totals.cached_tokens,
            "completion": totals.completion_tokens,
        },
    }


def router(registry: Registry, settings: Settings) -> APIRouter:
    """`GET /live` and `GET /live/stream`; samples are taken from the first look on."""
    sampler = Sampler(registry)
    routes = APIRouter(tags=["watch"])

    @routes.get("/live", summary="What the server does now, with the last two minutes")
    async def live() -> Response:
        sampler.start()
        sampler.sample(keep=False)
        return _json(sampler.with_history())

    @routes.get("/live/stream", summary="The same as server-sent events, once a second")
    async def stream() -> Response:
        if sampler.listeners >= MOST_LISTENERS:
            raise RequestError(
                f"{MOST_LISTENERS} others are watching", status=429, code="too_many_listeners", retry_after_s=5
            )
        sampler.start()
        return EventStream(sampler.events(), every_s=settings.sse_keep_alive_s)

    return routes


def _json(content: dict[str, Any]) -> Response:
    text = json.dumps(content, separators=(",", ":"))
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")
