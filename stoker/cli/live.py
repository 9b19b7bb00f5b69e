"""`stoker run --live`: the run's essentials in the terminal's last lines while the text streams above them.

The lines lie outside the region that scrolls, so the text and its stream are never touched; they are drawn on stderr.
Owns that region and the moving figures; reads the model's counters between tokens.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from stoker.errors import OptionError
from stoker.generate.rates import Rates, Window

if TYPE_CHECKING:
    from rich.text import Text

    from stoker.generate.model import Model

REDRAW_S = 0.2
LINES = 2
LEDGER = (
    ("process_bytes", "libraries", "bright_black"),
    ("dense_bytes", "dense", "magenta"),
    ("kv_bytes", "KV", "green"),
    ("slots_bytes", "slots", "dark_orange"),
    ("ring_bytes", "ring", "cyan"),
    ("scratch_bytes", "scratch", "yellow"),
    ("reserve_bytes", "reserve", "white"),
)


class Region:
    """The last lines of a terminal, taken out of what scrolls. Follows a change of size; `close` gives them back."""

    def __init__(self, terminal: TextIO, lines: int = LINES) -> None:
        self._terminal, self._lines = terminal, lines
        self._rows = 0

    @property
    def columns(self) -> int:
        return os.get_terminal_size(self._terminal.fileno()).columns

    def draw(self, lines: Iterable[str]) -> None:
        """Write one text a line, each already cut to the width; the cursor stays where the text left it."""
        rows = os.get_terminal_size(self._terminal.fileno()).lines
        if rows <= self._lines + 2:
            return
        if rows != self._rows:
            self._take(rows)
        first = rows - self._lines + 1
        drawn = "".join(f"\x1b[{first + i};1H\x1b[2K{line}" for i, line in enumerate(lines))
        self._write(f"\x1b7{drawn}\x1b8")

    def close(self) -> None:
        if self._rows:
            first = self._rows - self._lines + 1
            cleared = "".join(f"\x1b[{first + i};1H\x1b[2K" for i in range(self._lines))
            self._write(f"\x1b7\x1b[r{cleared}\x1b8")
            self._rows = 0

    def _take(self, rows: int) -> None:
        """Scroll up for room, then end the scrolling region above the lines; the cursor stays in it."""
        room = "\n" * self._lines if not self._rows else ""
        up = f"\x1b[{self._lines}A" if room else ""
        self._write(f"{room}\x1b7\x1b[1;{rows - self._lines}r\x1b8{up}")
        self._rows = rows

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


LEAST_BAR = 10  # columns: below it the words beside the bar give way


class Live:
    """Watches one run of a model. Use as a context manager around the streaming.

    Raises OptionError where stderr is no terminal: there would be nothing to draw on.
    """

    def __init__(self, model: Model, terminal: TextIO) -> None:
        check_terminal(terminal)
        self._model, self._region, self._window = model, Region(terminal), Window()
        self._prompt: tuple[int, int] | None = None
        self._drawn_s = 0.0

    def __enter__(self) -> Live:
        self.refresh(force=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._region.close()

    def on_prefill(self, done: int, total: int) -> None:
        """For `stream(on_prefill=...)`."""
        self._prompt = (done, total)
        self.refresh(force=True)

    def watched(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces as they are; the lines are redrawn in between, after the reader has written a piece."""
        for piece in pieces:
            self._prompt = None
            yield piece
            self.refresh()

    def refresh(self, force: bool = False) -> None:
        now_s = time.monotonic()
        if force or now_s - self._drawn_s >= REDRAW_S:
            self._drawn_s = now_s
            self._window.add(now_s, self._model.stats())
            self._region.draw(
                render(self._window.rates(), self._model.ledger(), _rss(), self._region.columns, self._prompt)
            )


def check_terminal(terminal: TextIO) -> None:
    """Raises OptionError where `--live` has nothing to draw on."""
    if not terminal.isatty():
        raise OptionError("needs a terminal on stderr", where="--live", remedy="leave it out, or use --trace FILE")


def _rss() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def render(
    rates: Rates, ledger: Mapping[str, Any], rss_bytes: int, columns: int, prompt: tuple[int, int] | None = None
) -> list[str]:
    """The two lines as terminal text, at most `columns` wide: speed, and memory by use."""
    return [_ansi(line, columns) for line in (_speed(rates, prompt, columns), _memory(ledger, rss_bytes, columns))]


def _speed(rates: Rates, prompt: tuple[int, int] | None, columns: int) -> Text:
    """As many whole fields as fit: half a number would be another number."""
    from rich.text import Text

    line = Text()
    for field in _fields(rates, prompt):
        if line and len(line) + len(field) > columns:
            break
        line.append(field)
    return line


def _fields(rates: Rates, prompt: tuple[int, int] | None) -> Iterator[Text]:
    from rich.text import Text

    if prompt is not None:
        yield Text(f"prompt {prompt[0]}/{prompt[1]}", "bold")
    else:
        yield Text.assemble(("-" if rates.tok_s is None else f"{rates.tok_s:.2f}", "bold"), " tok/s")
    stall = rates.stall
    red = "red" if (stall or 0) > 0.5 else "bold"
    yield Text.assemble("  stall ", ("-" if stall is None else f"{stall:.0%}", red))
    yield Text.assemble("  hits ", ("-" if rates.hit_rate is None else f"{rates.hit_rate:.1%}", "bold"))
    read = "-" if rates.read_bytes_s is None else f"{rates.read_bytes_s / 1e6:,.0f}"
    yield Text.assemble("  read ", (read, "bold"), " MB/s")
    if prompt is None and rates.bytes_per_token is not None:
        yield Text(f", {rates.bytes_per_token / 1e6:,.1f} MB/token")
    yield Text(f"  {rates.decoded} tokens", "dim")


def _memory(ledger: Mapping[str, Any], rss_bytes: int, columns: int) -> Text:
    """A bar of the budget by use, named where the part is wide enough, and what is resident now."""
    from rich.text import Text

    resident = f" {rss_bytes / 2**30:.2f}"
    tails = (f"{resident} of {ledger['budget_bytes'] / 2**30:.2f} GiB resident", f"{resident} GiB", "")
    tail = next((one for one in tails if columns - len(one) - 1 >= LEAST_BAR), "")
    width = max(1, columns - len(tail) - 1)
    line, at, spent = Text(), 0, 0
    for key, name, colour in LEDGER:
        spent += int(ledger[key])
        end = min(width, round(width * spent / ledger["budget_bytes"]))
        cells = end - at
        label = f" {name}" if cells > len(name) + 1 else ""
        line.append(label.ljust(cells), f"black on {colour}")
        at = end
    return line.append("·" * (width - at), "dim").append(tail)


def _ansi(line: Text, columns: int) -> str:
    from rich.console import Console

    line.truncate(columns, overflow="crop")
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=columns, highlight=False).print(line, end="", soft_wrap=True)
    return out.getvalue()
