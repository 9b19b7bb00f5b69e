"""Decayed frequency: `s <- s * 2^(-1/h) + 1[used]` once an event, the smallest s leaves. h counts events of this cache.

Instead of decaying every score, later uses weigh more (2^(event/h)): the order is the same. Scores outlive residency.
"""

from collections.abc import Hashable, Sequence

from stoker.errors import OptionError
from stoker.residency.policies.scored import ScoredPolicy

RESCALE_ABOVE = 1e200


class DecayedLFU(ScoredPolicy):
    """`half_life`: events after which a use counts half. 16 is best at up to an eighth of the experts resident, 64 from
    three eighths on. A cache shared by several layers sees one event a layer: scale the half-life with the layers."""

    name = "decayed-lfu"

    def __init__(self, capacity: int, half_life: float = 16.0) -> None:
        if not half_life > 0:
            raise OptionError("the half-life must be positive", where="half_life", expected="> 0", got=half_life)
        super().__init__(capacity)
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0

    def touch(self, keys: Sequence[Hashable]) -> None:
        self._weight *= self._growth
        if self._weight > RESCALE_ABOVE:
            self._rescale()
        scores, weight = self._scores, self._weight
        for key in keys:
            scores[key] = scores.get(key, 0.0) + weight

    def _rescale(self) -> None:
        """Divide everything by the current weight; scores that vanish are forgotten."""
        weight, self._weight = self._weight, 1.0
        scaled = {key: score / weight for key, score in self._scores.items()}
        self._scores = {key: score for key, score in scaled.items() if score > 1e-100 or key in self.resident}
        self._rank_anew()
