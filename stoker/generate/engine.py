"""One request from prompt tokens to text: prefill, then token by token until it stops. The clock is read here.

Drives a runtime and a sequence that others own, under a lock that others share; what is made of the logits is
output.py's. Knows no files, options or messages.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.generate.output import Output
from stoker.generate.report import Result, growth
from stoker.generate.request import Request


class _Cancelled(Exception):
    """Raised between prefill chunks to leave the runtime's prefill."""


class Generation:
    """A request in progress. `run` yields text; `result` is there afterwards, also when the reader stopped early.

    on_prefill(tokens done, tokens to do) is called at the start of prefill and between its chunks.
    """

    def __init__(
        self,
        runtime: Any,
        request: Request,
        *,
        lock: "threading.RLock | None" = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> None:
        self.result: Result | None = None
        self.cancelled = threading.Event()
        self._runtime = runtime
        self._prompt = request.prompt_ids
        self._lock = lock or threading.RLock()
        self._on_prefill = on_prefill
        self._output = Output(runtime, request)

    def run(self, sequence: Any) -> Iterator[str]:
        """Generate into `sequence`, keeping what it has in common with the prompt; yields text that is certain.

        The sequence holds whole tokens only, whatever ends the run but an error of the runtime.
        """
        output, start_ns = self._output, time.perf_counter_ns()
        output.cached_tokens = self._rewind(sequence)
        before = self._runtime.stats()
        if getattr(sequence, "routing", None) is not None:
            sequence.routing.expect(len(self._prompt), len(self._prompt) + output.limit_tokens)
        logits_V = self._prefill(sequence, self._prompt[output.cached_tokens :])
        output.prefill_ns = time.perf_counter_ns() - start_ns
        output.computed_tokens = len(self._prompt) - output.cached_tokens if logits_V is not None else 0
        between = self._runtime.stats()
        output.account("prefill", growth(before, between))
        try:
            while logits_V is not None and not self.cancelled.is_set():
                piece = self._push(logits_V)
                output.ttft_ns = output.ttft_ns or time.perf_counter_ns() - start_ns
                if piece:
                    yield piece
                if output.reason is not None:
                    break
                logits_V = self._decode(sequence, output.last_token)
            tail = output.finish()
            if tail:
                yield tail
        finally:
            output.account("decode", growth(between, self._runtime.stats()))
            self.result = output.result(time.perf_counter_ns() - start_ns)

    def _rewind(self, sequence: Any) -> int:
        """Cut the sequence back to what it shares with the prompt; the prompt's last token is always computed."""
        shared = min(common_prefix(sequence.ids, self._prompt), len(self._prompt) - 1)
        with self._lock:
            kept = int(sequence.truncate(self._runtime.reusable(sequence, shared))) if sequence.length else 0
            sequence.prompt_tokens = len(self._prompt)
            return kept

    def _prefill(self, sequence: Any, ids: Sequence[int]) -> NDArray[np.float32] | None:
        """Logits [V] after the prompt, or None when cancelled before they were there."""

        def on_chunk(done: int) -> None:
            if self.cancelled.is_set():
                raise _Cancelled
            if self._on_prefill is not None:
                self._on_prefill(done, len(ids))

        try:
            on_chunk(0)
            with self._lock:
                return np.asarray(self._runtime.prefill(sequence, list(ids), on_chunk))
        except _Cancelled:
            return None

    def _decode(self, sequence: Any, token: int) -> NDArray[np.float32]:
        start_ns = time.perf_counter_ns()
        with self._lock:
            logits_V: NDArray[np.float32] = np.asarray(self._runtime.decode([sequence], [token]))[0]
        self._output.step_ns.append(time.perf_counter_ns() - start_ns)
        return logits_V

    def _push(self, logits_V: NDArray[np.float32]) -> str:
        start_ns = time.perf_counter_ns()
        piece, _ = self._output.push(logits_V)
        if self._output.step_ns:
            self._output.step_ns[-1] += time.perf_counter_ns() - start_ns
        return piece


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens `a` and `b` share."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
