"""What one HTTP request holds: room for its body until its answer begins, a model until its answer is over.

The outermost layer of the app opens it and gives everything back, whatever ends the request.
"""

import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

Release = Callable[[], Awaitable[None]]


class Held:
    """The releases of one request, each called once."""

    def __init__(self) -> None:
        self.id = "req_" + secrets.token_hex(12)  # told to the client, so that a line of the log can be found
        self._until_answer: list[Release] = []
        self._until_end: list[Release] = []

    def add(self, release: Release, *, until_answer: bool = False) -> None:
        (self._until_answer if until_answer else self._until_end).append(release)

    async def answering(self) -> None:
        """The answer begins."""
        while self._until_answer:
            await self._until_answer.pop()()

    async def end(self) -> None:
        """The request is over."""
        await self.answering()
        while self._until_end:
            await self._until_end.pop()()


_current: ContextVar[Held | None] = ContextVar("held", default=None)


def begin() -> Held:
    """A new holder for the request that this context runs."""
    held = Held()
    _current.set(held)
    return held


def current() -> Held | None:
    """The holder of the request that runs now, if one does."""
    return _current.get()


def held() -> Held:
    """The holder of the request that runs now."""
    current = _current.get()
    assert current is not None, "nothing is held outside of a request"
    return current
