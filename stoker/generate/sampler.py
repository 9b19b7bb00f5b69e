"""One token from one row of logits: penalties, temperature, top-k, top-p, min-p, then a draw. Pure numpy; no torch.

The order is transformers' own, so that settings found with other engines mean the same here: bias, repetition,
frequency and presence penalties on raw logits, then temperature, top-k, top-p, min-p. Each request has its own Philox
stream: the draw of step n depends on the seed and n alone, never on other requests. No vocabulary is sorted whole.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.generate.request import SamplingOptions

# Sizes that only trade speed: a running-sum block, what is cheap to sort whole, steps of log weight above e^-40.
_BLOCK = 512
_SORTED_WHOLE = 4096
_BUCKETS = 2048
_DEEPEST = 40.0


@dataclass(frozen=True)
class Sample:
    """A chosen token. logprob and top are None unless asked for: natural logs of the model's own distribution (before
    penalties and temperature), `top` as (token, logprob) from the most likely down."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


class Sampler:
    """The sampling state of one request: its random stream and which tokens it has seen.

    `vocab_tokens` is the length of the logits rows. `seed` tells the seed in use, drawn when the options name none.
    """

    def __init__(self, options: SamplingOptions, vocab_tokens: int, prompt_ids: Iterable[int] = ()) -> None:
        self.options = options
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self._random = np.random.Generator(np.random.Philox(key=self.seed))
        self._vocab_tokens = vocab_tokens
        self._bias_ids = _ids(options.logit_bias.keys(), vocab_tokens, "logit_bias")
        self._biases = np.asarray(list(options.logit_bias.values()), dtype=np.float32)
        self._seen_V = np.zeros(vocab_tokens if options.penalises else 0, dtype=bool)
        self._counts_V = np.zeros(vocab_tokens if options.penalises else 0, dtype=np.int32)
        if options.penalises:
            self._seen_V[_ids(prompt_ids, vocab_tokens, "prompt")] = True

    def sample(self, logits_V: NDArray[np.float32], mask: NDArray[np.uint32] | None = None) -> Sample:
        """Choose from float32 logits [V] (left unchanged) and remember the choice.

        mask: packed bits, low bit first, of the tokens that may be chosen (those past its end may not); it comes
        before everything else, and changes no reported logprob. Raises StokerError when the logits hold NaN, or
        nothing but -inf: that is a damaged model, not a token; and when the mask allows none.
        """
        if logits_V.shape != (self._vocab_tokens,):
            raise ValueError(f"logits must be [{self._vocab_tokens}], got {logits_V.shape}")
        scores_V = self._penalised(logits_V if mask is None else _allowed(logits_V, mask))
        if self.options.greedy:
            token = int(scores_V.argmax())
            _check_best(scores_V[token])
        else:
            tokens, weights = candidates(scores_V, self.options)
            token = int(tokens[_draw(weights, self._random.random())])
        if self.options.penalises:
            self._seen_V[token] = True
            self._counts_V[token] += 1
        if self.options.logprobs is None:
            return Sample(token)
        return _with_logprobs(logits_V, token, self.options.logprobs)

    def _penalised(self, logits_V: NDArray[np.float32]) -> NDArray[np.float32]:
        options = self.options
        if not options.penalises and not len(self._bias_ids):
            return logits_V
        scores_V = logits_V.astype(np.float32, copy=True)
        scores_V[self._bias_ids] += self._biases
        if options.repetition_penalty != 1.0:
            seen = np.flatnonzero(self._seen_V)
            values = scores_V[seen]
            penalty = np.float32(options.repetition_penalty)
            scores_V[seen] = np.where(values < 0, values * penalty, values / penalty)
        if options.presence_penalty or options.frequency_penalty:
            said = np.flatnonzero(self._counts_V)
            weight = options.frequency_penalty * self._counts_V[said] + options.presence_penalty
            scores_V[said] -= weight.astype(np.float32)
        return scores_V


def candidates(scores_V: NDArray[np.float32], options: SamplingOptions) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """The tokens that survive temperature, top-k, top-p and min-p, in ascending id, and their weights (not normalised).

    scores_V: float32 [V] after penalties. Ties at a top-k boundary all stay, as in transformers; at a top-p boundary
    the lower id wins. At least one token survives.
    """
    best = scores_V.max()
    _check_best(best)
    inverse = min(1.0 / options.temperature, 1e30)  # a tiny temperature must not make 0 * inf
    tokens: NDArray[np.intp] | None = None
    values = scores_V
    if 0 < options.top_k < len(scores_V):
        tokens = _largest(scores_V, options.top_k)
        values = scores_V[tokens]
    weights = np.exp((values - best) * np.float32(inverse))
    if options.top_p < 1.0:
        keep = _nucleus(weights, options.top_p)
        tokens = keep if tokens is None else tokens[keep]
        weights = weights[keep]
    if options.min_p > 0.0:
        keep = np.flatnonzero(weights >= np.float32(options.min_p))  # the best weight is 1: the ratio is the weight
        tokens = keep if tokens is None else tokens[keep]
        weights = weights[keep]
    if tokens is None:
        tokens = np.arange(len(scores_V))
    return tokens, weights


def _allowed(logits_V: NDArray[np.float32], mask: NDArray[np.uint32]) -> NDArray[np.float32]:
    """A copy of the logits with -inf where the mask has no bit."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=len(logits_V), bitorder="little")
    if not bits.any():
        raise StokerError("the constraint on the output allows no token", where="mask", expected="at least one token")
    _check_best(logits_V.max())
    return np.where(bits.view(bool), logits_V, np.float32(-np.inf))


def log_softmax(logits_V: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural-log probabilities, float32 [V], of float32 logits [V]."""
    best = logits_V.max()
    total = np.exp(logits_V - best).sum(dtype=np.float64)
    return logits_V - np.float32(best + np.log(total))


def _draw(weights: NDArray[np.float32], uniform: float) -> int:
    """The index at which the cumulative weight passes `uniform` (in [0, 1)) of the total; never one of weight 0.

    In two levels, since a running sum over a whole vocabulary costs more than everything else here.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    blocks = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    if whole < len(weights):
        blocks = np.append(blocks, weights[whole:].sum(dtype=np.float64))
    reached = np.cumsum(blocks)
    goal = uniform * reached[-1]
    block = int(np.searchsorted(reached, goal, side="right"))
    start = block * _BLOCK
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    inside *= blocks[block] / inside[-1]  # the two sums may differ in the last bit
    return start + int(np.searchsorted(inside, goal - (reached[block] - blocks[block]), side="right"))


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices, ascending, of the `count` largest values and of all that tie with the smallest of them."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    return np.flatnonzero(values >= threshold)


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the smallest set of largest weights whose share of the total reaches `top_p`.

    A token stays when the share of those before it, by falling weight, is below top_p. weights: exp(z) with z <= 0.
    """
    target = top_p * weights.sum(dtype=np.float64)
    if len(weights) <= _SORTED_WHOLE:
        return _nucleus_among(weights, np.arange(len(weights)), 0.0, target)
    buckets, masses = _by_log_weight(weights)
    reached = np.cumsum(masses)
    last = min(int(np.searchsorted(reached, target, side="left")), len(masses) - 1)
    before = reached[last] - masses[last]
    kept = buckets < last
    kept[_nucleus_among(weights, np.flatnonzero(buckets == last), before, target)] = True
    return np.flatnonzero(kept)


def _by_log_weight(weights: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """A bucket for each weight (0 holds the largest) and each bucket's total, in equal steps of log weight.

    Only the bucket in which the nucleus ends must then be sorted.
    """
    depths = -np.log(np.maximum(weights, np.float32(np.exp(-_DEEPEST))))
    step = np.float32(max(float(depths.max()), 1e-6) / (_BUCKETS - 1))
    buckets = (depths / step).astype(np.intp)
    masses = np.bincount(buckets, weights=weights, minlength=_BUCKETS)
    return buckets, masses.astype(np.float64)


def _nucleus_among(
    weights: NDArray[np.float32], pool: NDArray[np.intp], before: float, target: float
) -> NDArray[np.intp]:
    """Those of `pool` that stay, ascending, when weights worth `before` come ahead; at least one if none does."""
    values = weights[pool]
    order = np.argsort(-values, kind="stable")
    ahead = before + np.cumsum(values[order], dtype=np.float64) - values[order]
    kept = int(np.searchsorted(ahead, target, side="left"))
    return np.sort(pool[order[: max(kept, 0 if before else 1)]])


def _with_logprobs(logits_V: NDArray[np.float32], token: int, count: int) -> Sample:
    logprobs_V = log_softmax(logits_V)
    top: list[tuple[int, float]] = []
    if count:
        ids = _largest(logprobs_V, min(count, len(logprobs_V)))
        ids = ids[np.argsort(-logprobs_V[ids], kind="stable")][:count]
        top = [(int(i), float(logprobs_V[i])) for i in ids]
    return Sample(token, float(logprobs_V[token]), tuple(top))


def _ids(ids: Iterable[int], vocab_tokens: int, where: str) -> NDArray[np.int64]:
    array = np.asarray(list(ids), dtype=np.int64)
    if len(array) and (array.min() < 0 or array.max() >= vocab_tokens):
        raise StokerError("a token id lies outside the vocabulary", where=where, expected=f"0 to {vocab_tokens - 1}")
    return array


def _check_best(best: np.float32) -> None:
    if not np.isfinite(best):
        raise StokerError(
            f"the model's logits are not numbers (largest: {best})",
            expected="finite logits",
            remedy="run `stoker verify` on the store; the weights may be damaged",
        )
