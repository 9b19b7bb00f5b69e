"""Memory of the process: how much is resident, and giving back what is free. Knows malloc, no models."""

import ctypes
import gc
from contextlib import suppress

import psutil

_M_ARENA_MAX = -8  # of mallopt(3)
_ARENAS = 2


def share_arenas() -> None:
    """Before threads are started: let them share malloc's pools. With one for each, what a thread has let go of serves
    that thread alone, and a server that is asked all sorts of things grows by tens of MiB. glibc alone can be told."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, _ARENAS)


def resident_bytes() -> int:
    """What the process holds now (RSS)."""
    return int(psutil.Process().memory_info().rss)


def trim() -> None:
    """Give back to the system what malloc keeps free. glibc alone can be asked; elsewhere nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def collect_and_trim() -> None:
    """`trim`, with Python's cycles first: after a model has gone."""
    gc.collect()
    trim()
