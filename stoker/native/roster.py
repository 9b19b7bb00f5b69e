"""The door to pinned rosters: one token of each of some sequences, each under a roster of its own, in one call.

Checks shapes and dtypes, passes addresses. A row's result is a function of that row and its roster alone. Knows no
phases and no sequences; the rule itself is in `stoker/routing/roster.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.native import _kernels

_f32, _i64 = torch.float32, torch.int64


class PinnedRoster:
    """The members of a roster that stays, and the counts of its uses; holds the arrays alive, and reads and writes them
    where they are.

    member: bool [E], at least `chosen` of them; count, last: int64 [E], how often and when each expert was used last;
    all contiguous. ValueError where they do not fit.
    """

    def __init__(
        self, member_E: NDArray[np.bool_], count_E: NDArray[np.int64], last_E: NDArray[np.int64], chosen: int
    ) -> None:
        experts = len(member_E)
        for array, dtype in ((member_E, np.bool_), (count_E, np.int64), (last_E, np.int64)):
            if array.dtype != dtype or array.shape != (experts,) or not array.flags.c_contiguous:
                raise ValueError(f"expected contiguous {dtype.__name__} [{experts}], got {array.dtype} {array.shape}")
        self.experts, self.chosen, self._held = experts, chosen, (member_E, count_E, last_E)
        self.native = _kernels.PinnedRoster(
            member_E.ctypes.data, count_E.ctypes.data, last_E.ctypes.data, experts, chosen
        )

    def use(self, experts_TK: Tensor, row: int, token: int) -> None:
        """Count the experts int64 [K] of a row as used by token number `token`. IndexError for one that is none."""
        if experts_TK.shape[1] != self.chosen or experts_TK.dtype is not _i64 or not 0 <= row < len(experts_TK):
            raise ValueError(f"experts: expected int64 [>{row}, {self.chosen}], got {experts_TK.dtype} {row}")
        self.native.use(experts_TK[row].data_ptr(), token)


class TokenFacts(NamedTuple):
    """What the rule and its meters ask about a token. range: largest - smallest logit; held: as `held_shares`;
    mass: probability of the experts used over that of the gate's; kl: from the gate's route to the used one, nats;
    changed: free choices that are not used; kept: choices of the gate that are used."""

    range: float
    held: float
    mass: float
    kl: float
    changed: int
    kept: int


class PinnedRoute(NamedTuple):
    """experts int64 and weights f32 [T, K] as used; free int64 [T, K]: the best of all experts; facts by row."""

    experts: Tensor
    weights: Tensor
    free: Tensor
    facts: Sequence[Any]  # TokenFacts as plain tuples


def pinned_tokens(
    rosters: Sequence[PinnedRoster],
    logits_TE: Tensor,
    probabilities_TE: Tensor,
    gate_TK: Tensor,
    weights_TK: Tensor,
    renormalise: bool,
) -> PinnedRoute | None:
    """Row t uses the best members of rosters[t], by logit, ties by id; None where a logit is not finite.

    logits and their softmax: f32 [T, E]; the gate's route: int64 and f32 [T, K]; all contiguous. A row whose experts
    are the gate's has the gate's ids and weights; another's weights are the probabilities, divided by their sum if
    `renormalise`: the bits of `routing.select.weigh`. IndexError for an expert that is none.
    """
    tokens, experts, chosen = len(rosters), rosters[0].experts, rosters[0].chosen
    wide, narrow = (tokens, experts), (tokens, chosen)
    if not (
        logits_TE.shape == probabilities_TE.shape == wide
        and gate_TK.shape == weights_TK.shape == narrow
        and logits_TE.dtype is probabilities_TE.dtype is weights_TK.dtype is _f32
        and gate_TK.dtype is _i64
        and logits_TE.is_contiguous()
        and probabilities_TE.is_contiguous()
        and gate_TK.is_contiguous()
        and weights_TK.is_contiguous()
        and (tokens == 1 or all(one.experts == experts and one.chosen == chosen for one in rosters))
    ):
        got = [f"{x.dtype} {list(x.shape)}" for x in (logits_TE, probabilities_TE, gate_TK, weights_TK)]
        raise ValueError(f"expected contiguous float32 {wide} twice, int64 and float32 {narrow}, got {'; '.join(got)}")
    used_TK, free_TK, new_TK = torch.empty_like(gate_TK), torch.empty_like(gate_TK), torch.empty_like(weights_TK)
    facts = _kernels.pinned_tokens(
        [one.native for one in rosters],
        logits_TE.data_ptr(),
        probabilities_TE.data_ptr(),
        gate_TK.data_ptr(),
        weights_TK.data_ptr(),
        renormalise,
        used_TK.data_ptr(),
        new_TK.data_ptr(),
        free_TK.data_ptr(),
    )
    return None if facts is None else PinnedRoute(used_TK, new_TK, free_TK, facts)


def held_shares(
    scores_TK: NDArray[np.float64], free_TK: NDArray[np.int64], member_E: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """How much of the weight of each token's free choices (softmax of their scores) the members have, [T].

    scores, free: [T, K], the best first, ids in [0, E).
    """
    if free_TK.size and not 0 <= free_TK.min() <= free_TK.max() < len(member_E):
        raise IndexError(f"an expert is not in [0, {len(member_E)})")
    if scores_TK.shape != free_TK.shape or member_E.dtype != np.bool_:
        raise ValueError(f"expected two [T, K] and bool [E], got {scores_TK.shape}, {free_TK.shape}, {member_E.dtype}")
    scores_TK = np.ascontiguousarray(scores_TK, np.float64)
    free_TK, member_E = np.ascontiguousarray(free_TK, np.int64), np.ascontiguousarray(member_E)
    (tokens, chosen), held_T = scores_TK.shape, np.empty(len(scores_TK))
    addresses = scores_TK.ctypes.data, free_TK.ctypes.data, member_E.ctypes.data
    _kernels.held_shares(*addresses, tokens, chosen, held_T.ctypes.data)
    return held_T
