"""One request from prompt tokens to text: prefill, then token by token until it stops. The clock is read here.

Drives a runtime and a sequence that others own, under a lock that others share; knows no files, options or messages.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.generate.detokenize import Detokenizer
from stoker.generate.report import Result, Timings, Usage, phase_stats
from stoker.generate.request import FinishReason, Request
from stoker.generate.sampler import Sample, Sampler
from stoker.generate.stops import StopStrings


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
        self._request = request
        self._limit_tokens = request.limit_tokens(runtime.ctx_size)
        self._ends = frozenset(() if request.ignore_eos else runtime.eos_token_ids)
        self._lock = lock or threading.RLock()
        self._on_prefill = on_prefill
        self._sampler = Sampler(request.sampling, runtime.vocab_size, request.prompt_ids)
        self._detokenizer = Detokenizer(runtime.tokenizer, request.prompt_ids) if runtime.tokenizer else None
        self._stops = StopStrings(request.stop)
        self._samples: list[Sample] = []
        self._pieces: list[str] = []
        self._step_ns: list[int] = []

    def run(self, sequence: Any) -> Iterator[str]:
        """Generate into `sequence`, keeping what it has in common with the prompt; yields text that is certain.

        The sequence holds whole tokens only, whatever ends the run but an error of the runtime.
        """
        start_ns, counters = time.perf_counter_ns(), [self._runtime.stats()]
        prompt, ttft_ns = self._request.prompt_ids, 0
        cached_tokens = self._rewind(sequence)
        reason: FinishReason = "cancelled"
        logits_V = self._prefill(sequence, prompt[cached_tokens:])
        prefill_ns = time.perf_counter_ns() - start_ns
        counters.append(self._runtime.stats())
        try:
            while logits_V is not None and not self.cancelled.is_set():
                token = self._choose(logits_V)
                ttft_ns = ttft_ns or time.perf_counter_ns() - start_ns
                yield from self._say(token)
                ended = self._ended(token)
                if ended is not None:
                    reason = ended
                    break
                logits_V = self._decode(sequence, token)
            tail = self._tail()
            if self._stops.hit is not None:
                reason = "stop"
            if tail:
                self._pieces.append(tail)
                yield tail
        finally:
            counters.append(self._runtime.stats())
            total_ns = time.perf_counter_ns() - start_ns
            computed = len(prompt) - cached_tokens if logits_V is not None else 0
            timings = Timings.of(prefill_ns, ttft_ns, total_ns, self._step_ns, computed)
            self.result = self._conclude(reason, cached_tokens, timings, counters)

    def _rewind(self, sequence: Any) -> int:
        """Cut the sequence back to what it shares with the prompt; the prompt's last token is always computed."""
        prompt = self._request.prompt_ids
        shared = min(common_prefix(sequence.ids, prompt), len(prompt) - 1)
        with self._lock:
            return int(sequence.truncate(shared)) if sequence.length else 0

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
        self._step_ns.append(time.perf_counter_ns() - start_ns)
        return logits_V

    def _choose(self, logits_V: NDArray[np.float32]) -> int:
        start_ns = time.perf_counter_ns()
        sample = self._sampler.sample(logits_V)
        self._samples.append(sample)
        if self._step_ns:
            self._step_ns[-1] += time.perf_counter_ns() - start_ns
        return sample.token

    def _say(self, token: int) -> Iterator[str]:
        if token in self._ends or self._detokenizer is None:
            return
        piece = self._stops.push(self._detokenizer.push(token))
        if piece:
            self._pieces.append(piece)
            yield piece

    def _ended(self, token: int) -> FinishReason | None:
        if token in self._ends or self._stops.hit is not None:
            return "stop"
        return "length" if len(self._samples) >= self._limit_tokens else None

    def _tail(self) -> str:
        """What was held back, at the end of the output."""
        if self._stops.hit is not None or self._detokenizer is None:
            return ""
        tail = self._stops.push(self._detokenizer.finish())
        return tail if self._stops.hit is not None else tail + self._stops.finish()

    def _conclude(
        self, reason: FinishReason, cached_tokens: int, timings: Timings, counters: list[dict[str, Any]]
    ) -> Result:
        before, between, after = counters
        prompt_tokens, decoded = len(self._request.prompt_ids), len(self._step_ns)
        return Result(
            text="".join(self._pieces),
            token_ids=[sample.token for sample in self._samples],
            finish_reason=reason,
            usage=Usage(prompt_tokens, cached_tokens, len(self._samples)),
            timings=timings,
            stats={
                "prefill": phase_stats(before, between, prompt_tokens - cached_tokens, timings.prefill_ms),
                "decode": phase_stats(between, after, decoded, timings.decode_ms),
            },
            seed=self._sampler.seed,
            logprobs=None if self._request.sampling.logprobs is None else list(self._samples),
        )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens `a` and `b` share."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
