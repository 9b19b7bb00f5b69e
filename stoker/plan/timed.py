"""Replay with time: when reads start and end, what the compute waits for, what prefetch buys and wastes.

A layer takes `attention_ms`, then its experts are known (the need); reads of missing experts go out, those that were
prefetched and landed count as on time; when all are there the experts take `experts_ms`. Prefetches go out at the
need of an earlier event, behind all demand; what has not started when its event comes is cancelled or becomes demand. A
prefetch that proves wrong is dropped: the cache sees the same misses as without. Milliseconds of simulated time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import OptionError
from stoker.plan.device import Device, DeviceModel, Job
from stoker.plan.predictors import Predictor, Step, pools_of, steps_of
from stoker.plan.replay import policy_for
from stoker.plan.routes import Routes
from stoker.residency.policies import Policy
from stoker.trace.measures import latency, share


@dataclass(frozen=True)
class LayerTime:
    """Compute of one layer for one token, and of the rest of the model once a token (head, sampling)."""

    attention_ms: float = 0.6
    experts_ms: float = 0.4
    rest_ms: float = 0.0


@dataclass(frozen=True)
class Prefetch:
    """`most`: prefetches an event may send out (reads that fit one layer's time are what pays)."""

    predictor: Predictor
    most: int


@dataclass
class Tally:
    """Counts over the tokens after the warm-up. `needed_cold`: needed experts that were not in the cache."""

    token_ms: list[float] = field(default_factory=list)
    stall_ms: list[float] = field(default_factory=list)
    needed: int = 0
    needed_cold: int = 0
    on_time: int = 0
    late: int = 0  # prefetched, in service at the need
    lateness_ms: list[float] = field(default_factory=list)
    demand_reads: int = 0
    prefetch_reads: int = 0  # entered service
    prefetch_used: int = 0
    service_ms: float = 0.0

    def figures(self, lanes: int) -> dict[str, Any]:
        """The measures by name; times per token in ms."""
        tokens = len(self.token_ms)
        stall = sum(self.stall_ms)
        return {
            "tokens": tokens,
            "token_ms": latency(self.token_ms),
            "tokens_per_s": share(1e3 * tokens, sum(self.token_ms)),
            "stall_ms_per_token": share(stall, tokens),
            "stall_ms": latency(self.stall_ms),
            "cache_hit_rate": 1 - self.needed_cold / self.needed,
            "prefetch_hit_rate": self.on_time / self.needed,
            "ready_rate": 1 - (self.needed_cold - self.on_time) / self.needed,
            "reads_per_token": share(self.demand_reads + self.prefetch_reads, tokens),
            "on_time_ratio": share(self.on_time, self.needed_cold),
            "late_ratio": share(self.late, self.needed_cold),
            "lateness_ms": latency(self.lateness_ms),
            "miss_recall": share(self.prefetch_used, self.needed_cold),
            "waste_ratio": share(self.prefetch_reads - self.prefetch_used, self.prefetch_reads),
            "waste_of_all_reads": share(
                self.prefetch_reads - self.prefetch_used, self.demand_reads + self.prefetch_reads
            ),
            "overlap_efficiency": 1 - stall / (self.service_ms / lanes) if self.service_ms else None,
        }


def replay_timed(
    routes: Routes,
    policy: str,
    slots: int | Sequence[int],
    device: DeviceModel,
    layer_time: LayerTime | None = None,
    prefetch: Prefetch | None = None,
    warm_up_steps: int = 200,
    global_cache: bool = False,
) -> dict[str, Any]:
    """Figures of decoding `routes` with that cache on that device (docs/metrics.md). Offline policies are refused.

    `slots`: a number for each pool, one per pool, or with `global_cache` one number for all pools together.
    """
    if policy.partition(":")[0] == "min":
        raise OptionError("offline policies have no timed replay", where="--policy", got=policy)
    if warm_up_steps >= routes.steps:
        raise OptionError("warm-up leaves nothing", where="--warm-up", expected=f"< {routes.steps}", got=warm_up_steps)
    pools = pools_of(routes)
    caches = _caches(routes, policy, slots, global_cache)
    run = _Run(steps_of(routes), pools, caches, routes.experts if global_cache else 0, device, prefetch)
    return run.all(layer_time or LayerTime(), warm_up_steps).figures(device.lanes)


def _caches(routes: Routes, policy: str, slots: int | Sequence[int], global_cache: bool) -> list[Policy]:
    """One policy object a stream; the same one for all with a global cache."""
    if global_cache:
        from stoker.plan.replay import merge

        assert isinstance(slots, int)
        return [policy_for(policy, slots, merge(routes)[0])] * len(routes.streams)
    sizes = [slots] * len(routes.streams) if isinstance(slots, int) else slots
    return [policy_for(policy, size, stream) for size, stream in zip(sizes, routes.streams, strict=True)]


class _Run:
    """The state of one timed replay: the clock, the device, and the prefetches on their way by target."""

    def __init__(
        self,
        steps: list[Step],
        pools: list[int],
        caches: list[Policy],
        key_stride: int,
        device: DeviceModel,
        prefetch: Prefetch | None,
    ) -> None:
        self.steps, self.pools, self.caches, self.prefetch = steps, pools, caches, prefetch
        self.key_base = [pool * key_stride for pool in pools]
        self.device = Device(device)
        self.clock_ms = 0.0
        self.coming: dict[tuple[int, int], dict[int, Job]] = {}  # (step, place) -> expert -> prefetch
        self.tally = Tally()

    def all(self, layer_time: LayerTime, warm_up_steps: int) -> Tally:
        busy_before = 0.0
        for index, step in enumerate(self.steps):
            if index == warm_up_steps:
                self.tally, busy_before = Tally(), self.device.busy_ms
            started_ms, stall_ms = self.clock_ms, 0.0
            for place, event in enumerate(step):
                self.clock_ms += layer_time.attention_ms
                stall_ms += self._event(index, place, event)
                self.clock_ms += layer_time.experts_ms
            self.clock_ms += layer_time.rest_ms
            self.tally.token_ms.append(self.clock_ms - started_ms)
            self.tally.stall_ms.append(stall_ms)
        self.tally.service_ms = self.device.busy_ms - busy_before
        return self.tally

    def _event(self, index: int, place: int, event: list[int]) -> float:
        """One layer at its need: reads, cache update, prefetches. Returns the stall; moves the clock by it."""
        need_ms = self.clock_ms
        self.device.advance(need_ms)
        base, cache = self.key_base[place], self.caches[self.pools[place]]
        keys = [base + expert for expert in event]
        cold = [expert for expert in event if base + expert not in cache.resident]
        jobs = self._reads(index, place, cold, need_ms)
        cache.touch(keys)
        for expert in cold:
            cache.admit(base + expert, keys)
        if self.prefetch is not None:
            self._send_ahead(index, place, event, need_ms)
        ready_ms = max((job.end_ms for job in jobs), default=need_ms)
        stall_ms = max(0.0, ready_ms - need_ms)
        self.clock_ms += stall_ms
        self.tally.needed += len(event)
        self.tally.needed_cold += len(cold)
        return stall_ms

    def _reads(self, index: int, place: int, cold: list[int], need_ms: float) -> list[Job]:
        """The reads that this event waits for: prefetches that came or are coming, and demand for the rest."""
        tally = self.tally
        coming = self.coming.pop((index, place), {})
        withdrawn = {id(job) for job in self.device.withdraw(coming.values())} if coming else set()
        jobs, demand = [], []
        for expert in cold:
            job = coming.pop(expert, None)
            if job is None or id(job) in withdrawn:
                demand.append(Job(need_ms, prefetch=False))
                continue
            jobs.append(job)
            tally.prefetch_reads += 1
            tally.prefetch_used += 1
            if job.end_ms <= need_ms:
                tally.on_time += 1
            else:
                tally.late += 1
                tally.lateness_ms.append(job.end_ms - need_ms)
        tally.prefetch_reads += sum(id(job) not in withdrawn for job in coming.values())
        tally.demand_reads += len(demand)
        self.device.submit(demand)
        self.device.finish_demand()
        return jobs + demand

    def _send_ahead(self, index: int, place: int, event: list[int], now_ms: float) -> None:
        prefetch = self.prefetch
        assert prefetch is not None
        target = (index, place + 1) if prefetch.predictor.reach == "layer" else (index + 1, place)
        if target[0] >= len(self.steps) or target[1] >= len(self.pools):
            return
        truth = self.steps[target[0]][target[1]]
        resident, base = self.caches[self.pools[target[1]]].resident, self.key_base[target[1]]
        wanted: dict[int, Job] = {}
        for expert in prefetch.predictor.ranked(place, event, truth):
            if len(wanted) == prefetch.most:
                break
            if base + expert not in resident:
                wanted[expert] = Job(now_ms, prefetch=True)
        self.device.submit(wanted.values())
        self.coming[target] = wanted
