"""Who computes what in the next step: continuous batching with chunked prefill, as pure rules on token counts.

Owns the queue, the order and the account of KV room; knows ids and numbers alone: no torch, no clock, no threads.
Rules. Running answers go in every step. Prompts share what a step may prefill, by rank: the tokens that all prompts
had been given when a prompt came in, plus its own. That is shortest-first (a short question overtakes a long document,
which makes the mean wait least) with ageing built in: once others were given as many tokens as a prompt is long, no
newcomer ranks before it, so none starves; equal lengths keep their order. Admission is first come, first served by KV
room; when running answers outgrow the room, the youngest is put back, and its tokens are computed again later.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """parallel: sequences at once; queue: how many more may wait; capacity_tokens: KV of all sequences together.

    chunk_tokens: prompt tokens in a step of prompts alone; mixed_tokens: beside running answers. decode_share: after a
    mixed step, answers go on alone until they had this share of the time (a mixed step is long: it reads most experts).
    growth_tokens: room kept for an answer at admission. grain_tokens: a prompt is cut only at multiples of it.
    preempts: False reserves all the room that a job may ever need at its admission.
    """

    parallel: int
    queue: int
    capacity_tokens: int
    chunk_tokens: int
    mixed_tokens: int
    block_tokens: int = 64
    decode_share: float = 0.5
    growth_tokens: int = 128
    grain_tokens: int = 1
    preempts: bool = True

    def __post_init__(self) -> None:
        counts = (self.parallel, self.capacity_tokens, self.chunk_tokens, self.mixed_tokens)
        assert min(*counts, self.block_tokens, self.grain_tokens) >= 1 and self.queue >= 0 and self.growth_tokens >= 0
        assert 0.0 <= self.decode_share < 1.0


@dataclass(frozen=True)
class Step:
    """prefill: (id, how many of its next tokens); decode: ids that feed their last token; preempted: put back first."""

    prefill: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(count for _, count in self.prefill)


@dataclass
class _Entry:
    id: int
    arrival: int
    target: int  # tokens to have in KV before the next token can be chosen
    most: int  # tokens that it may ever have there
    done: int = 0
    rank: int | None = None

    @property
    def decodes(self) -> bool:
        return self.done == self.target


@dataclass
class Scheduler:
    """add -> admit -> (cached) -> plan -> finished, over and over; remove at the end of a job, whatever its state."""

    limits: Limits
    _waiting: list[_Entry] = field(default_factory=list)  # by arrival
    _running: dict[int, _Entry] = field(default_factory=dict)  # by admission
    _arrivals: int = 0
    _prefilled: int = 0  # tokens of all prompts so far: the clock of the ranks
    _owed: float = 0.0  # time that answers have to themselves before the next prompt tokens

    # Coming and going.

    @property
    def full(self) -> bool:
        """Whether one more job would find neither a place nor a seat in the queue."""
        return len(self._waiting) + len(self._running) >= self.limits.parallel + self.limits.queue

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(entry.id for entry in self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(self._running)

    def add(self, id: int, prompt_tokens: int, most_tokens: int) -> None:
        """Queue a job whose sequence will hold `most_tokens` at most, prompt included."""
        assert (
            1 <= prompt_tokens <= most_tokens and self._blocks(most_tokens) <= self._capacity_blocks and not self.full
        )
        self._arrivals += 1
        self._waiting.append(_Entry(id, self._arrivals, prompt_tokens, most_tokens))

    def remove(self, id: int) -> None:
        """The job ended, failed or was cancelled."""
        if self._running.pop(id, None) is None:
            self._waiting = [entry for entry in self._waiting if entry.id != id]

    def admit(self, most: int | None = None) -> tuple[int, ...]:
        """Those that may begin now, in order. The first in the queue is never passed over for a smaller one. most: so
        many find other room (None: all do); one alone always may."""
        admitted: list[int] = []
        while self._waiting and len(self._running) < self.limits.parallel:
            if self._running and most is not None and len(admitted) >= most:
                break
            entry = self._waiting[0]
            held = sum(self._reserved(other) for other in self._running.values())
            if self._running and held + self._reserved(entry) > self._capacity_blocks:
                break
            self._running[entry.id] = self._waiting.pop(0)
            self._enter(entry)
            admitted.append(entry.id)
        return tuple(admitted)

    def cached(self, id: int, tokens: int) -> None:
        """The first `tokens` tokens of a job that was just admitted need no computing."""
        entry = self._running[id]
        assert entry.done == 0 and 0 <= tokens < entry.target
        entry.done, entry.rank = tokens, (entry.rank or 0) - tokens

    def preempt(self) -> int | None:
        """Put the youngest running job back into the queue, by its arrival; None when it is the only one."""
        if len(self._running) < 2:
            return None
        entry = max(self._running.values(), key=lambda other: other.arrival)
        del self._running[entry.id]
        if entry.decodes:
            entry.target += 1  # the token chosen last is computed with the others
        entry.done = 0
        self._waiting = sorted([*self._waiting, entry], key=lambda other: other.arrival)
        return entry.id

    # Steps.

    def plan(self) -> Step:
        """The next step; empty when nothing runs."""
        preempted = list(self._make_room())
        decode = tuple(entry.id for entry in self._running.values() if entry.decodes)
        if not decode:
            self._owed = 0.0
        wait = bool(decode) and self._owed > 0.0
        budget = self.limits.mixed_tokens if decode else self.limits.chunk_tokens
        return Step(() if wait else tuple(self._prefill(budget)), decode, tuple(preempted))

    def finished(self, step: Step, cost: float) -> None:
        """The step was computed in `cost` (of any unit, always the same). Jobs that ended are removed before."""
        for id, tokens in step.prefill:
            self._prefilled += tokens
            if (entry := self._running.get(id)) is not None:
                entry.done += tokens
        for id in step.decode:
            if (entry := self._running.get(id)) is not None:
                entry.done = entry.target = entry.target + 1
        if step.decode:
            share = self.limits.decode_share
            self._owed = self._owed + cost * share / (1 - share) if step.prefill else max(0.0, self._owed - cost)

    def _make_room(self) -> Iterable[int]:
        """Preempt until what runs can take this step."""
        while sum(self._needed(entry) for entry in self._running.values()) > self._capacity_blocks:
            id = self.preempt()
            assert id is not None, "one job alone always has room"
            yield id

    def _prefill(self, budget: int) -> Iterable[tuple[int, int]]:
        grain = self.limits.grain_tokens
        prompts = [entry for entry in self._running.values() if not entry.decodes]
        first = True
        for entry in sorted(prompts, key=lambda other: (other.rank, other.arrival)):
            end = min(entry.target, entry.done + max(budget, 0))
            if end < entry.target:
                end -= end % grain
            if end <= entry.done and first:  # a grain is the least that can be given
                end = min(entry.target, entry.done - entry.done % grain + grain)
            if end <= entry.done:
                return
            yield entry.id, end - entry.done
            budget -= end - entry.done
            first = False

    # Room.

    def _enter(self, entry: _Entry) -> None:
        if entry.rank is None:
            entry.rank = self._prefilled + entry.target

    def _needed(self, entry: _Entry) -> int:
        """Blocks that a running job has after its next step, the whole of its prompt included."""
        if not self.limits.preempts:
            return self._blocks(entry.most)
        return self._blocks(entry.target + 1 if entry.decodes else entry.target)

    def _reserved(self, entry: _Entry) -> int:
        """Blocks that admission counts for a job."""
        if not self.limits.preempts:
            return self._blocks(entry.most)
        return self._blocks(min(entry.most, entry.target + 1 + self.limits.growth_tokens))

    @property
    def _capacity_blocks(self) -> int:
        return self.limits.capacity_tokens // self.limits.block_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)
