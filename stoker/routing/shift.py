"""When the text of a sequence has changed so much that its pinned roster no longer fits: a sequential test.

Sees one number a token, the share of the gate's free choices, by weight, that the roster holds. Knows no experts and no
roster. Page's cumulative sum (Biometrika 41, 1954) for a fall of a normal mean whose height is learned as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_LEAD = 0.05  # over chance: a roster that holds less than that is tested as if it held so much
LEAST_VARIANCE = 0.01


@dataclass(frozen=True)
class Shift:
    """The test and what follows it. left: how much of its lead over chance the roster is taken to keep after a change.
    evidence: how many nats say that it has changed; one token says at most 1. The first `settle_tokens` pinned tokens
    give mean and variance, later ones improve them, up to the weight of `memory_tokens`. Then the sequence explores
    until it knows `explore_tokens` tokens of the new topic, at least a quarter of them after the change was seen."""

    left: float = 0.3
    evidence: float = 8.0
    settle_tokens: int = 32
    memory_tokens: int = 256
    explore_tokens: int = 32


class Detector:
    """Watches the held shares of one pinned roster, token by token. chance: what any m experts would hold.

    excursion: for how many tokens the evidence has been above nothing, which is where a change has begun if there is
    one. Those tokens improve mean and variance only once the evidence is gone.
    """

    def __init__(self, shift: Shift, chance: float) -> None:
        self.shift, self.chance = shift, chance
        self.weight = self.mean = self.square = 0.0  # of the tokens that count as the topic
        self.evidence = self.sum = self.square_sum = 0.0
        self.excursion = 0

    def watch(self, held_T: NDArray[np.float64]) -> int | None:
        """How many of the tokens were needed to see a shift; None: there was none in them."""
        for place, held in enumerate(held_T.tolist()):
            if self.note(held, self.evidence_after(held)):
                return place + 1
        return None

    def evidence_after(self, held: float) -> float:
        """What the evidence is with one more token; changes nothing."""
        return max(0.0, self.evidence + self._says(held)) if self.weight >= self.shift.settle_tokens else self.evidence

    def note(self, held: float, evidence: float) -> bool:
        """One more token, with the evidence after it; whether that is a shift."""
        self.evidence = evidence
        self.excursion += 1
        self.sum += held
        self.square_sum += held * held
        if evidence >= self.shift.evidence:
            return True
        if evidence == 0:
            self._learn()
        return False

    def _says(self, held: float) -> float:
        """The log-likelihood ratio of the fallen mean to the learned one, in nats, at most 1 either way."""
        fall = (1 - self.shift.left) * max(self.mean - self.chance, LEAST_LEAD)
        variance = max(self.square - self.mean * self.mean, LEAST_VARIANCE)
        return min(1.0, max(-1.0, fall / variance * (self.mean - fall / 2 - held)))

    def _learn(self) -> None:
        """The tokens of the excursion were of the topic after all."""
        weight = self.weight + self.excursion
        self.mean = (self.weight * self.mean + self.sum) / weight
        self.square = (self.weight * self.square + self.square_sum) / weight
        self.weight = min(weight, float(max(self.shift.memory_tokens, self.shift.settle_tokens)))
        self.sum = self.square_sum = 0.0
        self.excursion = 0
