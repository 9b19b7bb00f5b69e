"""The engine thread of a server: takes jobs from any thread, runs the model's steps, tells each job's listener.

Owns the thread, the tickets and every sequence; scheduler.py decides what a step computes, output.py makes text of its
logits. Knows neither HTTP nor asyncio. The thread never dies in silence: a bug ends all jobs with Failed and leaves the
batcher unhealthy.
"""

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import Closing, OptionError, QueueFull, StokerError
from stoker.generate.job import Job, Status
from stoker.generate.model import Model
from stoker.generate.output import Output
from stoker.generate.pace import Pace
from stoker.generate.report import growth
from stoker.generate.scheduler import Limits, Scheduler, Step
from stoker.generate.ticket import Listener, Ticket
from stoker.runtime.step import GivenUp, Part

if TYPE_CHECKING:
    from stoker.generate.prefix import PrefixCache
    from stoker.generate.probe import QualityProbe

log = logging.getLogger("stoker.engine")
MIXED_TOKENS = 256  # prompt tokens beside running answers: enough that reading most experts once is worth it
Logits = NDArray[np.float32] | None


class Batcher:
    """Runs up to `parallel` jobs of a model at once; `queue` more may wait. Close it before the model.

    mixed_tokens, decode_share: see scheduler.Limits. probe: watches the bound that a mode was chosen by; when it
    breaks, all answers go on by the gates' own routes.
    """

    def __init__(
        self,
        model: Model,
        *,
        parallel: int = 4,
        queue: int = 64,
        prefix: "PrefixCache | None" = None,
        mixed_tokens: int = MIXED_TOKENS,
        decode_share: float = 0.5,
        probe: "QualityProbe | None" = None,
    ) -> None:
        for name, value, least in (("parallel", parallel, 1), ("queue", queue, 0), ("mixed_tokens", mixed_tokens, 1)):
            if value < least:
                raise OptionError("too small", where=name, expected=f"at least {least}", got=value)
        if not 0 <= decode_share < 1:
            raise OptionError("not a share", where="decode_share", expected="0 to less than 1", got=decode_share)
        self._model, self._runtime, self._prefix = model, model.runtime, prefix
        self.probe = probe
        self._scheduler = Scheduler(_limits(self._runtime, parallel, queue, mixed_tokens, decode_share))
        self._wake = threading.Condition()
        self._tickets: dict[int, Ticket] = {}
        self._next_id = 0
        self._pace = Pace()
        self._draining = self._closed = False
        self._error: StokerError | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-engine", daemon=True)
        self._thread.start()

    # The door: any thread.

    def submit(self, job: Job, listen: Listener) -> Ticket:
        """Queue a job; `listen` is called on the engine thread with each event and must return at once.

        Raises OptionError (ContextError when it does not fit), QueueFull, Closing.
        """
        if job.adapter is not None and job.adapter not in self._runtime.mode.named:
            known = ", ".join(self._runtime.mode.named) or "none"
            raise OptionError("there is no such adapter here", where="adapter", expected=known, got=job.adapter)
        output = Output(
            self._runtime,
            job.request,
            constraint=job.constraint,
            skip_special_tokens=job.skip_special_tokens,
            adapter=job.adapter,
        )
        with self._wake:
            if self._error is not None:
                raise Closing("the engine has failed", got=self._error.what, remedy="load the model again")
            if self._draining or self._closed:
                raise _closing()
            if self._scheduler.full:
                raise self._queue_full()
            self._next_id += 1
            ticket = Ticket(self._next_id, job, output, listen, self._notify)
            self._scheduler.add(ticket.id, len(job.request.prompt_ids), ticket.most_tokens)
            self._tickets[ticket.id] = ticket
            self._wake.notify_all()
        return ticket

    def status(self) -> Status:
        with self._wake:
            running, waiting = self._scheduler.running, self._scheduler.waiting
            decode_tok_s, prefill_tok_s = self._pace.rates(time.monotonic())
            return Status(
                running=len(running),
                waiting=len(waiting),
                parallel=self._scheduler.limits.parallel,
                queue=self._scheduler.limits.queue,
                kv_used_tokens=self._kv_used_tokens(),
                kv_total_tokens=self._scheduler.limits.capacity_tokens,
                decode_tok_s=decode_tok_s,
                prefill_tok_s=prefill_tok_s,
                healthy=self._error is None and not self._closed,
                draining=self._draining,
                error=None if self._error is None else str(self._error),
                sequences=tuple(self._tickets[id].row() for id in (*running, *waiting)),
            )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, fail the waiting ones with Closing, let the others finish; whether they did in time."""
        with self._wake:
            self._draining = True
            self._wake.notify_all()
            return self._wake.wait_for(lambda: not self._tickets or self._error is not None, timeout_s)

    def close(self) -> None:
        """End every job with Failed(Closing) after the step in progress, and the thread. Idempotent."""
        with self._wake:
            self._draining = self._closed = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _queue_full(self) -> QueueFull:
        limits = self._scheduler.limits
        error = QueueFull(
            "too many requests are waiting",
            expected=f"at most {limits.queue} behind {limits.parallel} at work",
            remedy="ask again later",
        )
        error.retry_after_s = self._pace.wait_s(len(self._scheduler.waiting) + 1, limits.parallel)
        return error

    def _kv_used_tokens(self) -> int:
        pool = getattr(self._runtime, "kv", None)
        if pool is not None:
            return int(self._scheduler.limits.capacity_tokens - pool.free_tokens)
        sequences = [ticket.sequence for ticket in self._tickets.values()]
        return sum(sequence.length for sequence in sequences if sequence is not None)

    # The engine thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._end_all(_closing())
        except BaseException as error:
            failed = StokerError(f"the engine failed: {error!r}", remedy="load the model again, and report this")
            with self._wake:
                self._error = failed
            self._end_all(failed)
            if not isinstance(error, Exception):
                raise

    def _turn(self) -> bool:
        """One look at who came and went, and one step; False when it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._tickets or self._closed)
            if self._closed:
                return False
            gone = [ticket for ticket in self._tickets.values() if ticket.cancelled]
            refused = [t for t in self._tickets.values() if self._draining and not t.started and not t.cancelled]
        for ticket in gone:
            self._leave(ticket)
        for ticket in refused:
            self._leave(ticket, _closing())
        with self._wake:
            admitted = [self._tickets[id] for id in self._scheduler.admit(self._room())]
        for ticket in admitted:
            self._begin(ticket)
        step = self._cut(self._plan())
        if step.tokens:
            self._step(step)
        return True

    def _room(self) -> int | None:
        """How many more sequences a routing rule has room for; None: it does not matter."""
        rule = getattr(self._runtime, "rule", None)
        return None if rule is None else rule.room()

    @property
    def _may_reuse(self) -> bool:
        """Whether a routing rule, if there is one, can go on from tokens that it did not see."""
        rule = getattr(self._runtime, "rule", None)
        return rule is None or rule.recompute_tokens is not None

    def _begin(self, ticket: Ticket) -> None:
        own = () if ticket.job.adapter is None else (ticket.job.adapter,)
        ticket.sequence = sequence = self._runtime.new_sequence(*own)
        sequence.prompt_tokens = len(ticket.job.request.prompt_ids)
        if getattr(sequence, "routing", None) is not None:
            sequence.routing.expect(sequence.prompt_tokens, sequence.prompt_tokens + ticket.output.limit_tokens)
        cached = 0
        try:
            if self._prefix is not None and ticket.job.cache and self._may_reuse:
                with self._model._lock:
                    cached = self._match(sequence, ticket)
        except StokerError as error:
            self._leave(ticket, error)
            return
        self._scheduler.cached(ticket.id, cached)
        ticket.begin(cached)

    def _match(self, sequence: Any, ticket: Ticket) -> int:
        """Fill a sequence with what is kept of its tokens; where a rule tells prompts from answers, of its prompt."""
        assert self._prefix is not None
        rule = getattr(self._runtime, "rule", None)
        if rule is None:
            return int(self._prefix.match(sequence, ticket.ids))
        return int(self._prefix.match(sequence, list(ticket.job.request.prompt_ids), leave=rule.recompute_tokens or 1))

    def _plan(self) -> Step:
        """The next step, its KV room taken: where others hold more than the account says, jobs are put back."""
        while True:
            with self._wake:
                step = self._scheduler.plan()
            for id in step.preempted:
                self._put_back(self._tickets[id])
            short = self._reserve(step)
            if short is None:
                return step
            with self._wake:
                youngest = self._scheduler.preempt()
            if youngest is None:
                self._leave(*short)
            else:
                self._put_back(self._tickets[youngest])

    def _reserve(self, step: Step) -> tuple[Ticket, StokerError] | None:
        """Take the KV blocks that a step writes to; the ticket for which there were none, with the reason."""
        if getattr(self._runtime, "kv", None) is None:
            return None
        with self._model._lock:
            for id, count in (*((id, 1) for id in step.decode), *step.prefill):
                try:
                    self._tickets[id].sequence.reserve(count)
                except StokerError as error:
                    return self._tickets[id], error
        return None

    def _cut(self, step: Step) -> Step:
        """The step with prompts cut where the prefix cache wants to remember their state on the way."""
        if self._prefix is None or not step.prefill:
            return step
        parts = []
        for id, count in step.prefill:
            ticket = self._tickets[id]
            done = ticket.sequence.length
            pause = self._prefix.pause(done, len(ticket.ids)) if ticket.job.cache else done + count
            parts.append((id, min(count, max(pause - done, 1))))
        return replace(step, prefill=tuple(parts))

    def _put_back(self, ticket: Ticket) -> None:
        """Its KV goes, but for what the prefix cache keeps while there is room; the rest is computed again later."""
        self._release(ticket)

    def _step(self, step: Step) -> None:
        began = time.monotonic()
        tickets, parts = self._parts(step)
        before = self._runtime.counters()
        try:
            self._look(parts)
            found = self._compute(parts, tickets)
        except GivenUp:  # whoever it was for is told in the next turn
            for ticket in tickets:
                ticket.sound = getattr(self._runtime, "kv", None) is not None
            return
        self._compare(found)
        grown = growth(before, self._runtime.counters())
        for ticket, part in zip(tickets, parts, strict=True):
            ticket.output.account("decode" if part.decode else "prefill", grown, len(part.ids) / step.tokens)
        for ticket, part, logits_V in zip(tickets, parts, found, strict=True):
            self._tell(ticket, part, logits_V)
        now = time.monotonic()
        with self._wake:
            self._scheduler.finished(step, now - began)
            self._pace.step(now, len(step.decode), step.tokens - len(step.decode))

    def _look(self, parts: list[Part]) -> None:
        """A second opinion on one of the step's tokens, now and then."""
        if self.probe is not None:
            with self._model._lock:
                self.probe.before(parts)

    def _compare(self, found: list[Logits | StokerError]) -> None:
        if self.probe is None or self.probe.broken:
            return
        self.probe.after(found)
        if self.probe.broken:
            stats = self.probe.stats()
            self._runtime.fall_back()
            log.warning(
                "routing %s broke its bound: KL %.5f in the last probes, promised %.5f; exact from here on",
                *(self._runtime.mode.fell_back_from, stats["kl_mean"], stats["kl_limit"]),
            )

    def _parts(self, step: Step) -> tuple[list[Ticket], list[Part]]:
        tickets, parts = [], []
        for id in step.decode:
            ticket = self._tickets[id]
            tickets.append(ticket)
            parts.append(Part(ticket.sequence, [ticket.output.last_token], decode=True))
        for id, count in step.prefill:
            ticket = self._tickets[id]
            ids, first = ticket.ids, ticket.sequence.length
            tickets.append(ticket)
            part = ids[first : first + count]
            parts.append(Part(ticket.sequence, part, wants_logits=first + count == len(ids)))
        return tickets, parts

    def _compute(self, parts: list[Part], tickets: list[Ticket]) -> list[Logits | StokerError]:
        """Logits [V] of each part that wants them. When a step fails, each part is tried once more by itself, so that
        an expert that cannot be read ends only the jobs that need it. GivenUp when nobody wants it any more."""
        together = getattr(self._runtime, "kv", None) is not None and len(parts) > 1
        if together:
            try:
                return self._advance(parts, tickets)
            except GivenUp:
                raise
            except StokerError:
                pass
        found: list[Logits | StokerError] = []
        for part in parts:
            try:
                found += self._advance([part], tickets)
            except GivenUp:
                raise
            except StokerError as error:
                found.append(error)
        return found

    def _advance(self, parts: list[Part], tickets: list[Ticket]) -> list[Logits | StokerError]:
        step = self._runtime.step
        with self._model._lock:
            step.given_up = lambda: self._closed or all(ticket.cancelled for ticket in tickets)
            try:
                rows = iter(np.asarray(self._runtime.advance(parts)))
            finally:
                step.given_up = None
        return [next(rows) if part.wants_logits else None for part in parts]

    def _tell(self, ticket: Ticket, part: Part, logits_V: Logits | StokerError) -> None:
        if isinstance(logits_V, StokerError):
            self._leave(ticket, logits_V)
            return
        try:
            if not part.decode:
                ticket.prefilled(ticket.sequence.length)
                self._remember(ticket)
            if logits_V is not None and not ticket.cancelled:
                ticket.push(logits_V)
        except StokerError as error:
            self._leave(ticket, error)
            return
        if ticket.output.reason is not None:
            self._leave(ticket)

    def _remember(self, ticket: Ticket) -> None:
        """Keep what a prompt has so far: its blocks, or its state where `_cut` paused for that."""
        done, total = ticket.sequence.length, len(ticket.ids)
        if self._prefix is None or not ticket.job.cache:
            return
        with self._model._lock:
            if self._prefix.pause(done - 1, total) == done < total:
                self._prefix.keep(ticket.sequence)
            else:
                self._prefix.keep_blocks(ticket.sequence)

    def _leave(self, ticket: Ticket, error: StokerError | None = None) -> None:
        """The end of a job: its state goes first, so that whoever is told may find the room free."""
        self._release(ticket, keep=error is None)
        with self._wake:
            self._scheduler.remove(ticket.id)
            if ticket.started:
                self._pace.ended(ticket.row().age_s)
        if error is None:
            ticket.finish()
        else:
            ticket.fail(error)
        with self._wake:
            self._tickets.pop(ticket.id, None)
            self._wake.notify_all()

    def _release(self, ticket: Ticket, keep: bool = True) -> None:
        sequence, ticket.sequence = ticket.sequence, None
        if sequence is None:
            return
        with self._model._lock:
            if keep and ticket.sound and self._prefix is not None and ticket.job.cache and sequence.length:
                self._prefix.keep(sequence)
            sequence.close()

    def _end_all(self, error: StokerError) -> None:
        for ticket in list(self._tickets.values()):
            try:
                self._leave(ticket, error)
            except Exception:  # the engine is broken already; whoever waits must still be told
                ticket.fail(error)
        with self._wake:
            self._tickets.clear()
            self._wake.notify_all()


def _closing() -> Closing:
    return Closing("the server is shutting down", remedy="ask again later")


def _limits(runtime: Any, parallel: int, queue: int, mixed_tokens: int, decode_share: float) -> Limits:
    """Without a paged cache, a prompt's chunks change its numbers in the last bits: they are cut where a single run
    cuts them, and nothing is ever computed twice."""
    pool = getattr(runtime, "kv", None)
    chunk = int(runtime.prefill_chunk)
    if pool is None:
        return Limits(
            parallel, queue, runtime.kv_tokens, chunk, min(mixed_tokens, chunk), block_tokens=1,
            decode_share=decode_share, grain_tokens=chunk, preempts=False,
        )  # fmt: skip
    from stoker.runtime.kv import BLOCK_TOKENS

    capacity = pool.blocks * BLOCK_TOKENS
    return Limits(parallel, queue, capacity, chunk, min(mixed_tokens, chunk), BLOCK_TOKENS, decode_share)
