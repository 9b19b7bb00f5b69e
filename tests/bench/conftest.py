"""A miniature store of the 30B shape, routes that fit it, and slots that can be granted one by one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from stoker.cli.main import build_app
from stoker.runtime import ledger, plan

LAYERS, EXPERTS, TOP_K = 4, 16, 4


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("bench") / "mini"
    done = CliRunner().invoke(build_app(), ["synth", "qwen3-30b-a3b-mini", str(store)])
    assert done.exit_code == 0, done.output
    return store


@pytest.fixture(scope="session")
def routes_LTK() -> np.ndarray:
    """Routes with reuse: each token keeps about two thirds of the experts of the one before."""
    random = np.random.default_rng(5)
    routes = np.empty((LAYERS, 150, TOP_K), np.int16)
    for layer in range(LAYERS):
        now = random.permutation(EXPERTS)[:TOP_K]
        for token in range(routes.shape[1]):
            kept = now[random.random(TOP_K) < 2 / 3]
            others = np.setdiff1d(np.arange(EXPERTS), kept)
            now = np.concatenate([kept, random.permutation(others)[: TOP_K - len(kept)]])
            routes[layer, token] = now
    return routes


@pytest.fixture(scope="session")
def npz(routes_LTK: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("routes") / "r.npz"
    np.savez(file, experts=routes_LTK)
    return file


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Grant so many slots a layer: a budget cannot be cut that finely around a test process of 400 MB."""

    def grant(count: int) -> None:
        def planned(budget: int, needs: ledger.Needs, **more: Any) -> ledger.Ledger:
            return dataclasses.replace(ledger.plan_memory(budget, needs, **more), slots=(count,) * len(needs.pools))

        monkeypatch.setattr(plan, "plan_memory", planned)

    return grant
