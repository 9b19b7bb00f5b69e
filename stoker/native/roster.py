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


class TokenFacts(NamedTuple):
    """What the rule asks about a token in a layer. range: largest - smallest logit; held: as `held_shares`; changed:
    free choices that are not used."""

    layer: int
    range: float
    held: float
    changed: int


class StepMeters(NamedTuple):
    """Sums over tokens and layers. kept: choices of the gate that are used; mass: probability of the experts used over
    that of the gate's; kl: from the gate's route to the used one, nats."""

    tokens: int
    kept: int
    changed_tokens: int
    mass: float
    kl: float


class PinnedStep:
    """The single tokens of T sequences in a step, each under its own rosters: routed layer by layer, and counted where
    the rosters are only by `finish`. Serves all steps of the same rosters, each after `begin`.

    rosters: by sequence and layer, None where there is none that stays; renormalise: by layer. free: int64 [L, T, K],
    the best of all experts of each token that was routed. ValueError where they do not fit together.
    """

    def __init__(self, rosters_TL: Sequence[list[PinnedRoster | None]], renormalise_L: list[bool]) -> None:
        sizes = {one.chosen for row in rosters_TL for one in row if one is not None}
        if len(sizes) != 1:
            raise ValueError(f"expected rosters of which a token uses as many experts, got {sorted(sizes)}")
        self.rosters_TL = rosters_TL
        self._shape = len(renormalise_L), len(rosters_TL), sizes.pop()
        self._narrow = self._shape[1:]
        self.free_LTK = np.empty(self._shape, dtype=np.int64)
        natives = [[None if one is None else one.native for one in row] for row in rosters_TL]
        self._native = _kernels.PinnedStep(natives, renormalise_L)
        self._logits: list[Tensor | None] = [None] * len(renormalise_L)  # of the layers that were routed
        self._wide = [(len(rosters_TL), experts) if experts else None for experts in self._native.experts()]
        self.begin()

    def begin(self) -> None:
        """Nothing is routed; what was, and was not finished, is forgotten."""
        used_LTK, weights_LTK = torch.empty(self._shape, dtype=_i64), torch.empty(self._shape)
        self._native.begin(used_LTK.data_ptr(), weights_LTK.data_ptr(), self.free_LTK.ctypes.data)
        self._found = list(zip(used_LTK.unbind(), weights_LTK.unbind(), strict=True))

    def covers(self, layer: int) -> bool:
        """Whether every sequence has its roster in this layer."""
        return self._wide[layer] is not None

    def route(self, layer: int, logits_TE: Tensor, gate_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tokens' experts int64 and weights f32 [T, K] in a layer: the best members by logit, ties by id. They
        stay as they are when the next step begins.

        logits: f32 [T, E]; the gate's route: int64 and f32 [T, K]; contiguous. A row whose experts are the gate's has
        the gate's ids and weights; another's weights are the softmax of its logits, divided by their sum if the layer
        renormalises: the bits of `routing.select.weigh`. None, and nothing is routed, for other tensors, for a layer
        that is not covered, and where a logit is not finite. IndexError for an expert of the gate that is none.
        """
        if not (
            logits_TE.shape == self._wide[layer]
            and gate_TK.shape == weights_TK.shape == self._narrow
            and logits_TE.dtype is weights_TK.dtype is _f32
            and gate_TK.dtype is _i64
            and logits_TE.is_contiguous()
            and gate_TK.is_contiguous()
            and weights_TK.is_contiguous()
        ):
            self._native.skip(layer)
            return None
        probabilities_TE = logits_TE.softmax(-1)
        routed = self._native.route(
            layer, logits_TE.data_ptr(), probabilities_TE.data_ptr(), gate_TK.data_ptr(), weights_TK.data_ptr()
        )
        if routed:
            self._logits[layer] = logits_TE.clone()  # its owner may write the next layer's there
        return self._found[layer] if routed else None

    def scores(self, layer: int, row: int) -> NDArray[np.float64]:
        """The logits of a token that was routed in a layer, float64 [1, E]."""
        logits_TE = self._logits[layer]
        assert logits_TE is not None, "the layer was routed"
        return logits_TE[row : row + 1].double().numpy()

    def finish(self, row: int, number: int) -> list[Any]:
        """Count what the sequence of this row used, in every layer that was routed, as its token `number`; TokenFacts
        of those layers, as plain tuples."""
        return self._native.finish(row, number)

    def take_meters(self) -> StepMeters:
        """Of all that was routed since they were taken, counted or not."""
        return StepMeters(*self._native.take_meters())


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
