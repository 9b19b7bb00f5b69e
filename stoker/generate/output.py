"""One answer in the making: rows of logits in, tokens and certain text out, and in the end its Result.

Whoever runs the steps (a single run, or the batcher of a server) feeds one of these a request, so the same logits give
the same answer everywhere. Owns sampler, detokenizer, stop strings, constraint and limit; reads neither clock nor
counters and computes no logits.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.generate.detokenize import Detokenizer
from stoker.generate.job import Constraint
from stoker.generate.report import COUNTERS, Result, Timings, Usage, phase_stats
from stoker.generate.request import FinishReason, Request
from stoker.generate.sampler import Sample, Sampler
from stoker.generate.stops import StopStrings


class Output:
    """The state of one request from its first logits on.

    `runtime` gives tokenizer, vocabulary, context length, end tokens and the routing's name, nothing
    else. reason: None while the answer goes on. Raises ContextError when the request does not fit the context.
    """

    def __init__(
        self,
        runtime: Any,
        request: Request,
        *,
        constraint: Constraint | None = None,
        skip_special_tokens: bool = True,
        adapter: str | None = None,
    ) -> None:
        self.request = request
        self.limit_tokens = request.limit_tokens(runtime.ctx_size)
        self.reason: FinishReason | None = None
        self.cached_tokens = self.computed_tokens = 0  # of the prompt
        self.prefill_ns = self.ttft_ns = 0
        self.step_ns: list[int] = []  # what each token after the first took
        self._routing = runtime.mode.about(adapter)
        self._ends = frozenset(() if request.ignore_eos else runtime.eos_token_ids)
        self._sampler = Sampler(request.sampling, runtime.vocab_size, request.prompt_ids)
        self._constraint = constraint
        tokenizer, prompt = runtime.tokenizer, request.prompt_ids
        self._detokenizer = (
            Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens) if tokenizer is not None else None
        )
        self._stops = StopStrings(request.stop)
        self._samples: list[Sample] = []
        self._pieces: list[str] = []
        self._grown: dict[str, dict[str, float]] = {
            phase: dict.fromkeys(COUNTERS, 0) for phase in ("prefill", "decode")
        }

    @property
    def generated_tokens(self) -> int:
        return len(self._samples)

    @property
    def token_ids(self) -> list[int]:
        return [sample.token for sample in self._samples]

    @property
    def last_token(self) -> int:
        """The token to be fed back next."""
        return self._samples[-1].token

    def push(self, logits_V: NDArray[np.float32]) -> tuple[str, Sample]:
        """Choose the next token from float32 logits [V]: the text that became certain, and the choice."""
        assert self.reason is None, "the answer has ended"
        mask = None if self._constraint is None else self._constraint.mask()
        sample = self._sampler.sample(logits_V, mask)
        self._samples.append(sample)
        ending = sample.token in self._ends
        if self._constraint is not None and not ending:
            self._constraint.accept(sample.token)
        piece = "" if ending else self._text(sample.token)
        if ending or self._stops.hit is not None or (self._constraint is not None and self._constraint.ended):
            self.reason = "stop"
        elif len(self._samples) >= self.limit_tokens:
            self.reason = "length"
        return piece, sample

    def finish(self) -> str:
        """The text that was held back, at the end; an answer without a reason to end was cancelled."""
        tail = self._tail()
        if self._stops.hit is not None:
            self.reason = "stop"
        self.reason = self.reason or "cancelled"
        self._pieces.append(tail)
        return tail

    def account(self, phase: str, grown: Mapping[str, float], share: float = 1) -> None:
        """Add this request's share of what the counters grew by in a step of "prefill" or "decode"."""
        mine = self._grown[phase]
        for name in COUNTERS:
            mine[name] += grown[name] if share == 1 else grown[name] * share

    def result(self, total_ns: int) -> Result:
        """What is told of it; `total_ns` since the request."""
        timings = Timings.of(self.prefill_ns, self.ttft_ns, total_ns, self.step_ns, self.computed_tokens)
        prompt_tokens = len(self.request.prompt_ids)
        return Result(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            finish_reason=self.reason or "cancelled",
            usage=Usage(prompt_tokens, self.cached_tokens, len(self._samples)),
            timings=timings,
            stats={
                "prefill": phase_stats(self._grown["prefill"], self.computed_tokens, timings.prefill_ms),
                "decode": phase_stats(self._grown["decode"], len(self.step_ns), timings.decode_ms),
            },
            seed=self._sampler.seed,
            logprobs=None if self.request.sampling.logprobs is None else list(self._samples),
            stop_string=self._stops.hit,
            routing=self._routing,
        )

    def _text(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._stops.push(self._detokenizer.push(token))
        self._pieces.append(piece)
        return piece

    def _tail(self) -> str:
        if self._stops.hit is not None or self._detokenizer is None:
            return ""
        tail = self._stops.push(self._detokenizer.finish())
        return tail if self._stops.hit is not None else tail + self._stops.finish()
