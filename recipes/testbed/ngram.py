"""An n-gram baseline on the same tokens: interpolated modified Kneser-Ney (Chen and Goodman 1998), order 5.

Every n-gram of up to 5 tokens is one int64 (12 bits a token), tables are sorted arrays, a lookup is a binary search.
Nothing is pruned and no count is rounded. Knows nothing of the models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ORDER = 5
TOKEN_BITS = 12
FALLBACK = (0.5, 1.0, 1.5)  # discounts where too few grams were seen to estimate them


@dataclass(frozen=True)
class Table:
    """One order. keys: n-grams, sorted, the last token in the low bits; counts beside them. contexts: their sorted
    distinct (n - 1)-token beginnings; total: of their counts; backoff: the mass that goes to the order below."""

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    total: np.ndarray
    backoff: np.ndarray
    discounts: np.ndarray  # [4]: of counts 0, 1, 2, 3 and more


@dataclass(frozen=True)
class NGram:
    tables: tuple[Table, ...]  # of orders 1 to ORDER
    vocabulary: int

    @classmethod
    def fit(cls, streams: Sequence[np.ndarray], vocabulary: int, order: int = ORDER) -> "NGram":
        """Count over token streams; n-grams do not cross from one stream to the next."""
        assert vocabulary <= 1 << TOKEN_BITS and order * TOKEN_BITS < 63, (vocabulary, order)
        keys, counts = np.unique(np.concatenate([grams(s, order) for s in streams]), return_counts=True)
        tables = [table(keys, counts)]
        for shorter in range(order - 1, 0, -1):
            # below the highest order a gram counts once for each different token before it
            keys, counts = np.unique(keys & ((1 << shorter * TOKEN_BITS) - 1), return_counts=True)
            tables.append(table(keys, counts))
        return cls(tuple(reversed(tables)), vocabulary)

    def log_probabilities(self, stream: np.ndarray) -> np.ndarray:
        """Natural log of P(token | up to order - 1 before it), float64, of the tokens from the second on."""
        chances = np.full(len(stream) - 1, 1 / self.vocabulary)
        for order, rows in enumerate(self.tables, start=1):
            known = grams(stream, order)  # gram i ends at token i + order - 1
            after = known[1:] if order == 1 else known
            first = max(0, order - 2)  # earlier targets have fewer tokens before them and keep the lower order
            chances[first:] = _interpolate(rows, after, chances[first:])
        return np.log(chances)


def grams(stream: np.ndarray, order: int) -> np.ndarray:
    """Every run of `order` tokens as one int64."""
    tokens = stream.astype(np.int64)
    packed = np.zeros(len(tokens) - order + 1, np.int64)
    for place in range(order):
        packed = (packed << TOKEN_BITS) | tokens[place : place + len(packed)]
    return packed


def table(keys: np.ndarray, counts: np.ndarray) -> Table:
    # Chen and Goodman's estimates from how many grams were seen once, twice, ...; kept between 0 and the count
    seen = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    if seen.all():
        share = seen[0] / (seen[0] + 2 * seen[1])
        parts = [i - (i + 1) * share * seen[i] / seen[i - 1] for i in (1, 2, 3)]
    else:
        parts = list(FALLBACK)
    discounts = np.array([0.0, *(min(max(part, 0.0), float(i)) for i, part in enumerate(parts, start=1))])
    contexts, starts = np.unique(keys >> TOKEN_BITS, return_index=True)
    total = np.add.reduceat(counts, starts)
    taken = np.add.reduceat(discounts[np.minimum(counts, 3)], starts)
    return Table(keys, counts, contexts, total, taken / total, discounts)


def _interpolate(rows: Table, wanted: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """max(count - discount, 0) / total + backoff * lower; `lower` alone where the context was never seen."""
    context, known_context = _find(rows.contexts, wanted >> TOKEN_BITS)
    gram, known_gram = _find(rows.keys, wanted)
    count = np.where(known_gram, rows.counts[gram], 0)
    own = (count - rows.discounts[np.minimum(count, 3)]) / rows.total[context]
    return np.where(known_context, own + rows.backoff[context] * lower, lower)


def _find(ordered: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return at, ordered[at] == wanted
