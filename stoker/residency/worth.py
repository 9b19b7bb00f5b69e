"""What each expert of a pool is worth to decoding, resident or not: uses that fade, counted event by event.

A policy ranks only what is resident. A step that asks for more experts than there are slots must also know whether one
that passes through the ring deserves a slot more than one that has it. Knows ids and counts alone.
"""

from collections.abc import Iterable, Sequence

HALF_LIFE_EVENTS = 8.0  # on recorded routes 4 to 32 differ by less than 3% of the misses
_RESCALE_ABOVE = 1e200


class Worth:
    """As in the decayed-lfu policy: later uses weigh more instead of all scores being decayed."""

    def __init__(self, experts: int, half_life_events: float = HALF_LIFE_EVENTS) -> None:
        self._growth = 2.0 ** (1.0 / half_life_events)
        self._weight = 1.0
        self._scores = [0.0] * experts

    def used(self, experts: Sequence[int]) -> None:
        """One event."""
        self._weight *= self._growth
        if self._weight > _RESCALE_ABOVE:
            self._scores = [score / self._weight for score in self._scores]
            self._weight = 1.0
        scores, weight = self._scores, self._weight
        for expert in experts:
            scores[expert] += weight

    def ranked(self, experts: Iterable[int]) -> list[int]:
        """Best first; equals in the order in which they are given."""
        return sorted(experts, key=self._scores.__getitem__, reverse=True)
