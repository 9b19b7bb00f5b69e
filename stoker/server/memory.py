"""Memory of the process: how much is resident, and giving back what is free. Knows malloc, no models."""

import ctypes
import gc
from contextlib import suppress

import psutil

_M_ARENA_MAX = -8  # of mallopt(3)
_ARENAS = 2


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


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


def allocated_bytes() -> int | None:
    """What malloc has given out and not got back: what the process needs, where RSS also counts what is free and kept.
    None where malloc does not tell (glibc before 2.33, other systems)."""
    with suppress(OSError, AttributeError):
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
        mallinfo2.restype = _MallocInfo
        told = mallinfo2()
        return int(told.uordblks + told.hblkhd)
    return None


def set_apart() -> None:
    """After a model is loaded: leave all that lives now out of Python's collections until `together`.

    A full collection waits until a quarter as many objects are new as have outlived the last one (CPython's
    gc module). Beside a model's million that is tens of thousands of requests' cycles, tens of MiB."""
    gc.collect()
    gc.freeze()
    gc.collect()  # counts the survivors again: now next to none


def together() -> None:
    """Before a model goes: its cycles can be collected again."""
    gc.unfreeze()


def collect_and_trim() -> None:
    """`trim`, with Python's cycles first: after a model has gone."""
    gc.collect()
    trim()
