"""Records a run into one trace file, cheaply and in bounded memory.

Rows are appended to flat integer arrays, routes to preallocated buffers. When a few megabytes have gathered, the end of
a step writes them out as a part beside the file; `close` joins the parts into FILE and removes them. After a crash the
parts remain and can be read as they are. Must not know torch: tensors come in through numpy's array protocol.
"""

import json
import shutil
from array import array
from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np

from stoker.errors import TraceError
from stoker.trace.columns import join_files, write_columns
from stoker.trace.events import FORMAT, ROUTE_COLUMNS, TABLES, VERSION

ROUTES_PER_PART = 1 << 18
ROW_INTEGERS_PER_PART = 1 << 18


class TraceWriter:
    """A Recorder that writes `path`. `about`: what ran (model, fingerprint, command, machine ...), kept as JSON text.

    Raises TraceError at once where the file exists or its folder does not.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._parts = parts_folder(self.path)
        if self.path.exists():
            raise TraceError("exists already", where=str(path), remedy="name another trace file, or delete this one")
        try:
            shutil.rmtree(self._parts, ignore_errors=True)
            self._parts.mkdir()
        except OSError as error:
            raise TraceError("cannot be written", where=str(path), got=error.strerror) from error
        self._about = dict(about or {})
        self._metadata = {"format": FORMAT, "version": str(VERSION)}
        self.describe()
        self._part_count = 0
        self._closed = False
        self._running_step = 0
        self._routes_before = 0  # entries in earlier parts
        self._route_count = 0
        self._experts = np.empty(ROUTES_PER_PART, np.int32)
        self._weights = np.empty(ROUTES_PER_PART, np.float32)
        self._layer, self._read, self._evict, self._step = (array("q") for _ in range(4))

    def describe(self, **more: Any) -> None:
        """Add to `about` what is known only once the model is loaded; call it before the first step."""
        self._about |= more
        self._metadata["about"] = json.dumps(self._about, default=str)

    def layer(
        self, step: int, pool: int, layer: int, experts_TK: Any, weights_TK: Any, hits: int, misses: int, wait_ns: int
    ) -> None:
        experts = np.asarray(experts_TK)
        tokens, k = experts.shape
        start, end = self._route_count, self._route_count + experts.size
        if end > len(self._experts):
            self._grow(end)
        self._experts[start:end] = experts.reshape(-1)
        self._weights[start:end] = _floats(weights_TK).reshape(-1)
        self._route_count = end
        self._running_step = step
        route_start = self._routes_before + start
        self._layer.extend((step, pool, layer, tokens, k, hits, misses, wait_ns, monotonic_ns(), route_start))

    def read(self, pool: int, expert: int, cls: int, submit_ns: int, start_ns: int, end_ns: int, nbytes: int) -> None:
        self._read.extend((self._running_step, pool, expert, cls, submit_ns, start_ns, end_ns, nbytes))

    def evict(self, pool: int, expert: int) -> None:
        self._evict.extend((self._running_step, pool, expert, monotonic_ns()))

    def step(self, step: int, phase: int, n_tokens: int, start_ns: int, end_ns: int, rss_bytes: int) -> None:
        self._step.extend((step, phase, n_tokens, start_ns, end_ns, rss_bytes))
        self._running_step = step + 1
        rows = len(self._layer) + len(self._read) + len(self._evict) + len(self._step)
        if rows > ROW_INTEGERS_PER_PART or self._route_count > ROUTES_PER_PART // 2:
            self._write_part()

    def close(self) -> None:
        if self._closed:
            return
        self._write_part()
        parts = [self._parts / f"part-{index:05d}.safetensors" for index in range(self._part_count)]
        join_files(parts, self.path, self._metadata)
        shutil.rmtree(self._parts)
        self._closed = True

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, needed: int) -> None:
        """A step larger than a part (a long prefill): make room for it; the next part shrinks again."""
        size = 1 << (needed - 1).bit_length()
        self._experts = np.resize(self._experts, size)
        self._weights = np.resize(self._weights, size)

    def _write_part(self) -> None:
        columns: dict[str, np.ndarray] = {}
        for table, names in TABLES.items():
            rows: array[int] = getattr(self, f"_{table}")
            cells = np.array(rows, np.int64).reshape(-1, len(names))
            columns.update({f"{table}.{name}": cells[:, index] for index, name in enumerate(names)})
            del rows[:]
        for name, buffer in zip(ROUTE_COLUMNS, (self._experts, self._weights), strict=True):
            columns[name] = buffer[: self._route_count]
        write_columns(self._parts / f"part-{self._part_count:05d}.safetensors", columns, self._metadata)
        self._part_count += 1
        self._routes_before += self._route_count
        self._route_count = 0
        if len(self._experts) > ROUTES_PER_PART:
            self._experts = np.empty(ROUTES_PER_PART, np.int32)
            self._weights = np.empty(ROUTES_PER_PART, np.float32)


def _floats(weights: Any) -> np.ndarray:
    """An array of any weights; tensors that numpy cannot take as they are (bfloat16, with a gradient) are converted."""
    try:
        return np.asarray(weights)
    except (TypeError, RuntimeError):
        return np.asarray(weights.detach().float())


def parts_folder(path: Path) -> Path:
    """Where the parts of a trace lie until it is closed."""
    return path.with_name(path.name + ".parts")
