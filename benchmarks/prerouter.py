"""The prerouter against the best exact path, paired: the same routes, the same store, the same budget, round by round.

    python benchmarks/prerouter.py STORE [--routes FILE.npz] [--budgets 3GiB ...] [--k 2 4 8] [--rounds 2]

What is compared is how reads are hidden, so both arms follow the same given routes: `uniform` ones (drawn anew for
every token: what untrained heads give, the worst case of every cache) and recorded ones (--routes, their first K
choices). `exact` reads ahead by a look at the next gate with the recall that is measured for real gates
(stoker/routing/replay.py).
`prerouter` evaluates real heads (random weights, all their cost) and its answers are then turned into the given routes;
its first MoE layer keeps its gate. `next` does so with heads that see the token that the route is for, all of them when
its step begins.

Per cell: step time, stall and bytes a token, hit rate, peak memory; the device's own rate measured beside each round;
read_ms = bytes / rate, compute_ms = step - stall, bound = the larger, ratio = step / bound (bar: at most 1.15). Cells
that the result file has already are not run again.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.adapter.init import init_adapter
from stoker.bench.device import device_rate
from stoker.bench.interleave import _hand_back, _peak_rss
from stoker.bench.provenance import spread, write_result
from stoker.routing.prerouter import Bank, Prerouter
from stoker.routing.replay import RouteReplay, load_experts
from stoker.routing.rule import LayerInfo, Rows
from stoker.routing.select import LayerRule
from stoker.runtime.model import Options, Runtime, load
from stoker.store.reader import open_store

RESULT = Path(__file__).parent / "results" / "prerouter.json"
PROMPT = list(range(7, 11))
UNIFORM_TOKENS = 512


class FewerChoices(RouteReplay):
    """Recorded routes with fewer experts a token than the gate's; weights are the gate's first ones."""

    def attach(self, layers: Any) -> None:
        assert len(layers) <= self.experts_LTK.shape[0]

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(self.take(layer, rows.step, len(hidden_TD)))
        weights = weights_TK[:, : index.shape[1]]
        return index, weights / weights.sum(-1, keepdim=True)


class GivenRoutes:
    """A bank whose heads are computed and whose answer is then a given route, with the weights of the heads' own."""

    def __init__(self, bank: Bank, layers: list[LayerInfo]) -> None:
        self._bank, self._layer_after = bank, {info.layer: info.index + 1 for info in layers}
        self.routes_LTK = np.empty(0)
        self._at: dict[int, int] = {}

    @property
    def owners(self) -> Any:
        return self._bank.owners

    @property
    def sees_next(self) -> bool:
        return self._bank.sees_next

    def seek(self, routes_LTK: np.ndarray, token: int) -> None:
        """The next answer of every head is the route of this token."""
        self.routes_LTK, self._at = routes_LTK, dict.fromkeys(self.owners, token)

    def route(
        self,
        owner: int,
        hidden_TD: Tensor,
        used_TK: Tensor,
        before_TK: Tensor,
        rule: LayerRule,
        top_k: int,
        ahead_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        _, weights_TK = self._bank.route(owner, hidden_TD, used_TK, before_TK, rule, top_k, ahead_TD)
        first = self._at[owner]
        self._at[owner] = first + len(weights_TK)
        routes_TK = self.routes_LTK[self._layer_after[owner]]
        wanted = routes_TK[np.arange(first, first + len(weights_TK)) % len(routes_TK)]
        return torch.from_numpy(wanted), weights_TK


def uniform_routes(layers: int, experts: int, top_k: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.argsort(random.random((layers, UNIFORM_TOKENS, experts)), -1)[..., :top_k]


def opened(arm: str, arguments: argparse.Namespace, memory: str, adapters: dict[str, Path], top_k: int) -> Runtime:
    options: dict[str, Any] = {"memory": memory, "ctx_size": 512, "threads": arguments.threads}
    options |= {"policy": arguments.policy}
    if arm == "exact":
        return load(arguments.store, Options(**options))
    runtime = load(arguments.store, Options(**options, adapter=str(adapters[arm]), routing="prerouter"))
    rule = runtime.rule
    assert isinstance(rule, Prerouter) and rule.top_k == top_k
    rule.bank = GivenRoutes(rule.bank, rule._layers)
    return runtime


def follow(runtime: Runtime, routes_LTK: np.ndarray, replay: FewerChoices | None) -> None:
    """Both arms: the prompt takes the first tokens of the routes, answers what follows."""
    rule = runtime.rule
    if isinstance(rule, Prerouter):
        assert isinstance(rule.bank, GivenRoutes)
        rule.bank.seek(routes_LTK, len(PROMPT))
        return
    assert replay is not None
    replay.experts_LTK, replay.tokens = np.ascontiguousarray(routes_LTK), routes_LTK.shape[1]
    replay.seek(0)


def session(runtime: Runtime, warm: int, steps: int) -> dict[str, Any]:
    sequence = runtime.new_sequence()
    runtime.prefill(sequence, PROMPT)
    for token in range(warm):
        runtime.decode([sequence], [token + 20])
    before, times_ms = runtime.stats(), []
    for token in range(steps):
        began = time.perf_counter()
        runtime.decode([sequence], [(token + 200) % runtime.vocab_size])
        times_ms.append(1e3 * (time.perf_counter() - began))
    after = runtime.stats()
    sequence.close()
    grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    step_ms = sum(times_ms) / steps
    return {
        "step_ms": step_ms,
        "step_ms_median": sorted(times_ms)[steps // 2],
        "tok_s": 1e3 / step_ms,
        "stall_ms": grown["stall_ns"] / 1e6 / steps,
        "read_bytes": (grown["demand_bytes"] + grown["prefetch_bytes"]) / steps,
        "hit_rate": grown["hits"] / max(1, grown["hits"] + grown["misses"]),
        "wasted_bytes": grown["prefetch_wasted_bytes"] / steps,
        "fallbacks": grown.get("prerouter_fallbacks", 0),
        "dropped_experts": grown["dropped_experts"],
    }


def measure(
    arm: str,
    arguments: argparse.Namespace,
    memory: str,
    adapters: dict[str, Path],
    top_k: int,
    kinds: dict[str, np.ndarray],
) -> dict[str, dict[str, Any]]:
    """One load; a session for each kind of routes."""
    _hand_back()
    runtime = opened(arm, arguments, memory, adapters, top_k)
    try:
        replay = None
        if arm == "exact":
            replay = FewerChoices(next(iter(kinds.values())))
            runtime.follow(replay)
        found = {}
        for kind, routes_LTK in kinds.items():
            follow(runtime, routes_LTK, replay)
            found[kind] = session(runtime, arguments.warm, arguments.steps)
        about = {"rss_peak_bytes": _peak_rss(), "ledger": runtime.ledger(), "load_s": runtime.load_seconds}
        return {kind: figures | about for kind, figures in found.items()}
    finally:
        runtime.close()
        _hand_back()


def bounded(figures: dict[str, Any], rate: float) -> dict[str, Any]:
    """Beside what reads and arithmetic alone would take."""
    read_ms, compute_ms = 1e3 * figures["read_bytes"] / rate, figures["step_ms"] - figures["stall_ms"]
    bound_ms = max(read_ms, compute_ms)
    return figures | {
        "device_bytes_per_s": rate, "read_ms": read_ms, "compute_ms": compute_ms, "bound_ms": bound_ms,
        "ratio": figures["step_ms"] / bound_ms,
    }  # fmt: skip


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("step_ms", "tok_s", "stall_ms", "read_bytes", "hit_rate", "compute_ms", "read_ms", "ratio")
    return {name: spread([run[name] for run in runs]) for name in names} | {"runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--routes", type=Path, help="an .npz with `experts` [L, T, K], or a stoker trace")
    parser.add_argument("--budgets", nargs="+", default=["3GiB", "4GiB", "8GiB", "12GiB"])
    parser.add_argument("--k", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--arms", nargs="+", default=["exact", "prerouter", "next"])
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    layers, experts = sum(len(pool.layers) for pool in store.pools), min(pool.experts for pool in store.pools)
    recorded = None if arguments.routes is None else load_experts(arguments.routes)
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cells": {}}
    result |= {"store": store.fingerprint, "layers": layers, "policy": arguments.policy, "steps": arguments.steps}
    arms = arguments.arms
    with tempfile.TemporaryDirectory() as folder:
        for top_k in arguments.k:
            adapters = {arm: Path(folder) / f"{arm}-k{top_k}" for arm in arms if arm != "exact"}
            for arm, adapter in adapters.items():
                init_adapter(store, adapter, top_k=top_k, random=True, next_token=arm == "next")
            kinds = {"uniform": uniform_routes(layers, experts, top_k)}
            if recorded is not None:
                kinds["recorded"] = np.ascontiguousarray(recorded[:layers, :, :top_k], dtype=np.int64)
            for memory in arguments.budgets:
                names = {(arm, kind): f"{memory} K{top_k} {kind} {arm}" for arm in arms for kind in kinds}
                if all(name in result["cells"] for name in names.values()):
                    continue
                runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
                for round_ in range(arguments.rounds):
                    rate = device_rate(arguments.store, seconds=1.0)
                    for arm in arms if round_ % 2 == 0 else arms[::-1]:
                        for kind, figures in measure(arm, arguments, memory, adapters, top_k, kinds).items():
                            runs[names[arm, kind]].append(bounded(figures, rate))
                result["cells"] |= {name: summary(found) for name, found in runs.items()}
                write_result(arguments.out, {k: v for k, v in result.items() if k != "provenance"})
                for name, found in runs.items():
                    cell = result["cells"][name]
                    middle = {key: cell[key]["median"] for key in cell if key != "runs"}
                    print(
                        f"{name:32} {middle['tok_s']:7.2f} tok/s  step {middle['step_ms']:7.1f}  stall "
                        f"{middle['stall_ms']:7.1f} ms  {middle['read_bytes'] / 1e6:7.1f} MB/token  hits "
                        f"{middle['hit_rate']:.0%}  {middle['ratio']:.2f} of the bound, n {len(found)}",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip


if __name__ == "__main__":
    main()
