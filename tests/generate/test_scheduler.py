"""The scheduler's promises over random arrivals, lengths, cancellations, costs: room, order, progress, no starving."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.generate.scheduler import Limits, Scheduler, Step

BLOCK = 8


@dataclass
class Asked:
    """One job of a test: when it comes, what it asks, what became of it."""

    at_step: int
    prompt: int
    answer: int
    cached: int = 0
    cancel_after: int | None = None  # steps after its arrival
    said: int = 0  # answer tokens chosen
    decides: bool = False  # its last token was chosen since it was admitted: not so of one that was put back
    held: int = 0  # tokens in KV
    admitted: int | None = None
    ended: int | None = None
    waits: list[int] = field(default_factory=list)  # steps between its answer tokens

    @property
    def most(self) -> int:
        return self.prompt + self.answer - 1


class Run:
    """Drives a scheduler as the batcher does, on token counts alone, and checks every step."""

    def __init__(self, limits: Limits, asked: list[Asked], cost: list[float]) -> None:
        self.scheduler, self.limits, self.asked, self.cost = Scheduler(limits), limits, asked, cost
        self.steps: list[Step] = []
        self.at = 0
        self.put_back: list[int] = []

    def to_end(self, most_steps: int = 5000) -> None:
        pending = sorted(range(len(self.asked)), key=lambda id: self.asked[id].at_step)
        while pending or self.scheduler.waiting or self.scheduler.running:
            while pending and self.asked[pending[0]].at_step <= self.at and not self.scheduler.full:
                job = self.asked[pending[0]]
                self.scheduler.add(pending.pop(0), job.prompt, job.most)
            self._cancel()
            for id in self.scheduler.admit():
                self._admitted(id)
            self._step()
            self.at += 1
            assert self.at < most_steps, "somebody waits for ever"

    def _cancel(self) -> None:
        for id in (*self.scheduler.running, *self.scheduler.waiting):
            job = self.asked[id]
            if job.cancel_after is not None and self.at >= job.at_step + job.cancel_after:
                self.scheduler.remove(id)
                job.ended = self.at
                job.held = 0

    def _admitted(self, id: int) -> None:
        job = self.asked[id]
        job.admitted = self.at if job.admitted is None else job.admitted
        assert job.held == 0
        cached = min(job.cached, job.prompt + job.said - 1)
        self.scheduler.cached(id, cached)
        job.held = cached

    def _step(self) -> None:
        step = self.scheduler.plan()
        self.steps.append(step)
        for id in step.preempted:
            self.asked[id].held, self.asked[id].decides = 0, False
            self.put_back.append(id)
        running = self.scheduler.running
        assert len(running) <= self.limits.parallel
        assert bool(step.tokens) == bool(running), "a step without work, or work without a step"
        deciding = {id for id in running if self.asked[id].decides}
        assert set(step.decode) == deciding, "running answers go in every step"
        assert all(self.asked[id].held == self.asked[id].prompt + self.asked[id].said - 1 for id in deciding)
        self._check_budget(step)
        for id, count in step.prefill:
            job = self.asked[id]
            assert id not in deciding and 0 < count <= job.prompt + job.said - job.held
            job.held += count
            end = job.held
            assert end == job.prompt + job.said or end % self.limits.grain_tokens == 0
            if end == job.prompt + job.said:
                self._say(id)
        for id in step.decode:
            self.asked[id].held += 1
            self._say(id)
        blocks = sum(-(-self.asked[id].held // BLOCK) for id in running)
        assert blocks * BLOCK <= self.limits.capacity_tokens, "more room than there is"
        self.scheduler.finished(step, self.cost[self.at % len(self.cost)])

    def _check_budget(self, step: Step) -> None:
        prefilled = sum(count for _, count in step.prefill)
        most = self.limits.mixed_tokens if step.decode else self.limits.chunk_tokens
        assert prefilled <= max(most, self.limits.grain_tokens)

    def _say(self, id: int) -> None:
        job = self.asked[id]
        job.said, job.decides = job.said + 1, True
        job.waits.append(self.at)
        if job.said == job.answer:
            self.scheduler.remove(id)
            job.ended, job.held = self.at, 0


limits = st.builds(
    Limits,
    parallel=st.integers(1, 5),
    queue=st.integers(0, 6),
    capacity_tokens=st.integers(8, 20).map(lambda blocks: blocks * BLOCK),
    chunk_tokens=st.integers(1, 40),
    mixed_tokens=st.integers(1, 20),
    block_tokens=st.just(BLOCK),
    decode_share=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    growth_tokens=st.integers(0, 24),
    grain_tokens=st.sampled_from([1, 1, 4, 16]),
    preempts=st.booleans(),
)
jobs = st.builds(
    Asked,
    at_step=st.integers(0, 30),
    prompt=st.integers(1, 40),
    answer=st.integers(1, 25),
    cached=st.sampled_from([0, 0, 7, 30]),
    cancel_after=st.sampled_from([None, None, None, 0, 3, 12]),
)
costs = st.lists(st.floats(0.1, 20.0), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(limits, st.lists(jobs, min_size=1, max_size=12), costs)
def test_every_job_ends_and_every_step_keeps_the_rules(limits: Limits, asked: list[Asked], cost: list[float]) -> None:
    run = Run(limits, asked, cost)
    run.to_end()
    for job in asked:
        assert job.said == job.answer or (job.cancel_after is not None and job.ended is not None)
    assert limits.preempts or not run.put_back


@settings(max_examples=60, deadline=None)
@given(limits, st.integers(1, 40), st.integers(1, 12), st.integers(2, 12))
def test_equals_are_served_in_their_order(limits: Limits, prompt: int, answer: int, count: int) -> None:
    asked = [Asked(0, prompt, answer) for _ in range(count)]
    Run(limits, asked, [1.0]).to_end()
    admitted = [job.admitted for job in asked]
    first_tokens = [job.waits[0] for job in asked]
    assert admitted == sorted(admitted) and first_tokens == sorted(first_tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(30, 200), st.integers(1, 20), st.integers(1, 29), st.sampled_from([0.0, 0.5, 0.9]))
def test_no_stream_of_short_prompts_starves_a_long_one(long: int, budget: int, short: int, share: float) -> None:
    """Short prompts come for ever; the long one is done after work worth about twice its own length."""
    limits = Limits(4, 100, 100 * BLOCK, budget, budget, BLOCK, share)
    scheduler = Scheduler(limits)
    scheduler.add(0, long, long)
    next_id, others_tokens, held = 1, 0, 0
    while held < long:
        while not scheduler.full and len(scheduler.running) + len(scheduler.waiting) < 4:
            scheduler.add(next_id, short, short)
            next_id += 1
        scheduler.admit()
        step = scheduler.plan()
        held += sum(count for id, count in step.prefill if id == 0)
        others_tokens += sum(count for id, count in step.prefill if id)
        for id in scheduler.running:
            given_tokens = scheduler._running[id].done + dict(step.prefill).get(id, 0)
            if id and given_tokens == short:
                scheduler.remove(id)
        scheduler.finished(step, 1.0)
        assert others_tokens <= long + 4 * short, "newcomers went before it for ever"


def test_a_short_question_overtakes_a_long_document() -> None:
    scheduler = Scheduler(Limits(4, 4, 4096, chunk_tokens=64, mixed_tokens=64))
    scheduler.add(1, 1000, 1100)
    scheduler.admit()
    scheduler.finished(step := scheduler.plan(), 1.0)
    assert step.prefill == ((1, 64),)
    scheduler.add(2, 20, 40)
    scheduler.admit()
    assert scheduler.plan().prefill == ((2, 20), (1, 44))


def test_answers_get_their_share_of_the_time_beside_a_long_prompt() -> None:
    """Mixed steps cost 8, others 1: with a share of one half, eight steps of answers alone follow each mixed one."""
    scheduler = Scheduler(Limits(4, 4, 4096, chunk_tokens=64, mixed_tokens=16))
    scheduler.add(1, 4, 500)
    scheduler.admit()
    scheduler.finished(scheduler.plan(), 1.0)
    scheduler.add(2, 64, 100)
    scheduler.admit()
    kinds = []
    while len(kinds) < 27:
        step = scheduler.plan()
        assert step.decode == (1,)
        kinds.append("mixed" if step.prefill else "alone")
        scheduler.finished(step, 8.0 if step.prefill else 1.0)
    assert kinds == (["mixed"] + ["alone"] * 8) * 3


def test_the_youngest_is_put_back_and_comes_first_again() -> None:
    scheduler = Scheduler(Limits(3, 9, 6 * BLOCK, 64, 64, BLOCK, growth_tokens=0))
    for id in (1, 2, 3):
        scheduler.add(id, 9, 30)  # two blocks each, up to four
    scheduler.add(4, 1, 2)
    assert scheduler.admit() == (1, 2, 3)
    scheduler.finished(scheduler.plan(), 1.0)
    put_back: tuple[int, ...] = ()
    while not put_back:
        step = scheduler.plan()
        put_back = step.preempted
        scheduler.finished(step, 1.0)
    assert put_back == (3,) and scheduler.waiting == (3, 4)
    assert scheduler.admit() == (), "number 4 would fit, and must not pass number 3"
    scheduler.remove(1)
    assert scheduler.admit()[0] == 3


def test_other_room_than_that_of_tokens_limits_admission_but_never_the_only_job() -> None:
    scheduler = Scheduler(Limits(3, 9, 60 * BLOCK, 64, 64, BLOCK))
    for id in (1, 2, 3):
        scheduler.add(id, 9, 30)
    assert scheduler.admit(0) == (1,) and scheduler.admit(0) == ()
    assert scheduler.admit(1) == (2,) and scheduler.admit(None) == (3,)
