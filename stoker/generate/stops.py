"""Stop strings in a stream of text pieces: nothing that may be the start of a stop string goes out before it is known.

Pure text; knows no tokens. The stop string itself never goes out.
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one output for any of `stops` (none of them empty)."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """The text that may go out now. Sets `hit` when a stop string is complete: then the output ends before it."""
        assert self.hit is None, "the output has ended"
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = self._waiting(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the output ends without a stop string."""
        text, self._held = self._held, ""
        return text

    def _waiting(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0
