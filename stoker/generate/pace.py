"""How fast a batcher went in the last seconds, and how long a newcomer would wait. Pure: the clock is the caller's."""

from collections import deque
from itertools import pairwise

WINDOW_S = 4.0
REMEMBERED = 16
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 600.0


class Pace:
    """Steps of the last seconds and the length of the last jobs."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque()  # when it ended, tokens decoded, tokens prefilled
        self._jobs_s: deque[float] = deque(maxlen=REMEMBERED)

    def step(self, now_s: float, decoded: int, prefilled: int) -> None:
        self._steps.append((now_s, decoded, prefilled))
        self._forget(now_s)

    def ended(self, job_s: float) -> None:
        self._jobs_s.append(job_s)

    def rates(self, now_s: float) -> tuple[float, float]:
        """(decoded, prefilled) tokens a second; the last step counts however long it took."""
        self._forget(now_s)
        if len(self._steps) < 2:
            return 0.0, 0.0
        span = max(now_s - self._steps[0][0], 1e-9)
        rest = list(self._steps)[1:]
        return sum(step[1] for step in rest) / span, sum(step[2] for step in rest) / span

    def wait_s(self, ahead: int, parallel: int) -> float:
        """When a place is probably free for a job with `ahead` before it, itself included."""
        mean = sum(self._jobs_s) / len(self._jobs_s) if self._jobs_s else LEAST_WAIT_S
        return min(max(mean * ahead / parallel, LEAST_WAIT_S), MOST_WAIT_S)

    def _forget(self, now_s: float) -> None:
        """Keep one step from before the window, where the span begins; nothing after a long silence."""
        while len(self._steps) > 2 and now_s - self._steps[1][0] > WINDOW_S:
            self._steps.popleft()
        if self._steps and now_s - self._steps[-1][0] > max(WINDOW_S, 2 * self._longest_s()):
            self._steps.clear()

    def _longest_s(self) -> float:
        ends = [step[0] for step in self._steps]
        return max((after - before for before, after in pairwise(ends)), default=0.0)
