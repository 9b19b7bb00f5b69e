"""What the forecast assumes of routing: misses per event at a number of slots, distinct experts in a prompt.

Three sources: curves measured on recorded routes (data/routing.json), uniform routing in closed form, and a trace of
the model itself, replayed. Each says in words what it is. Knows no time.
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stoker.errors import OptionError
from stoker.plan.replay import replay
from stoker.plan.routes import Routes, load_routes
from stoker.plan.sizes import ModelShape

TABLE = Path(__file__).parent / "data" / "routing.json"
UNIFORM, TYPICAL, LOCAL, SCATTERED = "uniform", "general", "code", "math"
FEW_EXPERTS = 32  # below it, the curves of fine-grained models say nothing
REPLAYED_TOKENS = 1200


class Routing(Protocol):
    """`name` and `words` say what is assumed."""

    @property
    def name(self) -> str: ...

    @property
    def words(self) -> str: ...

    def misses(self, slots: float, experts: int, top_k: int, policy: str) -> np.ndarray:
        """Share of events with 0, 1, .. top_k misses, float [top_k + 1], at so many slots a pool of `experts`."""
        ...

    def distinct(self, tokens: int, experts: int, top_k: int) -> float:
        """Distinct experts that a layer needs for so many tokens that follow each other."""
        ...

    def strange(self, slots: float, experts: int) -> float:
        """How often an expert that is drawn by its popularity, as a wrong guess is, is not in memory."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Every expert equally likely, tokens independent: what random weights and random ids come close to."""

    name: str = UNIFORM
    words: str = "uniform routing: every expert equally likely, nothing repeats (the worst case for a cache)"

    def misses(self, slots: float, experts: int, top_k: int, policy: str) -> np.ndarray:
        return binomial(top_k, 1 - min(1.0, slots / experts))

    def distinct(self, tokens: int, experts: int, top_k: int) -> float:
        return experts * (1 - (1 - top_k / experts) ** tokens)

    def strange(self, slots: float, experts: int) -> float:
        return 1 - min(1.0, slots / experts)


@dataclass(frozen=True)
class Curve:
    """Measured on recorded routes; used at the same share of experts in memory for models of another size."""

    name: str
    words: str
    experts: int
    top_k: int
    slots: tuple[int, ...]
    misses_per_event: dict[str, np.ndarray]  # policy -> [slots, top_k + 1]
    windows: tuple[int, ...]
    distinct_experts: tuple[float, ...]
    strange_guesses: tuple[float, ...]  # at each of `slots`

    def misses(self, slots: float, experts: int, top_k: int, policy: str) -> np.ndarray:
        rows = self.misses_per_event.get(policy)
        if rows is None:
            known = f"{', '.join(self.misses_per_event)}, or --routing with routes of the model"
            what = f"no curve of routing {self.name} for this policy"
            raise OptionError(what, where="--policy", expected=known, got=policy)
        place = float(np.interp(slots / experts * self.experts, self.slots, np.arange(len(self.slots))))
        low = min(int(place), len(self.slots) - 2)
        shares = (low + 1 - place) * rows[low] + (place - low) * rows[low + 1]
        if top_k == self.top_k:
            return shares
        return spread_over(shares, top_k)

    def distinct(self, tokens: int, experts: int, top_k: int) -> float:
        same_load = tokens * (top_k / self.top_k) * (self.experts / experts)
        logs = np.log(np.array(self.windows, float))
        found = float(np.interp(math.log(max(1e-9, same_load)), logs, self.distinct_experts))
        if same_load < 1:
            found = self.top_k * same_load
        return min(float(experts), max(float(top_k), found / self.experts * experts))

    def strange(self, slots: float, experts: int) -> float:
        return float(np.interp(slots / experts * self.experts, self.slots, self.strange_guesses))


class Replayed:
    """Routes of the model itself: event-atomic replay at exactly the slots that it would have.

    counted: tokens first .. end - 1 count, those before fill the cache; None: the first tenth fills it.
    """

    def __init__(self, routes: Routes, words: str, counted: tuple[int, int] | None = None) -> None:
        self.name, self.words, self.routes = routes.name, words, routes
        self._warm_up: int | None = None
        end = REPLAYED_TOKENS
        if counted is not None:
            self._warm_up, end = counted
        self._part = routes.between(0, end)

    def misses(self, slots: float, experts: int, top_k: int, policy: str) -> np.ndarray:
        size = max(int(slots), self._part.k)
        if size >= experts:
            return np.eye(1, top_k + 1)[0]
        counts = np.zeros(top_k + 1)
        for row in self._counted(policy, size):
            counts += np.bincount(row, minlength=top_k + 1)[: top_k + 1]
        return counts / counts.sum()

    @lru_cache(maxsize=64)  # noqa: B019  # lives as long as one command
    def _strange(self, slots: int) -> float:
        return strange_uses(self._part, slots)

    @lru_cache(maxsize=64)  # noqa: B019
    def _counted(self, policy: str, size: int) -> list[np.ndarray]:
        outcome = replay(self._part, policy, size, self._warm_up)
        pairs = zip(self._part.streams, outcome.misses, strict=True)
        return [misses[np.searchsorted(stream.step, outcome.warm_up_steps) :] for stream, misses in pairs]

    def distinct(self, tokens: int, experts: int, top_k: int) -> float:
        steps = min(tokens, self.routes.steps)
        found = []
        for stream in self.routes.streams:
            end = int(np.searchsorted(stream.step, steps))
            found.append(len(np.unique(stream.experts[: stream.starts[end]])))
        return float(np.mean(found))

    def strange(self, slots: float, experts: int) -> float:
        return self._strange(int(slots)) if slots < experts else 0.0


def strange_uses(routes: Routes, slots: int) -> float:
    """Share of all uses that go to experts outside a pool's `slots` most recently used, at four places of the routes'
    later half.

    Which policy kept them matters little: what is popular was used lately.
    """
    strange = []
    for stream in routes.streams:
        uses = np.bincount(stream.experts)
        for event in np.linspace(len(stream) // 2, len(stream) - 1, 40, dtype=int)[::10]:
            latest_first = stream.experts[: stream.starts[event]][::-1]
            experts, latest = np.unique(latest_first, return_index=True)
            resident = experts[np.argsort(latest)][:slots]
            strange.append(1 - uses[resident].sum() / uses.sum())
    return float(np.mean(strange))


def binomial(n: int, p: float) -> np.ndarray:
    """Probabilities of 0 .. n, float [n + 1]."""
    return np.array([math.comb(n, m) * p**m * (1 - p) ** (n - m) for m in range(n + 1)])


def spread_over(shares: np.ndarray, top_k: int) -> np.ndarray:
    """The same distribution of the share of misses for another k: each share of misses as a coin for each expert."""
    k = len(shares) - 1
    return np.sum([weight * binomial(top_k, m / k) for m, weight in enumerate(shares)], axis=0)


def hit_rate(misses: np.ndarray) -> float:
    k = len(misses) - 1
    return 1 - float(misses @ np.arange(k + 1)) / k


@lru_cache
def curves() -> dict[str, Curve]:
    """The committed curves by short name: general, code, math, medical."""
    tables: list[dict[str, Any]] = json.loads(TABLE.read_text())["tables"]
    return {curve.name: curve for curve in map(_curve, tables)}


def _curve(table: dict[str, Any]) -> Curve:
    short = table["name"].split("_")[-1]
    policies = {name: np.array(one["misses_per_event"]) for name, one in table["policies"].items()}
    return Curve(
        name=short,
        words=f"routing as measured on Qwen3-30B-A3B reading {short} text ({table['tokens']} tokens, "
        f"{table['layers']} layers, {table['experts']} experts, top {table['top_k']})",
        experts=table["experts"],
        top_k=table["top_k"],
        slots=tuple(table["slots"]),
        misses_per_event=policies,
        windows=tuple(table["windows"]),
        distinct_experts=tuple(table["distinct"]),
        strange_guesses=tuple(table["strange"]),
    )


def routing_named(name: str, option: str = "--routing") -> Routing:
    """A routing by name (uniform, general, code, math, medical) or from a file that `stoker simulate` reads."""
    if name == UNIFORM:
        return Uniform()
    if name in curves():
        return curves()[name]
    if not Path(name).exists() and not name.startswith("synthetic:"):
        known = ", ".join([UNIFORM, *curves()])
        raise OptionError("unknown routing", where=option, expected=f"{known}, or a file of routes", got=name)
    routes = load_routes(name)
    return Replayed(routes, f"the routes in {name}, replayed ({min(routes.steps, REPLAYED_TOKENS)} tokens)")


def routing_for(name: str, shape: ModelShape, option: str = "--routing") -> Routing:
    """A routing by name or file, for one model. Raises OptionError where the routes are those of another shape."""
    routing = routing_named(name, option)
    if isinstance(routing, Replayed):
        check_shape(routing.routes, shape, f"{option} {name}")
    return routing


def check_shape(routes: Routes, shape: ModelShape, where: str) -> None:
    """Raises OptionError where a model of this shape cannot have taken these routes. Only a trace whose steps held
    several sequences may need more experts an event than a token has."""
    layers, largest = routes.layers, max(int(stream.experts.max(initial=0)) for stream in routes.streams)
    least = min(int(stream.needed.min(initial=routes.k)) for stream in routes.streams)
    wrong_k = least < shape.top_k or least == routes.k != shape.top_k
    if layers < shape.moe_layers or largest >= shape.experts or wrong_k:
        raise OptionError(
            "routes of another model's shape",
            where=where,
            expected=f"at least {shape.moe_layers} layers, {shape.top_k} experts a token, ids below {shape.experts}",
            got=f"{layers} layers, {routes.k} experts a token, ids up to {largest}",
            remedy="record this model with `stoker run --trace FILE`, or name general, code, math, medical, uniform",
        )


def assumed(experts: int) -> tuple[Routing, Routing, Routing]:
    """(typical, worst, best) where nothing is known of the model."""
    if experts < FEW_EXPERTS:
        return Uniform(), Uniform(), Uniform()
    return curves()[TYPICAL], curves()[SCATTERED], curves()[LOCAL]
