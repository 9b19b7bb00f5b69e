"""What a trace records: the tables, their columns and units, and the Recorder that the engine calls.

Owns the schema alone; writer.py and reader.py follow it. Knows nothing of torch, models or policies.
docs/trace-format.md describes the same for readers that do not have stoker.
"""

from enum import IntEnum
from typing import Any, Protocol

FORMAT = "stoker-trace"
VERSION = 1


class Phase(IntEnum):
    """What a step was for. A step that mixes both is `MIXED`."""

    PREFILL = 0
    DECODE = 1
    MIXED = 2


class ReadClass(IntEnum):
    """Why a record was read."""

    DEMAND = 0
    PREFETCH = 1
    STREAM = 2  # whole-layer prefill
    CANCELLED = 3  # submitted and never read: end_ns is the time of the cancellation, bytes 0
    LATE = 4  # a prefetch that was still in flight when a step asked for it


TABLES: dict[str, tuple[str, ...]] = {
    "step": ("step", "phase", "tokens", "start_ns", "end_ns", "rss_bytes"),
    "layer": ("step", "pool", "layer", "tokens", "k", "hits", "misses", "wait_ns", "time_ns", "route_start"),
    "read": ("step", "pool", "expert", "class", "submit_ns", "start_ns", "end_ns", "bytes"),
    "evict": ("step", "pool", "expert", "time_ns"),
}
"""Integer tables, all columns int64, one row an event, in the order of recording. `layer.route_start` is an index into
the route columns; `time_ns` is when the row was recorded (for a layer: when its experts were computed)."""

ROUTE_COLUMNS = {"route.experts": "int32", "route.weights": "float32"}
"""The routes of all layer rows one after the other: row i owns `tokens * k` entries from `route_start`, token-major."""


class Recorder(Protocol):
    """What the engine calls while it runs; None stands for "off". Times are `time.monotonic_ns()`.

    Every call returns in microseconds; routes are copied between steps and must not be changed after they were given.
    Calls may come from any thread that holds the GIL. The calls of one step come between its predecessor's `step` and
    its own, so reads and evictions are counted to the step that is running. Steps are numbered from 0 by the caller.
    """

    def layer(
        self, step: int, pool: int, layer: int, experts_TK: Any, weights_TK: Any, hits: int, misses: int, wait_ns: int
    ) -> None:
        """One MoE layer of one step. `experts_TK`: integers, `weights_TK`: floats (CPU tensors, arrays or lists).

        hits and misses count distinct experts of the step (the event), not tokens; wait_ns is the stall of its acquire.
        """

    def read(self, pool: int, expert: int, cls: int, submit_ns: int, start_ns: int, end_ns: int, nbytes: int) -> None:
        """One record read (or cancelled), once it is complete. `cls` is a ReadClass."""

    def evict(self, pool: int, expert: int) -> None:
        """One expert lost its slot."""

    def step(self, step: int, phase: int, n_tokens: int, start_ns: int, end_ns: int, rss_bytes: int) -> None:
        """One step is over. `phase` is a Phase; `rss_bytes` 0 where it was not measured."""

    def close(self) -> None:
        """Write what is left and finish the file. Safe to call twice."""
