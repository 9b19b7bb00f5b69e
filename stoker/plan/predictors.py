"""Guesses of what an event will need, from what the simulator may know at that time. Each ranks candidates, best first.

A predictor looks from one event (step, place in the step) to a later one: `reach` says which. Guesses never change a
route. Knows ids and counts only.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from stoker.errors import OptionError
from stoker.plan.routes import Routes

Step = list[list[int]]  # the events of one step: what each layer needs


class Predictor(ABC):
    """`reach`: "layer" looks one event ahead inside the step, "token" at the same layer of the next step."""

    reach: ClassVar[str]

    @abstractmethod
    def ranked(self, place: int, chosen: list[int], truth: list[int]) -> list[int]:
        """Candidates for the target of event `place`, which chose `chosen`. `truth` is what the target will need: only
        models of a predictor that we do not have (the stale gate) may look at it."""


class StaleGate(Predictor):
    """The next layer's gate on this layer's hidden state, as a coin: each needed expert is found with probability
    `recall`, else another one is guessed, drawn by popularity and ranked last. Measured recalls: 0.886 with 128
    experts, 0.807 with 256, 0.035 to 0.04 less for each further layer."""

    reach = "layer"

    def __init__(self, recall: float, popularity_LE: np.ndarray, seed: int = 0) -> None:
        if not 0 <= recall <= 1:
            raise OptionError("recall is a share", where="--prefetch", expected="0 to 1", got=recall)
        self._recall = recall
        self._cumulative_LE = np.cumsum(popularity_LE / popularity_LE.sum(1, keepdims=True), axis=1)
        self._rng = np.random.default_rng(seed)

    def ranked(self, place: int, chosen: list[int], truth: list[int]) -> list[int]:
        found = self._rng.random(len(truth)) < self._recall
        guess: list[int] = [expert for expert, right in zip(truth, found.tolist(), strict=True) if right]
        for _ in range(len(truth) - len(guess)):
            guess.append(self._wrong(place + 1, truth, guess))
        return guess

    def _wrong(self, place: int, truth: list[int], guess: list[int]) -> int:
        cumulative = self._cumulative_LE[place]
        for _ in range(1000):
            expert = int(np.searchsorted(cumulative, self._rng.random(), "right"))
            if expert not in truth and expert not in guess:
                return expert
        return next(expert for expert in range(len(cumulative)) if expert not in truth and expert not in guess)


class CoOccurrence(Predictor):
    """Which experts of the next layer go with those chosen here, counted on other tokens of the trace: a tempered naive
    Bayes over log-odds. Needs ids only."""

    reach = "layer"
    TEMPER = 0.35

    def __init__(self, train: list[Step], experts: int) -> None:
        self._tables = [
            _log_odds([step[place] for step in train], [step[place + 1] for step in train], experts)
            for place in range(len(train[0]) - 1)
        ]

    def ranked(self, place: int, chosen: list[int], truth: list[int]) -> list[int]:
        prior_E, odds_EE = self._tables[place]
        score_E = prior_E + self.TEMPER * odds_EE[chosen].sum(0)
        return np.argsort(-score_E, kind="stable").tolist()


class Markov(Predictor):
    """The same tables from a layer to itself one token later: a whole token of lead, weaker guesses."""

    reach = "token"

    def __init__(self, train: list[Step], experts: int) -> None:
        self._tables = [
            _log_odds([step[place] for step in train[:-1]], [step[place] for step in train[1:]], experts)
            for place in range(len(train[0]))
        ]

    ranked = CoOccurrence.ranked
    TEMPER = CoOccurrence.TEMPER


def _log_odds(before: list[list[int]], after: list[list[int]], experts: int) -> tuple[np.ndarray, np.ndarray]:
    """log f[b] and log(P(b|a) / f[b]), smoothed, from paired sets; float32 [E], [E, E]."""
    first, second = np.zeros((len(before), experts), np.float32), np.zeros((len(after), experts), np.float32)
    for row, (a, b) in enumerate(zip(before, after, strict=True)):
        first[row, a] = 1
        second[row, b] = 1
    frequency_E = second.mean(0)
    joint_EE = first.T @ second
    conditional_EE = (joint_EE + 0.5 * frequency_E) / (first.sum(0)[:, None] + 0.5)
    return np.log(frequency_E + 1e-4), np.log(conditional_EE / (frequency_E + 1e-4) + 1e-3)


def steps_of(routes: Routes) -> list[Step]:
    """The events of each step in the order of the layers. Raises OptionError where steps differ in their layers."""
    order = np.argsort(np.concatenate([stream.order for stream in routes.streams]), kind="stable")
    step_of = np.concatenate([stream.step for stream in routes.streams])[order]
    counts = np.bincount(step_of, minlength=routes.steps)
    if routes.steps == 0 or np.any(counts != counts[0]):
        got = f"{counts.min(initial=0)} to {counts.max(initial=0)} layers"
        raise OptionError("steps differ in their layers", where=routes.name, expected="the same layers each", got=got)
    events = [event for stream in routes.streams for event in stream.events()]
    width = int(counts[0])
    return [[events[i] for i in order[low : low + width]] for low in range(0, len(order), width)]


def pools_of(routes: Routes) -> list[int]:
    """The index of the stream that each place of a step belongs to."""
    order = np.concatenate([stream.order for stream in routes.streams])
    stream_of = np.repeat(np.arange(len(routes.streams)), [len(stream) for stream in routes.streams])
    in_order = stream_of[np.argsort(order, kind="stable")]
    return in_order[: len(order) // max(routes.steps, 1)].tolist()


def popularity(routes: Routes) -> np.ndarray:
    """How often each expert was used by each place of a step, float64 [places, E], plus a little for the never used."""
    counts = [np.bincount(stream.experts, minlength=routes.experts) + 1e-3 for stream in routes.streams]
    return np.stack([counts[index] for index in pools_of(routes)])
