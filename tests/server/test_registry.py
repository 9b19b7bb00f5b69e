"""Several models in one budget: loaded when asked for, let go when idle or in the way, never more than the budget."""

import asyncio
import gc
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import stoker
from stoker.cli.serve import model_names
from stoker.errors import BudgetError, Closing, OptionError
from stoker.generate.price import Price, price
from stoker.server import registry as registry_module
from stoker.server.errors import RequestError
from stoker.server.loading import Batching, loader
from stoker.server.registry import Registry, Spec
from stoker.server.service import Service
from stoker.server.settings import Settings
from tests.server.running import PATIENCE_S, Server, http

MIB = 1 << 20
BUDGET_MIB = 1150
KEEP_ALIVE_S = 12.0
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(demo_store: Path, tiny_store: Path) -> Iterator[Server]:
    options = ("--memory", f"{BUDGET_MIB}MiB", "--keep-alive", KEEP_ALIVE_S / 60, "--alias", f"small={tiny_store}")
    with Server(demo_store, tiny_store, *options) as running:
        yield running


def ask(server: Server, model: str) -> Any:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 8}
    return http.post(f"{server.url}/v1/chat/completions", json=body)


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in http.get(f"{server.url}/v1/models").json()["data"]}


def test_loaded_when_asked_for_and_let_go_when_idle(server: Server, demo_store: Path, tiny_store: Path) -> None:
    big, small = demo_store.name, tiny_store.name
    assert states(server) == {big: "unloaded", small: "unloaded"}
    assert "is loaded at its first request" in server.log and f"{big}: takes" in server.log
    empty = server.rss_bytes
    assert empty < 700 * MIB
    assert ask(server, small).status_code == 200
    assert states(server) == {big: "unloaded", small: "loaded"}
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(ask, server, big)
        while not coming.done():
            assert ask(server, small).status_code == 200, "the one answers while the other is loaded"
            time.sleep(0.2)
    answer = coming.result().json()
    assert states(server) == {big: "loaded", small: "loaded"}, "a small one stays when a big one comes"
    assert ask(server, "small").json()["model"] == small
    full = server.rss_bytes
    assert empty + 150 * MIB < full < BUDGET_MIB * MIB
    unknown = ask(server, "gpt-4")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert big in unknown.json()["error"]["message"]
    with stoker.load(demo_store, memory="8GiB") as model:
        assert answer["choices"][0]["message"]["content"] == model.generate(MESSAGES, max_tokens=8).text
    deadline = time.monotonic() + PATIENCE_S
    while "loaded" in states(server).values():
        assert time.monotonic() < deadline, states(server)
        time.sleep(0.1)
    assert server.rss_bytes < empty + 60 * MIB, f"{empty // MIB} MiB before, {server.rss_bytes // MIB} MiB after"
    assert ask(server, big).json()["choices"] == answer["choices"], "and it comes back"
    assert server.log.count("let go") >= 2


def refused_at_start(*arguments: object) -> str:
    command = [sys.executable, "-m", "stoker", "serve", *map(str, arguments), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 3, ended.stderr
    return ended.stderr


def test_a_budget_that_nothing_fits_is_refused_at_the_start_and_the_least_one_works(
    tiny_store: Path, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    twin.symlink_to(tiny_store)
    alone = refused_at_start(tiny_store, "--keep-alive", 5, "--memory", "100MiB")
    told = refused_at_start(tiny_store, twin, "--memory", "100MiB")
    assert "too small for this model" in alone and "got:      100 MiB" in alone and "to do" in alone
    least = re.search(r"at least (\d+) MiB", told)
    assert least is not None, told
    with Server(tiny_store, twin, "--memory", f"{least[1]}MiB") as server:
        for name in (tiny_store.name, "twin") * 3:
            answer = ask(server, name)
            assert answer.status_code == 200, answer.text
            metrics = http.get(f"{server.url}/metrics").text
            granted = [float(found) for found in re.findall(r"^stoker_memory_budget_bytes\S* (\S+)$", metrics, re.M)]
            assert len(granted) == 1 and granted[0] <= int(least[1]) * MIB
        assert server.rss_bytes < int(least[1]) * MIB
        assert server.log.count("let go") >= 5, "they take turns"


def test_the_process_has_one_price_whatever_it_holds_now(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        registry, limits = registry_of(tiny_store, {"a": 600, "b": 600}, 1000)
        held = registry.base_bytes
        for grown_mib, rise_mib in ((0, 0), (100, 0), (200, 88)):  # beyond 64 for libraries and 48 of a reserve
            now = held - registry_module.LIBRARIES_BYTES + grown_mib * MIB
            monkeypatch.setattr(registry_module, "resident_bytes", lambda now=now: now)
            assert registry.base_bytes == held + rise_mib * MIB
            await registry.get("a" if registry.find("b").service is not None else "b")
            await registry.let_go_idle(0)
        assert limits == [registry.budget_bytes] * 3
        await registry.close()

    asyncio.run(scenario())


def test_names() -> None:
    assert model_names(["models/a", "b/"], ["c=b", "d=models/a"]) == [("a", "d"), ("b", "c")]
    assert model_names(["a"], ["x", "y"]) == [("a", "x", "y")]
    for models, aliases in ((["a", "b"], ["x"]), (["a", "b"], ["x=c"]), (["a", "c/a"], []), (["a"], ["a"])):
        with pytest.raises(OptionError):
            model_names(models, aliases)


def test_a_price_is_what_loading_takes(tiny_store: Path) -> None:
    cost = price(tiny_store, ctx_size=256)
    assert cost.ctx_tokens == 256 and 0 < cost.floor_bytes <= cost.full_bytes
    with stoker.load(tiny_store, memory="8GiB", ctx_size=256) as model:
        ledger = model.ledger()
        taken = ledger["budget_bytes"] - ledger["free_bytes"] - ledger["process_bytes"]
        assert ledger["resident_share"] == 1 and abs(taken - cost.full_bytes) < 4 * MIB


# ---- the rules, on real models with made-up prices ------------------------------------------------------------------


def registry_of(
    store: Path, floors_mib: dict[str, int], budget_mib: int, load_wait_s: float = 0.6
) -> tuple[Registry, list[int]]:
    """Models that are all the same store; `limits` grows by the bytes that each load was given."""
    settings = Settings(load_wait_s=load_wait_s)
    load, limits = loader(settings, {"path": "exact"}, Batching(parallel=1, queue=1)), []

    def load_within(spec: Spec, limit_bytes: int, process_bytes: int | None) -> Service:
        limits.append(limit_bytes)
        service = load(spec, 4 << 30, process_bytes)
        assert spec.price is not None
        ledger = service.model.ledger()
        fake = ledger | {"budget_bytes": ledger["process_bytes"] + spec.price.full_bytes, "free_bytes": 0}
        service.model.ledger = lambda: fake  # type: ignore[method-assign]
        return service

    base = psutil.Process().memory_info().rss
    specs = [Spec((name,), str(store), Price(mib * MIB, mib * MIB, 512)) for name, mib in floors_mib.items()]
    budget = base + budget_mib * MIB
    return Registry(specs, load_within, settings, budget_bytes=budget, keep_alive_s=None), limits


def loaded(registry: Registry) -> set[str]:
    return {service.name for service in registry.loaded()}


def test_an_idle_model_makes_room_and_a_busy_one_does_not(tiny_store: Path) -> None:
    async def scenario() -> None:
        registry, limits = registry_of(tiny_store, {"a": 600, "b": 300, "c": 600, "huge": 1200}, 1000)
        first = await registry.get("a")
        assert await registry.get("a") is first
        await registry.get("b")
        assert loaded(registry) == {"a", "b"}
        assert gc.get_freeze_count() > 100_000, "what is loaded is set apart from Python's collections"
        await registry.get("c")
        assert loaded(registry) == {"b", "c"}, "the one goes whose memory is enough; the small one stays"
        assert gc.get_freeze_count() > 100_000, "and is so again after one has gone"
        entry = registry.find("c")
        entry.users += 1  # a request is at work
        began = time.monotonic()
        with pytest.raises(BudgetError, match="in use by c"):
            await registry.get("a")
        assert 0.5 < time.monotonic() - began < PATIENCE_S and loaded(registry) == {"c"}
        registry.settings = replace(registry.settings, load_wait_s=PATIENCE_S)
        waiting = asyncio.create_task(registry.get("a"))
        await asyncio.sleep(0.2)
        await registry._release(entry)
        assert (await waiting).name == "a" and loaded(registry) == {"a"}
        with pytest.raises(BudgetError, match="too small for this model"):
            await registry.get("huge")
        assert registry.find("huge").error is not None and loaded(registry) == {"a"}
        assert all(limit <= registry.budget_bytes for limit in limits)
        await registry.close()
        assert loaded(registry) == set() and gc.get_freeze_count() == 0
        with pytest.raises(Closing):
            await registry.get("a")

    asyncio.run(scenario())


def test_many_ask_at_once_and_leave_while_it_loads(tiny_store: Path) -> None:
    async def scenario() -> None:
        registry, limits = registry_of(tiny_store, {"a": 100}, 1000)
        asked = [asyncio.create_task(registry.get("a")) for _ in range(8)]
        await asyncio.sleep(0.05)
        for task in asked[:4]:
            task.cancel()
        services = await asyncio.gather(*asked[4:])
        assert len(limits) == 1 and len({id(service) for service in services}) == 1
        entry = registry.find("a")
        assert entry.users == 0
        await registry.let_go_idle(1000)
        assert loaded(registry) == {"a"}
        await registry.let_go_idle(0)
        assert loaded(registry) == set()
        await registry.close()

    asyncio.run(scenario())


def test_an_engine_that_failed_is_replaced(tiny_store: Path) -> None:
    async def scenario() -> None:
        registry, limits = registry_of(tiny_store, {"a": 100}, 1000)
        first = await registry.get("a")
        first.batcher._error = StopIteration("broken")  # type: ignore[assignment]
        second = await registry.get("a")
        assert second is not first and len(limits) == 2 and second.batcher.status().healthy
        await registry.close()

    asyncio.run(scenario())


def test_strict_names(tiny_store: Path) -> None:
    registry, _ = registry_of(tiny_store, {"a": 100}, 1000)
    assert registry.find("gpt-4").spec.name == registry.find(None).spec.name == "a"
    registry, _ = registry_of(tiny_store, {"alpha": 100, "beta": 100}, 1000)
    with pytest.raises(RequestError, match="did you mean beta"):
        registry.find("betta")
    with pytest.raises(RequestError, match="missing"):
        registry.find(None)
