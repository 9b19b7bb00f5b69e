"""Sequence-local rosters: after a prefix, a sequence may use only the experts that it used most.

Owns the rule and its state for one sequence and layer. The same object routes in training and in serving; what it
chooses is a function of the scores of the tokens so far, in order, and not of how they were cut into calls. Knows no
model, no residency and no clock. After "Predatory MoE: Serving MoE with a Sequence-Local Expert Roster" (Son, 2026);
the paper names no delta: here it is in units of the running mean range of the layer's scores. Ours alone: what is
pinned are the experts that the gate's free choices gave most probability in the prefix, not what the barrier left.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.native.roster import PinnedRoster, held_shares
from stoker.routing.shift import Detector, Shift

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BLOCK_TOKENS = 64  # tokens routed at once under one roster; an outsider that gets in ends the block


class Phase(Enum):
    EXPLORE = "explore"  # no bias: fewer than m distinct experts were used
    BARRIER = "barrier"  # members lead by 2 delta; an outsider that wins displaces a member
    PINNED = "pinned"  # members alone


class Roster:
    """The rule at one layer of one sequence.

    experts, chosen, size: E, K and m, with K <= m <= E. delta: half the lead that an outsider needs, in units of the
    mean range (largest - smallest) of the scores so far; infinite: no outsider ever. pin_at: so many tokens are the
    prefix; None: never pinned.
    """

    def __init__(
        self, experts: int, chosen: int, size: int, delta: float, pin_at: int | None = None, shift: Shift | None = None
    ) -> None:
        assert chosen <= size <= experts and delta >= 0, (experts, chosen, size, delta)
        self.chosen, self.size, self.delta = chosen, size, delta
        self.pin_at, self.shift = pin_at, shift
        self.tokens = 0
        self.phase = Phase.EXPLORE
        self.count_E = np.zeros(experts, dtype=np.int64)
        self.last_E = np.full(experts, -1, dtype=np.int64)  # token of the last use
        self.member_E = np.zeros(experts, dtype=bool)
        self.mass_E = np.zeros(experts)  # probability that the prefix's free choices gave each expert
        self.range_sum = 0.0
        self.detector: Detector | None = None
        self.recent_NK = np.empty((0, chosen), dtype=np.int64)  # free choices since a change may have begun
        self.recent_mass_NK = np.empty((0, chosen))  # and their probabilities
        self.repinned: list[int] = []  # tokens at which it was pinned anew after a shift
        self.pins = self.displaced = 0  # how often pinned; how many members outsiders displaced
        self.changed = 0  # choices of the free top-k that were not taken
        self._native: PinnedRoster | None = None  # on this object's own arrays, once it was asked for

    @property
    def pinned(self) -> bool:
        return self.phase is Phase.PINNED

    def members(self) -> list[int]:
        return np.flatnonzero(self.member_E).tolist()

    def copy(self) -> Roster:
        """A snapshot that goes its own way."""
        other = copy(self)
        other.count_E, other.last_E, other.member_E = self.count_E.copy(), self.last_E.copy(), self.member_E.copy()
        other.mass_E = self.mass_E.copy()
        other.detector, other.repinned = copy(self.detector), list(self.repinned)
        other._native = None
        return other

    def route(self, scores_TE: NDArray[Any]) -> Ints:
        """The experts of the next T tokens, int64 [T, K], by falling (biased) score; equal scores: lower id first.

        scores: what the layer's own rule selects by, real [T, E]: logits, or probabilities with their correction.
        """
        scores_TE = scores_TE.astype(np.float64)
        free_TK = top(scores_TE, self.chosen)
        means_T = self._mean_ranges(scores_TE)
        lead_T = 2 * self.delta * means_T if np.isfinite(self.delta) else np.full_like(means_T, np.inf)
        taken_TK = np.empty_like(free_TK)
        steps = {Phase.EXPLORE: self._explore, Phase.BARRIER: self._barrier, Phase.PINNED: self._restricted}
        done = 0
        while done < len(scores_TE):
            some_TK = steps[self.phase](scores_TE[done:], free_TK[done:], lead_T[done:])
            taken_TK[done : done + len(some_TK)] = some_TK
            done += len(some_TK)
        self.changed += int((free_TK[:, :, None] != taken_TK[:, None, :]).all(-1).sum())
        return taken_TK

    # ---- single tokens of a pinned roster: what `route` does to it, without copies ---------------------------------

    def native(self) -> PinnedRoster:
        """Routes single tokens of this pinned roster; its counts are this roster's."""
        if self._native is None:
            self._native = PinnedRoster(self.member_E, self.count_E, self.last_E, self.chosen)
        return self._native

    def note_token(
        self, score_range: float, held: float, changed: int, free_TK: Ints, scores: Callable[[], Floats]
    ) -> bool:
        """Keep a token that native calls routed and counted, from what they said of it (free: int64 [1, K]; scores
        gives its float64 [1, E]); whether it shows a shift."""
        self.range_sum += score_range
        self.changed += changed
        self.tokens += 1
        detector = self.detector
        if detector is None:
            return False
        shifted = detector.note(held, detector.evidence_after(held))
        self._keep_recent(free_TK, scores)
        if shifted:
            self._start_anew()
        return shifted

    # ---- one phase each: the choices of at least one token, at most up to where the phase or the roster changes ---

    def _explore(self, scores_TE: Floats, free_TK: Ints, lead_T: Floats) -> Ints:
        taken_TK = free_TK[: self._until_pin(len(free_TK))]
        distinct_T = np.count_nonzero(self.count_E) + self._new_experts(taken_TK).cumsum()
        full = np.flatnonzero(distinct_T >= self.size)
        if len(full):
            taken_TK = taken_TK[: full[0] + 1]
        self._use(taken_TK)
        self._weigh(free_TK[: len(taken_TK)], masses(scores_TE, free_TK[: len(taken_TK)]))
        if len(full):
            self._form(self._most_used(scores_TE[len(taken_TK) - 1]))
            self.phase = Phase.BARRIER
        self._pin_if_due(scores_TE[len(taken_TK) - 1])
        return taken_TK

    def _barrier(self, scores_TE: Floats, free_TK: Ints, lead_T: Floats) -> Ints:
        tokens = self._until_pin(min(len(free_TK), BLOCK_TOKENS))
        biased_TE = np.where(self.member_E, scores_TE[:tokens], scores_TE[:tokens] - lead_T[:tokens, None])
        taken_TK = top(biased_TE, self.chosen)
        outside_TK = ~self.member_E[taken_TK]
        got_in = np.flatnonzero(outside_TK.any(1))
        if len(got_in):
            taken_TK = taken_TK[: got_in[0] + 1]
        self._use(taken_TK)
        self._weigh(free_TK[: len(taken_TK)], masses(scores_TE, free_TK[: len(taken_TK)]))
        if len(got_in):
            self._displace(taken_TK[-1], taken_TK[-1][outside_TK[got_in[0]]])
        self._pin_if_due(scores_TE[len(taken_TK) - 1])
        return taken_TK

    def _restricted(self, scores_TE: Floats, free_TK: Ints, lead_T: Floats) -> Ints:
        shifted = self.detector.watch(self._held_shares(scores_TE, free_TK)) if self.detector is not None else None
        tokens = len(free_TK) if shifted is None else shifted
        taken_TK = top(np.where(self.member_E, scores_TE[:tokens], -np.inf), self.chosen)
        self._use(taken_TK)
        if self.detector is not None:
            self._keep_recent(free_TK[:tokens], lambda: scores_TE[:tokens])
        if shifted is not None:
            self._start_anew()
        return taken_TK

    # ---- changes of state --------------------------------------------------------------------------------------------

    def _use(self, taken_TK: Ints) -> None:
        self.count_E += np.bincount(taken_TK.ravel(), minlength=len(self.count_E))
        self.last_E[taken_TK.ravel()] = np.repeat(self.tokens + np.arange(len(taken_TK)), self.chosen)
        self.tokens += len(taken_TK)

    def _weigh(self, free_TK: Ints, mass_TK: Floats) -> None:
        """Add up the probabilities of free choices, token by token: the same bits however calls are cut."""
        np.add.at(self.mass_E, free_TK.ravel(), mass_TK.ravel())

    def _most_used(self, scores_E: Floats) -> Ints:
        """All experts, the most used first; ties: used last, then the better score now (where few were used yet)."""
        return np.lexsort((-scores_E, -self.last_E, -self.count_E))

    def _weightiest(self, scores_E: Floats) -> Ints:
        """All experts, those with most probability in the prefix first; ties as above."""
        return np.lexsort((-scores_E, -self.last_E, -self.count_E, -self.mass_E))

    def _form(self, order: Ints) -> None:
        self.member_E[:] = False
        self.member_E[order[: self.size]] = True

    def _displace(self, taken_K: Ints, outsiders: Ints) -> None:
        """Each outsider takes the place of the least used member that this token does not use; ties: least recent."""
        stays_E = np.zeros_like(self.member_E)
        stays_E[taken_K] = True
        leaving = np.flatnonzero(self.member_E & ~stays_E)
        order = np.lexsort((self.last_E[leaving], self.count_E[leaving]))
        self.member_E[leaving[order[: len(outsiders)]]] = False
        self.member_E[outsiders] = True
        self.displaced += len(outsiders)

    def _pin_if_due(self, scores_E: Floats) -> None:
        if self.pin_at is None or self.tokens < self.pin_at:
            return
        self._form(self._weightiest(scores_E))
        self.phase = Phase.PINNED
        self.pins += 1
        if self.pins > 1:
            self.repinned.append(self.tokens)
        self.detector = Detector(self.shift, self.size / len(self.member_E)) if self.shift is not None else None

    def _keep_recent(self, free_TK: Ints, scores: Callable[[], Floats]) -> None:
        """The free choices since a change may have begun, with those of the tokens that the detector just saw."""
        assert self.detector is not None
        since = min(self.detector.excursion, self.detector.shift.explore_tokens)
        if since or len(self.recent_NK):
            recent_NK = np.concatenate((self.recent_NK, free_TK))
            mass_NK = np.concatenate((self.recent_mass_NK, masses(scores(), free_TK)))
            self.recent_NK = recent_NK[len(recent_NK) - since :].copy()
            self.recent_mass_NK = mass_NK[len(mass_NK) - since :].copy()

    def _start_anew(self) -> None:
        """Explore, with what the gate has chosen since the change began as the first choices of the new topic."""
        assert self.shift is not None
        self.phase, self.detector = Phase.EXPLORE, None
        known, explore = len(self.recent_NK), self.shift.explore_tokens
        self.count_E[:], self.last_E[:], self.member_E[:] = 0, -1, False
        self.count_E += np.bincount(self.recent_NK.ravel(), minlength=len(self.count_E))
        self.mass_E[:] = 0
        self._weigh(self.recent_NK, self.recent_mass_NK)
        self.last_E[self.recent_NK.ravel()] = np.repeat(self.tokens - known + np.arange(known), self.chosen)
        self.recent_NK, self.recent_mass_NK = self.recent_NK[:0], self.recent_mass_NK[:0]
        self.pin_at = self.tokens + max(explore - known, explore // 4, 1)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _held_shares(self, scores_TE: Floats, free_TK: Ints) -> Floats:
        """How much of the weight of each token's free choices (softmax of their scores) the roster holds, [T]."""
        return held_shares(np.take_along_axis(scores_TE, free_TK, axis=1), free_TK, self.member_E)

    def _until_pin(self, tokens: int) -> int:
        return tokens if self.pin_at is None else min(tokens, max(1, self.pin_at - self.tokens))

    def _new_experts(self, taken_TK: Ints) -> Ints:
        """How many experts each token uses that no token before it did, [T]."""
        flat = taken_TK.ravel()
        new = np.zeros(len(flat), dtype=bool)
        new[np.unique(flat, return_index=True)[1]] = True
        return (new & (self.count_E[flat] == 0)).reshape(taken_TK.shape).sum(1)

    def _mean_ranges(self, scores_TE: Floats) -> Floats:
        """The mean range of all tokens up to each one, [T]; summed in order, whatever the calls were."""
        sums_T = np.cumsum(np.concatenate(([self.range_sum], np.ptp(scores_TE, axis=1))))[1:]
        self.range_sum = float(sums_T[-1]) if len(sums_T) else self.range_sum
        return sums_T / np.arange(self.tokens + 1, self.tokens + 1 + len(sums_T))


def masses(scores_TE: Floats, free_TK: Ints) -> Floats:
    """The probabilities (softmax of the scores, of at least as many tokens) of the free choices, [T, K]."""
    parts_TE = np.exp(scores_TE[: len(free_TK)] - scores_TE[: len(free_TK)].max(axis=1, keepdims=True))
    chosen_TK: Floats = np.take_along_axis(parts_TE, free_TK, axis=1) / parts_TE.sum(axis=1, keepdims=True)
    return chosen_TK


def top(scores_TE: Floats, chosen: int) -> Ints:
    """The ids of the `chosen` best of each row, best first, int64 [T, K]; equal scores: lower id first."""
    return np.argsort(-scores_TE, axis=-1, kind="stable")[:, :chosen]
