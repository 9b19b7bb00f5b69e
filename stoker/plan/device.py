"""A model of the storage device: lanes that each read one record at a time, demand before prefetch, nothing preempted.

Time in milliseconds of simulated time. Knows jobs, not experts. Jobs arrive in the order of time; between arrivals the
device is advanced lazily.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapreplace

import numpy as np

from stoker.errors import OptionError

JITTER_BLOCK = 4096


@dataclass(frozen=True)
class DeviceModel:
    """`record_ms`: mean time to read one record on one lane. `jitter`: its coefficient of variation (gamma)."""

    record_ms: float
    lanes: int = 1
    jitter: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.record_ms > 0:
            raise OptionError("a read takes time", where="--record-ms", expected="> 0", got=self.record_ms)
        if self.lanes < 1 or self.jitter < 0:
            got = f"{self.lanes} lanes, jitter {self.jitter}"
            raise OptionError("a device that cannot be", where="device", expected="lanes >= 1, jitter >= 0", got=got)


@dataclass(eq=False, slots=True)
class Job:
    """One record to read. `start_ms` and `end_ms` are set when it enters service."""

    submit_ms: float
    prefetch: bool
    start_ms: float = field(default=np.inf)
    end_ms: float = field(default=np.inf)


class Device:
    """Serves jobs. `busy_ms`: total service time; `served`: jobs that entered service."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._free_at = [0.0] * model.lanes  # heap: when each lane is free
        self._demand: deque[Job] = deque()
        self._prefetch: deque[Job] = deque()
        self._rng = np.random.default_rng(model.seed)
        self._services: list[float] = []
        self.busy_ms = 0.0
        self.served = 0

    def submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            (self._prefetch if job.prefetch else self._demand).append(job)

    def advance(self, until_ms: float) -> None:
        """Start whatever a lane is free for before `until_ms`."""
        while self._free_at[0] < until_ms and (self._demand or self._prefetch):
            self._serve((self._demand or self._prefetch).popleft())

    def finish_demand(self) -> None:
        """Give every waiting demand its times: nothing that arrives later can come before it."""
        while self._demand:
            self._serve(self._demand.popleft())

    def withdraw(self, jobs: Iterable[Job]) -> list[Job]:
        """Take back prefetches that have not entered service; returns them."""
        wanted = {id(job) for job in jobs if job.start_ms == np.inf}
        if not wanted:
            return []
        withdrawn = [job for job in self._prefetch if id(job) in wanted]
        self._prefetch = deque(job for job in self._prefetch if id(job) not in wanted)
        return withdrawn

    def _serve(self, job: Job) -> None:
        service_ms = self._service_ms()
        job.start_ms = max(self._free_at[0], job.submit_ms)
        job.end_ms = job.start_ms + service_ms
        heapreplace(self._free_at, job.end_ms)
        self.busy_ms += service_ms
        self.served += 1

    def _service_ms(self) -> float:
        if self._model.jitter == 0:
            return self._model.record_ms
        if not self._services:
            shape = self._model.jitter**-2
            self._services = self._rng.gamma(shape, self._model.record_ms / shape, JITTER_BLOCK).tolist()
        return self._services.pop()
