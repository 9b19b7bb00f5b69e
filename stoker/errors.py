"""The errors of stoker. Each says what failed, where, what was expected, what was found, and what to do.

Raised for the world (files, options, machines); a broken invariant of our own is an assert.
"""


class StokerError(Exception):
    """Base of every error that a user can meet.

    what: one sentence; where: a file, tensor, flag or (pool, expert); expected, got: the two sides; remedy: what to do.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got, self.remedy = what, where, expected, got, remedy
        super().__init__(self.render())

    def render(self) -> str:
        lines = [self.what if self.where is None else f"{self.where}: {self.what}"]
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.got is not None:
            lines.append(f"  got:      {self.got}")
        if self.remedy is not None:
            lines.append(f"  to do:    {self.remedy}")
        return "\n".join(lines)


class OptionError(StokerError):
    """An option that is unknown, malformed, or does not apply. field: of the HTTP request, where it came by one."""

    exit_code = 2
    field: str | None = None


class CheckpointError(StokerError):
    """A published checkpoint that is missing, damaged, or of a kind that stoker does not support."""


class StoreError(StokerError):
    """A store that is missing, damaged, foreign, or newer than this stoker."""


class ReadError(StokerError):
    """A read that failed or came short. Nothing is computed from its slot.

    errno: 0 when the file ended early. offset, length (bytes), tag: None when the file could not be opened at all.
    """

    errno: int = 0
    path: str = ""
    offset: int | None = None
    length: int | None = None
    tag: int | None = None


class BudgetError(StokerError):
    """A budget below the floor, or a context that does not fit; carries the smallest budget that works."""

    exit_code = 3


class AdapterError(StokerError):
    """An adapter that is missing, damaged, of a kind that is not supported, or made for another store."""


class DiskSpaceError(StokerError):
    """The disk has no room for what was asked."""


class TraceError(StokerError):
    """A trace that is missing, damaged, of another kind, or newer than this stoker."""


class ContextError(OptionError):
    """A request that cannot fit the context: asked_tokens of prompt and answer against limit_tokens."""

    asked_tokens: int = 0
    limit_tokens: int = 0


class QueueFull(StokerError):
    """No more requests can wait now; retry_after_s: when to try again, in seconds."""

    retry_after_s: float = 1.0


class Closing(StokerError):
    """The engine takes no more requests, because it is shutting down or has failed."""
