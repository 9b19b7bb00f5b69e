"""The engine thread of a server: takes jobs from any thread, runs the model's steps, tells each job's listener.

Owns the thread, the queue and every sequence. What is made of logits is output.py's; HTTP and asyncio are unknown here.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker.errors import Closing, QueueFull, StokerError
from stoker.generate.job import Done, Event, Failed, Job, Piece, Progress, Row, Status
from stoker.generate.model import Model
from stoker.generate.output import Output
from stoker.generate.report import growth

Listener = Callable[[Event], None]


class Ticket:
    """A submitted job."""

    def __init__(self, id: int, job: Job, listen: Listener, output: Output, submitted_ns: int) -> None:
        self.id, self.job, self.listen, self.output, self.submitted_ns = id, job, listen, output, submitted_ns
        self.admitted_ns = 0
        self.cancelled = False

    def cancel(self) -> None:
        """End the job within one step; its listener gets Done with finish_reason "cancelled"."""
        self.cancelled = True


class Batcher:
    """Runs jobs on one model. Close it before the model."""

    def __init__(self, model: Model, *, parallel: int = 4, queue: int = 64, prefix: Any = None) -> None:
        self._model, self._runtime = model, model.runtime
        self._parallel, self._queue, self._prefix = parallel, queue, prefix
        self._wake = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._next_id = 0
        self._draining = self._closed = False
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job, listen: Listener) -> Ticket:
        """Queue a job; `listen` is called on the engine thread with each event and must return at once.

        Raises OptionError (ContextError when it does not fit), QueueFull, Closing.
        """
        output = Output(
            self._runtime, job.request, constraint=job.constraint, skip_special_tokens=job.skip_special_tokens
        )
        with self._wake:
            if self._draining or self._closed:
                raise Closing("the server is shutting down", remedy="ask again later")
            if len(self._waiting) >= self._queue:
                full = QueueFull("too many requests are waiting", expected=f"at most {self._queue}")
                raise full
            self._next_id += 1
            ticket = Ticket(self._next_id, job, listen, output, time.perf_counter_ns())
            self._waiting.append(ticket)
            self._wake.notify_all()
        return ticket

    def status(self) -> Status:
        with self._wake:
            rows = tuple(self._row(ticket) for ticket in [*self._running, *self._waiting])
            return Status(
                running=len(self._running), waiting=len(self._waiting), parallel=self._parallel, queue=self._queue,
                kv_used_tokens=0, kv_total_tokens=self._runtime.ctx_size, decode_tok_s=0.0, prefill_tok_s=0.0,
                healthy=self._error is None, draining=self._draining, error=self._error, sequences=rows,
            )  # fmt: skip

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, tell the waiting ones, let the running ones finish; whether they did in time."""
        with self._wake:
            self._draining = True
            waiting, self._waiting = list(self._waiting), deque()
            self._wake.notify_all()
            for ticket in waiting:
                ticket.listen(Failed(Closing("the server is shutting down", remedy="ask again later")))
            return self._wake.wait_for(lambda: not self._running, timeout_s)

    def close(self) -> None:
        """Cancel everything and end the thread. Idempotent."""
        self.drain(0)
        with self._wake:
            self._closed = True
            for ticket in self._running:
                ticket.cancel()
            self._wake.notify_all()
        self._thread.join()

    def _row(self, ticket: Ticket) -> Row:
        output, now = ticket.output, time.perf_counter_ns()
        return Row(
            id=ticket.id, phase="decode" if output.generated_tokens else "prefill" if ticket.admitted_ns else "waiting",
            prompt_tokens=len(ticket.job.request.prompt_ids), prefilled_tokens=output.computed_tokens,
            cached_tokens=output.cached_tokens, generated_tokens=output.generated_tokens,
            age_s=(now - ticket.submitted_ns) / 1e9,
        )  # fmt: skip

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                ticket = self._waiting.popleft()
                self._running.append(ticket)
            try:
                event: Event = self._serve(ticket)
            except Exception as error:
                wrapped = StokerError(f"the engine failed: {error!r}")
                event = Failed(error if isinstance(error, StokerError) else wrapped)
            with self._wake:
                self._running.remove(ticket)
                self._wake.notify_all()
            ticket.listen(event)

    def _serve(self, ticket: Ticket) -> Event:
        output, prompt = ticket.output, list(ticket.job.request.prompt_ids)
        ticket.admitted_ns = time.perf_counter_ns()
        sequence = self._runtime.new_sequence()
        try:
            output.cached_tokens = self._prefix.match(sequence, prompt) if self._prefix and ticket.job.cache else 0
            done, chunk = output.cached_tokens, getattr(self._runtime, "prefill_chunk", 64)
            ticket.listen(Progress(done, len(prompt), output.cached_tokens))
            logits_V = None
            while done < len(prompt) and not ticket.cancelled:
                part = prompt[done : done + chunk]
                logits_V = np.asarray(self._step(ticket, "prefill", lambda: self._runtime.prefill(sequence, part)))  # noqa: B023
                done += len(part)
                output.computed_tokens = done - output.cached_tokens
                ticket.listen(Progress(done, len(prompt), output.cached_tokens))
            output.prefill_ns = time.perf_counter_ns() - ticket.admitted_ns
            while logits_V is not None and not ticket.cancelled:
                piece, sample = output.push(logits_V)
                output.ttft_ns = output.ttft_ns or time.perf_counter_ns() - ticket.submitted_ns
                ticket.listen(Piece(piece, (sample,)))
                if output.reason is not None:
                    break
                start_ns = time.perf_counter_ns()
                token = output.last_token
                logits_BV = self._step(ticket, "decode", lambda: self._runtime.decode([sequence], [token]))  # noqa: B023
                logits_V = np.asarray(logits_BV)[0]
                output.step_ns.append(time.perf_counter_ns() - start_ns)
            tail = output.finish()
            if tail:
                ticket.listen(Piece(tail, ()))
            if self._prefix and ticket.job.cache:
                self._prefix.keep(sequence)
            return Done(output.result(time.perf_counter_ns() - ticket.submitted_ns))
        finally:
            sequence.close()

    def _step(self, ticket: Ticket, phase: str, run: Callable[[], Any]) -> Any:
        with self._model._lock:
            before = self._runtime.stats()
            logits = run()
            ticket.output.account(phase, growth(before, self._runtime.stats()))
            return logits
