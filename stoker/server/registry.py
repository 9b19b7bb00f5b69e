"""The models of one server: which there are, which are loaded, and who must go when memory is asked for.

One budget holds for the process. A model is loaded at its first request into what the others leave; it is let go after
`keep_alive_s` idle seconds, or earlier when another needs its memory. Loading itself is the loader's.

The account: the process has one price (`base_bytes`), each loaded model what its ledger gave it (`Entry.bytes`), and a
model is loaded into what is left of the budget. Nothing of it depends on how much of a grant has been touched yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from stoker.errors import BudgetError, Closing
from stoker.generate.price import GROWTH_BYTES, Price
from stoker.server.errors import RequestError
from stoker.server.held import current
from stoker.server.memory import collect_and_trim, resident_bytes, set_apart, together
from stoker.server.observe import Totals
from stoker.server.service import Service
from stoker.server.settings import Settings

log = logging.getLogger("stoker.server")

State = Literal["unloaded", "loading", "loaded"]
# A model is not squeezed into less than this share of what it would have alone while another idles.
FAIR_SHARE = 0.5
IDLE_CHECK_S = 1.0
TRIM_S = 10.0
MIB = 1 << 20
# What the process grows by when its libraries are first used (tokenizers, kernels, grammars). Measured on the demo
# model: 45 MiB when a model is loaded for the first time, 25 to 32 MiB that stay when models have come and gone.
LIBRARIES_BYTES = 64 * MIB
STEP_BYTES = 16 * MIB  # budgets are named in such steps


@dataclass(frozen=True)
class Spec:
    """A model that may be asked for. names: its own name first, then others that mean it. price: None where one model
    is alone and has the budget to itself. about: what /v1/models tells before it is loaded. adapters: LoRAs that a
    request may ask for, as MODEL:NAME or NAME."""

    names: tuple[str, ...]
    path: str
    price: Price | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.names[0]


# (which model, bytes for it and the process, bytes of them that are the process's or None: measured) -> the loaded
# service. Blocks; runs on a thread.
Loader = Callable[[Spec, int, int | None], Service]


class Entry:
    """A model and its state now. users: requests that hold it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.service: Service | None = None
        self.loading: asyncio.Task[Service] | None = None
        self.users = 0
        self.used_at = time.monotonic()
        self.bytes = 0  # what it may hold while it is loaded
        self.created = int(time.time())
        self.error: str | None = None  # why the last load failed
        self.totals = Totals()  # of its requests; outlive the service

    @property
    def state(self) -> State:
        return "loaded" if self.service is not None else "loading" if self.loading is not None else "unloaded"

    def routing(self, adapter: str | None = None) -> dict[str, Any]:
        """Who chooses the experts. Before it is loaded, what its options say: exact unless they name something else."""
        if self.service is not None:
            return dict(self.service.model.runtime.mode.about(adapter))
        return dict(self.spec.about.get("routing", {"mode": "exact", "lossless": True}))

    @property
    def idle(self) -> bool:
        return self.service is not None and self.users == 0 and self.service.active == 0


class Registry:
    """All models. Everything here runs on the event loop; loading and unloading run on threads beside it."""

    def __init__(
        self, specs: Sequence[Spec], load: Loader, settings: Settings, *, budget_bytes: int, keep_alive_s: float | None
    ) -> None:
        """keep_alive_s: None keeps a loaded model until its memory is needed."""
        self.entries = [Entry(spec) for spec in specs]
        self.settings, self.budget_bytes, self.keep_alive_s = settings, budget_bytes, keep_alive_s
        self.closing = False
        self._load, self._start_bytes = load, resident_bytes() + LIBRARIES_BYTES
        self._changing = asyncio.Lock()  # one model is loaded or let go at a time
        self._released = asyncio.Event()

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def get(self, name: str | None, *, field: str = "model") -> Service:
        """The model of that name, loaded; held until the HTTP request that asks is over.

        Raises RequestError: 404 for an unknown name; BudgetError where others hold the memory for too long; Closing.
        """
        entry, adapter = self.find(name, field=field), None
        if name is not None and name not in entry.spec.names:
            adapter = adapter_in(entry.spec, name)
        if self.closing:
            raise Closing("the server is shutting down")
        entry.users += 1
        holder = current()
        if holder is not None:
            holder.add(lambda: self._release(entry))
        try:
            service = entry.service
            if service is None or not service.batcher.status().healthy:
                service = await self._loaded(entry)
            return service if adapter is None else service.adapted(adapter)
        finally:
            if holder is None:
                await self._release(entry)

    def find(self, name: str | None, *, field: str = "model") -> Entry:
        """Where there is one model only, it answers to any name, unless the server is strict: programs come with the
        names of other services' models built in."""
        for entry in self.entries:
            if name in entry.spec.names or (name is not None and adapter_in(entry.spec, name) is not None):
                return entry
        if len(self.entries) == 1 and not self.settings.strict_model:
            return self.entries[0]
        known = [entry.spec.name for entry in self.entries]
        if name is None:
            raise RequestError("this field is missing", field=field, code="missing_field", expected=", ".join(known))
        near = get_close_matches(name, known, n=1)
        raise RequestError(
            f"there is no model {name[:200]!r} here", status=404, code="model_not_found", field=field,
            expected=", ".join(known), remedy=f"did you mean {near[0]}?" if near else None,
        )  # fmt: skip

    async def _release(self, entry: Entry) -> None:
        entry.users -= 1
        entry.used_at = time.monotonic()
        self._released.set()

    # ---- loading ----------------------------------------------------------------------------------------------------

    def adopt(self, entry: Entry) -> Service:
        """Load here and now, before the server runs."""
        assert entry.spec.price is None, "several models are loaded as they are asked for"
        return self._take(entry, self._load(entry.spec, self.budget_bytes, None))

    async def _loaded(self, entry: Entry) -> Service:
        # A task of its own: whoever waits may leave, and all who wait get the same model.
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._bring(entry))
            entry.loading.add_done_callback(lambda task: self._brought(entry, task))
        return await asyncio.shield(entry.loading)

    def _brought(self, entry: Entry, task: "asyncio.Task[Service]") -> None:
        entry.loading = None
        error = None if task.cancelled() else task.exception()
        entry.error = str(error).splitlines()[0] if error is not None else None

    async def _bring(self, entry: Entry) -> Service:
        async with self._changing:
            if entry.service is not None and entry.service.batcher.status().healthy:
                return entry.service
            if entry.service is not None:
                log.error("%s: its engine has failed; loading it again", entry.spec.name)
                await self._unload(entry)
            room = await self._make_room(entry)
            base = self.base_bytes
            grant = (self.budget_bytes, None) if entry.spec.price is None else (room + base, base)
            return self._take(entry, await asyncio.to_thread(self._load, entry.spec, *grant))

    def _take(self, entry: Entry, service: Service) -> Service:
        ledger, name = service.model.ledger(), entry.spec.name
        entry.bytes = ledger["budget_bytes"] - ledger["free_bytes"] - ledger["process_bytes"]
        entry.service, entry.used_at = service, time.monotonic()
        service.totals = entry.totals
        set_apart()
        seconds, share = service.model.stats()["load_seconds"], ledger["resident_share"]
        log.info(
            "%s: loaded in %.1f s; it may hold %d MiB of %d MiB, which has room for %.0f%% of its experts",
            *(name, seconds, entry.bytes // MIB, self.budget_bytes // MIB, 100 * share),
        )
        return service

    @property
    def base_bytes(self) -> int:
        """What the process is priced at beside its models. What it grows by while they work is what their reserves are
        for; where it has grown by more than GROWTH_BYTES, the price rises."""
        return max(self._start_bytes, resident_bytes() - self._granted() - GROWTH_BYTES)

    def _granted(self) -> int:
        """Bytes that the loaded models may take."""
        return sum(entry.bytes for entry in self.entries)

    def _room(self) -> int:
        """Bytes that no loaded model may take."""
        return self.budget_bytes - self.base_bytes - self._granted()

    def check_budget(self) -> None:
        """Raises BudgetError for a model that could not be loaded even if it were alone."""
        for entry in self.entries:
            if entry.spec.price is not None and entry.spec.price.floor_bytes + self.base_bytes > self.budget_bytes:
                raise self._too_small(entry.spec, entry.spec.price)

    def least_bytes(self, price: Price) -> int:
        """The smallest --memory with which a model of that price can be loaded."""
        return -(-(price.floor_bytes + self.base_bytes) // STEP_BYTES) * STEP_BYTES

    def _too_small(self, spec: Spec, price: Price) -> BudgetError:
        least, base = self.least_bytes(price) // MIB, self.base_bytes // MIB
        return BudgetError(
            "the budget is too small for this model", where=spec.name,
            expected=f"at least {least} MiB: {base} MiB for the process with its libraries, the rest for the model",
            got=f"{self.budget_bytes // MIB} MiB", remedy=f"start the server with --memory {least}MiB or more",
        )  # fmt: skip

    async def _make_room(self, entry: Entry) -> int:
        """Let go of others until `entry` has its due; the bytes that are free then."""
        price = entry.spec.price
        if price is None:
            return self._room()
        alone = self.budget_bytes - self.base_bytes
        if price.floor_bytes > alone:
            raise self._too_small(entry.spec, price)
        due = max(price.floor_bytes, int(FAIR_SHARE * min(price.full_bytes, alone)))
        deadline = time.monotonic() + self.settings.load_wait_s
        while self._room() < due:
            idle = [other for other in self.entries if other.idle and other is not entry]
            if idle:
                await self._unload(_leaver(idle, due - self._room()))
                continue
            busy = [other.spec.name for other in self.entries if other.service is not None and other is not entry]
            if not busy and self._room() < price.floor_bytes:
                raise self._too_small(entry.spec, price)
            if not busy:
                break  # what is missing is not held by a model
            left = deadline - time.monotonic()
            if left <= 0 and self._room() >= price.floor_bytes:
                break  # little, but enough to work
            if left <= 0 or self.closing:
                raise BudgetError(
                    f"the memory for this model is in use by {', '.join(busy)}", where=entry.spec.name,
                    expected=f"{price.floor_bytes // MIB} MiB", got=f"{max(0, self._room()) // MIB} MiB",
                    remedy="ask again later, or start the server with a larger --memory",
                )  # fmt: skip
            self._released.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), min(left, IDLE_CHECK_S))
        return self._room()

    # ---- letting go -------------------------------------------------------------------------------------------------

    async def keep_alive(self) -> None:
        """Runs for the server's life: lets go of what nobody has asked for in a while, and of memory that is free."""
        trimmed_at = time.monotonic()
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            if time.monotonic() - trimmed_at > TRIM_S and not self.running:
                trimmed_at = time.monotonic()
                await asyncio.to_thread(collect_and_trim)
            if self.keep_alive_s is not None:
                await self.let_go_idle(self.keep_alive_s)

    async def let_go_idle(self, idle_s: float) -> None:
        """Let go of every model that has been idle for so long."""
        for entry in self.entries:
            if entry.idle and time.monotonic() - entry.used_at >= idle_s:
                async with self._changing:
                    if entry.idle:
                        await self._unload(entry)

    async def _unload(self, entry: Entry) -> None:
        service, entry.service = entry.service, None
        assert service is not None
        before = resident_bytes()
        together()
        await asyncio.to_thread(service.close)
        del service
        await asyncio.to_thread(collect_and_trim)
        if self.loaded():
            set_apart()
        entry.bytes = 0
        log.info(
            "%s: let go; the process holds %d MiB instead of %d MiB", entry.spec.name, resident_bytes() // MIB,
            before // MIB,
        )  # fmt: skip

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, tell those who wait, let running answers finish; whether they did in time."""
        self.closing = True
        services = [entry.service for entry in self.entries if entry.service is not None]
        finished = await asyncio.gather(*(asyncio.to_thread(s.batcher.drain, timeout_s) for s in services))
        return all(finished)

    async def close(self) -> None:
        """End every engine and give all memory back; running answers are told."""
        self.closing = True
        async with self._changing:
            for entry in self.entries:
                service, entry.service = entry.service, None
                if service is not None:
                    await asyncio.to_thread(service.close)
        together()

    @property
    def totals(self) -> dict[str, Totals]:
        """What is counted of each model's requests, by its name."""
        return {entry.spec.name: entry.totals for entry in self.entries}

    def loaded(self) -> list[Service]:
        """The models in memory."""
        return [entry.service for entry in self.entries if entry.service is not None]

    @property
    def running(self) -> int:
        """Answers in the making."""
        return sum(service.batcher.status().running for service in self.loaded())


def adapter_in(spec: Spec, name: str) -> str | None:
    """The adapter that MODEL:NAME or NAME alone means; None where it means none of this model's."""
    base, _, adapter = name.rpartition(":")
    return adapter if adapter in spec.adapters and (not base or base in spec.names) else None


def _leaver(idle: list[Entry], missing_bytes: int) -> Entry:
    """Who goes: the smallest one that frees enough; where none does alone, the one that was idle the longest."""
    enough = [entry for entry in idle if entry.bytes >= missing_bytes]
    if enough:
        return min(enough, key=lambda entry: entry.bytes)
    return min(idle, key=lambda entry: entry.used_at)
