"""Touching the slots' pages ahead of the first reads, in a thread of its own.

A direct read into a page that was never used waits until the system has found and cleared one, in the middle of a first
prompt; on a virtual machine that gave memory back to its host that is slower than the disk. Owns one thread; knows no
slots.
"""

import threading
import time

from stoker.errors import BudgetError
from stoker.native.io import Arena

STEP_BYTES = 2 << 20
"""A huge page. Short steps, because whoever maps memory waits for the one that is under way."""


class Toucher:
    """Touches an arena front to back until it is done or stopped. The bytes stay as they are."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._stopped = arena, threading.Event()
        self.touched_bytes = 0
        self._thread = threading.Thread(target=self._run, name="stoker-touch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        nbytes = self._arena.nbytes
        while self.touched_bytes < nbytes and not self._stopped.is_set():
            step = min(STEP_BYTES, nbytes - self.touched_bytes)
            started = time.perf_counter()
            try:
                self._arena.populate(self.touched_bytes, step)
            except BudgetError:  # the read that needs the page will fail, and say so where somebody waits for it
                return
            self.touched_bytes += step
            self._stopped.wait(time.perf_counter() - started)  # half the time for whoever maps memory

    def wait(self) -> None:
        """Until all is touched."""
        self._thread.join()

    def stop(self) -> None:
        """Returns when no page is being touched any more. Idempotent."""
        self._stopped.set()
        self._thread.join()
