"""The rolling probe of a served mode: a small share of the answers' tokens is computed a second time by the gates' own
routes, and the KL between the two is watched against the bound that was promised.

The second pass stands on the same context, which the mode has made, and changes nothing: not the sequence, not the
mode's state, not the experts in memory (Runtime.gate_logits). What it costs is counted. Engine thread only, but for
`stats`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.runtime.step import Part

SHARE = 1 / 128
WINDOW = 512  # probes that count: the latest
LEAST = 32  # probes before a bound can count as broken
SURE = 1.645  # standard errors below the mean: one chance in twenty


class QualityProbe:
    """limit: the bound, nats a token. share: of answer tokens, evenly spaced over all answers."""

    def __init__(self, runtime: Any, limit: float, *, share: float = SHARE) -> None:
        assert 0 < share <= 1 and limit > 0
        self._runtime, self.limit, self.every = runtime, limit, round(1 / share)
        self._tokens = self._probes = self._read_bytes = 0
        self._seconds = 0.0
        self._kl: deque[float] = deque(maxlen=WINDOW)
        self._pending: tuple[int, NDArray[np.float32]] | None = None
        self.broken = False

    def before(self, parts: Sequence[Part]) -> None:
        """Ahead of a step whose KV room is taken: compute the token whose turn it is, if one's is, by the gates."""
        answers = [place for place, part in enumerate(parts) if part.decode and part.sequence.routing is not None]
        due = self.every - self._tokens % self.every
        self._tokens += len(answers)
        self._pending = None
        if due > len(answers) or self.broken:
            return
        place = answers[due - 1]
        began, bytes_before = time.monotonic(), self._bytes()
        part = parts[place]
        try:
            self._pending = place, np.asarray(self._runtime.gate_logits(part.sequence, part.ids[0]))
        except StokerError:  # whatever it is, the step itself will meet it or not
            return
        self._seconds += time.monotonic() - began
        self._read_bytes += self._bytes() - bytes_before

    def after(self, found: Sequence[Any]) -> None:
        """The step's logits, one entry a part: compare those that were probed."""
        if self._pending is None:
            return
        (place, exact_V), self._pending = self._pending, None
        served_V = found[place]
        if isinstance(served_V, np.ndarray):
            self._probes += 1
            self._kl.append(kl(exact_V, served_V))
            self.broken = self.broken or self._breaks()

    def _breaks(self) -> bool:
        """Whether the mean is above the limit by more than its own uncertainty."""
        if len(self._kl) < LEAST:
            return False
        values = np.array(self._kl)
        return bool(values.mean() - SURE * values.std(ddof=1) / math.sqrt(len(values)) > self.limit)

    def _bytes(self) -> int:
        counters = self._runtime.counters()
        return int(counters["demand_bytes"] + counters["prefetch_bytes"])

    def stats(self) -> dict[str, float]:
        """kl_mean: of the latest probes, nats; 0 before the first. seconds, read_bytes: what all probes took."""
        values = list(self._kl)
        return {
            "probes": self._probes,
            "kl_mean": sum(values) / len(values) if values else 0.0,
            "kl_limit": self.limit,
            "seconds": self._seconds,
            "read_bytes": self._read_bytes,
            "broken": int(self.broken),
        }


def kl(exact_V: NDArray[np.float32], served_V: NDArray[np.float32]) -> float:
    """KL(exact || served) in nats of two rows of logits."""
    p, q = (_log_softmax(np.asarray(row, dtype=np.float64)) for row in (exact_V, served_V))
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def _log_softmax(row_V: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = row_V - row_V.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def probe_of(model: Any) -> QualityProbe | None:
    """The probe of a loaded model that promised a bound and keeps it by a mode; None where there is nothing to watch.

    Only the paged cache can be written twice: other models are served without a probe.
    """
    limit = None if model.promise is None else model.promise.probe_limit
    if limit is None or model.runtime.kv is None:
        return None
    return QualityProbe(model.runtime, limit)
