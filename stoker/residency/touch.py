"""Touching the slots' pages ahead of the first reads, in a thread of its own.

A direct read into a page that was never used waits until the system has found and cleared one, in the middle of a first
prompt; on a virtual machine that gave memory back to its host that is slower than the disk. Owns one thread; knows no
slots.
"""

import threading

from stoker.native.io import Arena

STEP_BYTES = 2 << 20  # a huge page; stopping waits for one step


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
            self._arena.populate(self.touched_bytes, step)
            self.touched_bytes += step

    def wait(self) -> None:
        """Until all is touched."""
        self._thread.join()

    def stop(self) -> None:
        """Returns when no page is being touched any more. Idempotent."""
        self._stopped.set()
        self._thread.join()
