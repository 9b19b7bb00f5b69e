"""A progress bar for work measured in bytes: share, rate and time left, on stderr, so that results can be piped.

Owns looks alone. Where stderr is no terminal it prints a line now and then instead of drawing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.store.sizes import show_bytes

LINE_EVERY_S = 10.0


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told of each further piece of bytes."""
    if sys.stderr.isatty():
        yield from _drawn(title, total)
    else:
        yield from _printed(title, total)


def _drawn(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _printed(title: str, total: int) -> Iterator[Callable[[int], None]]:
    start = last = time.monotonic()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            rate = done / (now - start)
            left = (total - done) / rate if rate else 0.0
            line = f"{title}: {show_bytes(done)} of {show_bytes(total)}, {show_bytes(int(rate))}/s, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    yield advance
