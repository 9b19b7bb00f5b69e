"""Recorded routes in the place of the gates', so that a model of random weights shows the reuse of a real one.

Owns the routes and the place in them; a step takes the tokens that follow those of the step before it, or those that
`place` names, so that several sequences may each follow a stretch of its own. For measuring speed: the output means
nothing. Knows no model, no residency and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from stoker.errors import OptionError, TraceError
from stoker.routing.rule import LayerInfo, RoutingRule, Rows
from stoker.trace.reader import Trace, is_trace

Weights = Literal["own", "uniform"]
WEIGHTS: tuple[Weights, ...] = ("own", "uniform")
# A gate applied to the hidden state of one layer before finds 80 to 89% of the next layer's choices.
LOOK_AHEAD_RECALL = 0.85


class RouteReplay(RoutingRule):
    """Routes [L, T, K] for the first L' <= L MoE layers of a model, endless: after the last token comes the first.

    weights: "own" keeps the gate's weights in their order (strongest on the trace's strongest expert), "uniform"
    gives each expert of a token the same share of their sum. Reading ahead is served by a guess of recall
    `look_ahead_recall`, drawn from `seed`: the model's own gates know nothing of these routes.
    """

    name: ClassVar[str] = "replay"

    def __init__(
        self,
        experts_LTK: np.ndarray,
        *,
        weights: Weights = "own",
        source: str = "routes",
        look_ahead_recall: float = LOOK_AHEAD_RECALL,
        seed: int = 0,
    ) -> None:
        if weights not in WEIGHTS:
            raise OptionError("unknown weights", where="--route-weights", expected=", ".join(WEIGHTS), got=weights)
        self.experts_LTK = _checked(experts_LTK, source)
        self.weights, self.source, self.look_ahead_recall = weights, source, look_ahead_recall
        self.tokens = self.experts_LTK.shape[1]
        self._random = np.random.default_rng(seed)
        self._step = -1
        self._first = self._next = 0
        self._placed: np.ndarray | None = None  # for the next step
        self._rows: np.ndarray | None = None  # of this step; None: from _first on

    @classmethod
    def open(cls, path: str | Path, *, weights: Weights = "own") -> RouteReplay:
        """From an .npz with `experts` [L, T, K] or a stoker trace (all its steps). Raises TraceError."""
        return cls(load_experts(Path(path)), weights=weights, source=str(path))

    def seek(self, token: int) -> None:
        """The next step begins with this token of the trace."""
        self._next = token % self.tokens

    def place(self, tokens: Sequence[int]) -> None:
        """The next step takes these tokens of the trace, one for each of its own, in the order in which they lie."""
        self._placed = np.asarray(tokens, dtype=np.int64) % self.tokens

    def attach(self, layers: Sequence[LayerInfo]) -> None:
        self.check_shape(len(layers), min(layer.experts for layer in layers), layers[0].top_k)

    def check_shape(self, layers: int, experts: int, top_k: int) -> None:
        """Raises OptionError where a model with these axes cannot follow the routes."""
        have_layers, _, have_k = self.experts_LTK.shape
        largest = int(self.experts_LTK[:layers].max())
        if have_layers < layers or have_k != top_k or largest >= experts:
            raise OptionError(
                "the routes do not fit the model's shape",
                where=f"--routes {self.source}",
                expected=f"at least {layers} layers, {top_k} experts a token, ids below {experts}",
                got=f"{have_layers} layers, {have_k} experts a token, ids up to {largest}",
            )

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The trace's experts, and the weights that they get, from the gate's own `weights_TK`."""
        index_TK = torch.from_numpy(self.take(layer, rows.step, weights_TK.shape[0]))
        if self.weights == "uniform":
            weights_TK = weights_TK.mean(-1, keepdim=True).expand_as(weights_TK)
        return index_TK, weights_TK

    def look_ahead(self, layer: int, rows: Rows, tokens: int) -> list[int]:
        return self.guess(layer, rows.step, tokens)

    def about(self) -> dict[str, Any]:
        return {"routing": self.name, "routes": self.source, "route_weights": self.weights}

    def take(self, index: int, step: int, tokens: int) -> np.ndarray:
        """int64 [tokens, K] of one layer; every layer of a step gets the same tokens of the trace."""
        if step != self._step:
            self._step, self._first = step, self._next
            self._rows, self._placed = self._placed, None
            if self._rows is None:
                self._next = (self._next + tokens) % self.tokens
        if self._rows is not None:
            assert len(self._rows) == tokens, f"{len(self._rows)} tokens were placed, and the step has {tokens}"
            return self.experts_LTK[index, self._rows]
        end = self._first + tokens
        if end <= self.tokens:
            return self.experts_LTK[index, self._first : end]
        return self.experts_LTK[index, np.arange(self._first, end) % self.tokens]

    def guess(self, index: int, step: int, tokens: int) -> list[int]:
        """A look ahead at each token's choices, what most tokens agree on first: the true one with probability
        `look_ahead_recall`, else one of the layer's at random."""
        truth_TK = self.take(index, step, tokens)
        others = self.experts_LTK[index].reshape(-1)
        drawn = others[self._random.integers(len(others), size=truth_TK.shape)]
        known = self._random.random(truth_TK.shape) < self.look_ahead_recall
        return [expert for expert, _ in Counter(np.where(known, truth_TK, drawn).T.ravel().tolist()).most_common()]


def load_experts(path: Path) -> np.ndarray:
    """Experts [L, T, K] of an .npz or a stoker trace. Raises TraceError naming the file."""
    if not path.exists() and not is_trace(path):  # a run that did not end left parts beside it
        raise TraceError("no such file", where=str(path))
    if path.suffix == ".npz":
        try:
            with np.load(path) as archive:
                return archive["experts"]
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            raise TraceError(
                "holds no routes", where=str(path), expected="an array `experts` [L, T, K]", got=error
            ) from error
    if is_trace(path):
        return _from_trace(Trace(path))
    raise TraceError(
        "holds no routes",
        where=str(path),
        expected="an .npz with `experts` [L, T, K], or a stoker trace",
    )


def _from_trace(trace: Trace) -> np.ndarray:
    """The tokens of all steps, layer by layer, in the order in which they ran."""
    rows, experts = trace.table("layer"), trace.column("route.experts")
    layers = []
    for layer in np.unique(rows["layer"]):
        mine = np.flatnonzero(rows["layer"] == layer)
        counts = (rows["tokens"] * rows["k"])[mine]
        parts = [experts[s : s + n] for s, n in zip(rows["route_start"][mine], counts, strict=True)]
        layers.append(np.concatenate(parts).reshape(-1, int(rows["k"][mine[0]])))
    if not layers or len({layer.shape for layer in layers}) != 1:
        raise TraceError("holds no routes of whole steps", where=str(trace.path), got=[len(layer) for layer in layers])
    return np.stack(layers)


def _checked(experts_LTK: np.ndarray, name: str) -> np.ndarray:
    if experts_LTK.ndim != 3 or experts_LTK.size == 0 or experts_LTK.min() < 0:
        raise TraceError("routes have a wrong shape", where=name, expected="ids [L, T, K] >= 0", got=experts_LTK.shape)
    if not np.issubdtype(experts_LTK.dtype, np.integer):
        raise TraceError("routes are not whole numbers", where=name, expected="integers", got=experts_LTK.dtype)
    ordered = np.sort(experts_LTK, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TraceError("a token names an expert twice", where=name, expected="distinct ids along the last axis")
    return np.ascontiguousarray(experts_LTK, dtype=np.int64)
