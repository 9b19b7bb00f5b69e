"""What became of a model's requests, counted from their events: for /metrics and /live.

One Totals per served model name, kept while the server runs; one Watch per request. Every call comes from the server's
event loop. Knows events; no HTTP, no Prometheus, no prompts.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence

from stoker.errors import Closing, ContextError, QueueFull
from stoker.generate.job import Done, Event, Failed, Piece, Progress

# Upper edges in seconds: from a small resident model to a large one from a slow disk.
FIRST_TOKEN_EDGES_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
TOKEN_EDGES_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
RECENT = 32


class Histogram:
    """Counts by upper edge, the last without one, and the sum of what was seen."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(float(edge) for edge in edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times


class Totals:
    """Everything counted about one model's requests since the server started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.finished: Counter[str] = Counter()  # by finish reason; a failure by `failed`
        self.refused: Counter[str] = Counter()  # by reason: full, closing, context, invalid
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.queue_s = Histogram(FIRST_TOKEN_EDGES_S)
        self.first_token_s = Histogram(FIRST_TOKEN_EDGES_S)
        self.token_s = Histogram(TOKEN_EDGES_S)
        self.recent_first_token_s: deque[float] = deque(maxlen=RECENT)

    def watch(self) -> "Watch":
        """Begin to follow a request, at the moment of its submission."""
        return Watch(self)


class Watch:
    """One request: feed it every event, or say why it was refused."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._start_s = totals.clock()
        self._admitted = False
        self._last_token_s: float | None = None

    def refused(self, error: BaseException) -> None:
        """The batcher did not take it."""
        match error:
            case QueueFull():
                reason = "full"
            case Closing():
                reason = "closing"
            case ContextError():
                reason = "context"
            case _:
                reason = "invalid"
        self._totals.refused[reason] += 1

    def event(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._progress()
        elif isinstance(event, Piece):
            self._piece(len(event.samples))
        elif isinstance(event, Done):
            usage = event.result.usage
            self._totals.finished[event.result.finish_reason] += 1
            self._totals.prompt_tokens += usage.prompt_tokens
            self._totals.cached_tokens += usage.cached_tokens
            self._totals.completion_tokens += usage.completion_tokens
        elif isinstance(event, Failed):
            self._totals.finished["failed"] += 1

    def _progress(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._totals.queue_s.add(self._totals.clock() - self._start_s)

    def _piece(self, tokens: int) -> None:
        """The first token's time runs from submission; later tokens' from the one before."""
        if not tokens:
            return
        now_s = self._totals.clock()
        if self._last_token_s is None:
            self._totals.first_token_s.add(now_s - self._start_s)
            self._totals.recent_first_token_s.append(now_s - self._start_s)
        else:
            self._totals.token_s.add((now_s - self._last_token_s) / tokens, tokens)
        self._last_token_s = now_s
