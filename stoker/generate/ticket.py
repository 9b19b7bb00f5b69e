"""One submitted job from the queue to its end: its sequence, its output, what its listener is told. Engine thread only,
but for `cancel` and the numbers that a status shows.

Knows neither the other jobs nor the steps; what a step gave it is handed in.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.generate.job import Done, Event, Failed, Job, Piece, Progress, Row
from stoker.generate.output import Output

Listener = Callable[[Event], None]
log = logging.getLogger("stoker.engine")


class Ticket:
    """`id` is unique in a batcher. `wake` is called when the engine should look at the ticket."""

    def __init__(self, id: int, job: Job, output: Output, listen: Listener, wake: Callable[[], None]) -> None:
        self.id, self.job, self.output = id, job, output
        self.cancelled = False
        self.over = False
        self.sequence: Any = None  # None while it waits
        self.sound = True  # whether the sequence holds whole tokens only
        self._listen, self._wake = listen, wake
        self._submitted_ns = time.perf_counter_ns()
        self._started_ns = 0
        self._last_ns = 0  # when the last token came
        self._prefilled_tokens = 0

    def cancel(self) -> None:
        """End the job within one step; its listener gets Done with finish_reason "cancelled". From any thread."""
        self.cancelled = True
        self._wake()

    @property
    def started(self) -> bool:
        """Whether it was ever admitted."""
        return self._started_ns > 0

    @property
    def ids(self) -> list[int]:
        """The tokens that its sequence must hold before the next one can be chosen."""
        return [*self.job.request.prompt_ids, *self.output.token_ids]

    @property
    def most_tokens(self) -> int:
        """The most that its sequence can ever hold: the token chosen last is never fed back."""
        return len(self.job.request.prompt_ids) + self.output.limit_tokens - 1

    def row(self) -> Row:
        output = self.output
        phase = "waiting" if self.sequence is None else "decode" if output.generated_tokens else "prefill"
        return Row(
            id=self.id,
            phase=phase,  # type: ignore[arg-type]
            prompt_tokens=len(self.job.request.prompt_ids),
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=output.cached_tokens,
            generated_tokens=output.generated_tokens,
            age_s=(time.perf_counter_ns() - self._submitted_ns) / 1e9,
        )

    # What happens to it, in order.

    def begin(self, cached_tokens: int) -> None:
        """Admitted, for the first time or again after it was put back."""
        if not self.started:
            self._started_ns = time.perf_counter_ns()
            self.output.cached_tokens = self._prefilled_tokens = cached_tokens
            self._tell_progress()

    def prefilled(self, done_tokens: int) -> None:
        """The sequence holds the first `done_tokens` tokens. Told while it is the prompt that is being computed."""
        if self.output.generated_tokens == 0:
            self._prefilled_tokens = done_tokens
            self.output.computed_tokens = done_tokens - self.output.cached_tokens
            self._tell_progress()

    def push(self, logits_V: NDArray[np.float32]) -> None:
        """Choose a token and tell it. A failure here is this job's alone: StokerError."""
        try:
            text, sample = self.output.push(logits_V)
        except StokerError:
            raise
        except Exception as error:
            raise StokerError(f"the next token could not be chosen: {error!r}", where="sampling") from error
        now = time.perf_counter_ns()
        if self.output.generated_tokens == 1:
            self.output.prefill_ns = now - self._started_ns
            self.output.ttft_ns = now - self._submitted_ns
        else:
            self.output.step_ns.append(now - self._last_ns)
        self._last_ns = now
        self.tell(Piece(text, (sample,)))

    def finish(self) -> None:
        """The end of its text, by its own reason or cancelled: tell the rest and the result."""
        tail = self.output.finish()
        if tail:
            self.tell(Piece(tail, ()))
        if self.started and self.output.generated_tokens == 0:
            self.output.prefill_ns = time.perf_counter_ns() - self._started_ns
        self._end(Done(self.output.result(time.perf_counter_ns() - self._submitted_ns)))

    def fail(self, error: StokerError) -> None:
        self._end(Failed(error))

    def tell(self, event: Event) -> None:
        """A listener that raises is gone: the job is cancelled."""
        try:
            self._listen(event)
        except Exception:
            log.exception("job %d is cancelled: its listener failed", self.id)
            self.cancelled = True

    def _end(self, event: Done | Failed) -> None:
        if not self.over:
            self.over = True
            self.tell(event)

    def _tell_progress(self) -> None:
        total = len(self.job.request.prompt_ids)
        self.tell(Progress(self._prefilled_tokens, total, self.output.cached_tokens))
