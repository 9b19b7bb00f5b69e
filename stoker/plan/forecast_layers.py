"""Decoding layer by layer in simulated time: demand reads, reads ahead for the next layer, experts as they land.

The device serves reads one after the other at its rate; a read from idle has its latency on top. While the processor
computes, reads get on more slowly than while it waits, by a measured share. The engine's rules are kept: reads ahead go
out behind a layer's demand, those that have not started when their layer comes are given up.
Deterministic (seeded); milliseconds of simulated time. Knows no model and no files.
"""

from dataclasses import dataclass

import numpy as np

LAYERS = 2400  # simulated; a few dozen tokens
WARM_UP = 48


@dataclass(frozen=True)
class LayerTimes:
    """between_ms: from a layer's last expert to the next layer's need (attention, router, fixed costs); streaming_ms:
    the part of it in which all threads walk through weights. together_ms, alone_ms: one expert's computing, in company
    and alone. first_ms: a read from idle; each_ms: each further one. progress: how fast reads get on while all threads
    walk through weights, 1 where computing does not disturb them."""

    between_ms: float
    together_ms: float
    alone_ms: float
    first_ms: float
    each_ms: float
    streaming_ms: float = 0.0
    progress: float = 1.0


@dataclass(frozen=True)
class ReadAhead:
    """most: reads that a layer sends out for the next, of guesses at all of its choices; recall: of a guess; strange:
    how often a wrong guess is not in memory, and is read for nothing; depth: reads in flight, which are not given up
    any more."""

    most: int
    recall: float
    strange: float
    depth: int = 1


@dataclass(frozen=True)
class LayerFigures:
    """Means of a layer: ms computing experts, ms waiting, reads that were demanded and that were sent ahead."""

    experts_ms: float
    stall_ms: float
    demand_reads: float
    ahead_reads: float
    on_time: float  # of the misses, those that a read ahead had brought

    @property
    def reads(self) -> float:
        return self.demand_reads + self.ahead_reads


def simulate(missed: np.ndarray, times: LayerTimes, ahead: ReadAhead | None, seed: int = 0) -> LayerFigures:
    """`missed`: share of events with 0 .. k misses, as the cache alone would have them."""
    if missed[0] >= 1 - 1e-12:
        k = len(missed) - 1
        return LayerFigures(k * times.together_ms, 0.0, 0.0, 0.0, 0.0)
    run = _Run(len(missed) - 1, times, ahead, np.random.default_rng(seed))
    misses = run.random.choice(len(missed), size=LAYERS + WARM_UP, p=missed / missed.sum())
    for index, count in enumerate(misses):
        run.layer(int(count), int(misses[index + 1]) if index + 1 < len(misses) else 0)
        if index == WARM_UP - 1:
            run.totals[:] = 0
    return LayerFigures(*(float(total) for total in run.totals / LAYERS))


class _Run:
    """Two clocks, the processor's and the device's (which falls behind while the processor computes), when the device
    is free, and what is being read ahead for the layer to come."""

    def __init__(self, top_k: int, times: LayerTimes, ahead: ReadAhead | None, random: np.random.Generator) -> None:
        self.top_k, self.times, self.ahead, self.random = top_k, times, ahead, random
        self.clock_ms = self.device_ms = self.free_ms = self.submitted_ms = 0.0  # all but the first: the device's clock
        self.right = self.wrong = 0  # reads ahead that will be needed, and those that will not
        self.totals = np.zeros(5)

    def layer(self, misses: int, next_misses: int) -> None:
        self._pass(self.times.between_ms, streaming_ms=self.times.streaming_ms)
        need_ms, started_ms = self.device_ms, self.clock_ms
        landing, sent = self._landing(need_ms)
        demanded = misses - len(landing)
        ends = sorted(landing + [self._serve(need_ms) for _ in range(demanded)])
        self._send_ahead(need_ms, next_misses)
        ready = sum(end <= need_ms for end in ends)
        present = self.top_k - misses + ready
        busy = present * (self.times.together_ms if present > 1 else self.times.alone_ms)
        self._compute(busy)
        for end in ends[ready:]:
            self._pass(max(0.0, end - self.device_ms))
            self._compute(self.times.alone_ms)
            busy += self.times.alone_ms
        self.totals += (busy, self.clock_ms - started_ms - busy, demanded, sent, ready)

    def _compute(self, ms: float) -> None:
        self._pass(ms, streaming_ms=ms)

    def _pass(self, ms: float, streaming_ms: float = 0.0) -> None:
        self.clock_ms += ms
        self.device_ms += ms - min(ms, streaming_ms) * (1 - self.times.progress)

    def _serve(self, submitted_ms: float) -> float:
        """When a read that is accepted now will have landed."""
        if self.free_ms <= submitted_ms:
            self.free_ms = submitted_ms + self.times.first_ms
        else:
            self.free_ms += self.times.each_ms
        return self.free_ms

    def _landing(self, need_ms: float) -> tuple[list[float], int]:
        """Ends of the right guesses that had started before the need, and how many reads ahead had started at all."""
        landing: list[float] = []
        sent = 0
        guesses = [True] * self.right + [False] * self.wrong
        self.random.shuffle(guesses)
        ends = [self.free_ms]
        depth = self.ahead.depth if self.ahead else 1
        for right in guesses:
            accepted_ms = ends[-depth] if len(ends) >= depth else 0.0
            if max(accepted_ms, self.submitted_ms) >= need_ms:
                break
            end = self._serve(self.submitted_ms)
            ends.append(end)
            sent += 1
            if right:
                landing.append(end)
        return landing, sent

    def _send_ahead(self, now_ms: float, next_misses: int) -> None:
        self.submitted_ms, self.right, self.wrong = now_ms, 0, 0
        if self.ahead is None:
            return
        right = int(self.random.binomial(next_misses, self.ahead.recall))
        wrong = int(self.random.binomial(self.top_k, (1 - self.ahead.recall) * self.ahead.strange))
        while right + wrong > self.ahead.most:
            if self.random.random() < right / (right + wrong):
                right -= 1
            else:
                wrong -= 1
        self.right, self.wrong = right, wrong
