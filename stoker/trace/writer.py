"""Records a run into one trace file, cheaply and in bounded memory.

Rows are appended to flat integer arrays. Routes are held as they came and copied between steps, many at a time, so that
a layer hardly waits for its recorder. When a few megabytes have gathered, the end of a step writes them out as a part
beside the file; `close` joins the parts into FILE and removes them. After a crash the parts remain and can be read.
Must not know torch: tensors come in by numpy's array protocol.
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
TOKENS_HELD = 1 << 9  # tokens (times layers) whose routes wait to be copied


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
        self._experts, self._weights = array("i"), array("f")
        self._held: list[tuple[Any, ...]] = []  # what `layer` was given, and when
        self._held_tokens = 0
        self._layer, self._read, self._evict, self._step = (array("q") for _ in range(4))

    def describe(self, **more: Any) -> None:
        """Add to `about` what is known only once the model is loaded; call it before the first step."""
        self._about |= more
        self._metadata["about"] = json.dumps(self._about, default=str)

    def layer(
        self, step: int, pool: int, layer: int, experts_TK: Any, weights_TK: Any, hits: int, misses: int, wait_ns: int
    ) -> None:
        self._running_step = step
        self._held.append((step, pool, layer, experts_TK, weights_TK, hits, misses, wait_ns, monotonic_ns()))
        self._held_tokens += len(experts_TK)
        if self._held_tokens > 2 * TOKENS_HELD:  # a prefill: its tensors are not for keeping
            self._take_routes()

    def read(self, pool: int, expert: int, cls: int, submit_ns: int, start_ns: int, end_ns: int, nbytes: int) -> None:
        self._read.extend((self._running_step, pool, expert, cls, submit_ns, start_ns, end_ns, nbytes))

    def evict(self, pool: int, expert: int) -> None:
        self._evict.extend((self._running_step, pool, expert, monotonic_ns()))

    def step(self, step: int, phase: int, n_tokens: int, start_ns: int, end_ns: int, rss_bytes: int) -> None:
        self._step.extend((step, phase, n_tokens, start_ns, end_ns, rss_bytes))
        self._running_step = step + 1
        if self._held_tokens > TOKENS_HELD:
            self._take_routes()
        held = len(self._held) * len(TABLES["layer"])
        integers = held + len(self._layer) + len(self._read) + len(self._evict) + len(self._step)
        if integers > ROW_INTEGERS_PER_PART or len(self._experts) > ROUTES_PER_PART // 2:
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

    def _take_routes(self) -> None:
        """Copy what is held, many steps at a time: code that has just run runs faster."""
        for step, pool, layer, experts_TK, weights_TK, hits, misses, wait_ns, time_ns in self._held:
            if len(experts_TK) == 1:  # a decode step has many of these: lists are the fast way
                (experts,), (weights,) = _plain(experts_TK), _plain(weights_TK)
                tokens, k = 1, len(experts)
                self._experts.extend(experts)
                self._weights.extend(weights)
            else:
                array_TK = np.asarray(experts_TK)
                tokens, k = array_TK.shape
                self._experts.frombytes(array_TK.astype(np.int32).tobytes())
                self._weights.frombytes(_floats(weights_TK).astype(np.float32).tobytes())
            route_start = self._routes_before + len(self._experts) - tokens * k
            self._layer.extend((step, pool, layer, tokens, k, hits, misses, wait_ns, time_ns, route_start))
        self._held.clear()
        self._held_tokens = 0

    def _write_part(self) -> None:
        self._take_routes()
        columns: dict[str, np.ndarray] = {}
        for table, names in TABLES.items():
            rows: array[int] = getattr(self, f"_{table}")
            cells = np.array(rows, np.int64).reshape(-1, len(names))
            columns.update({f"{table}.{name}": cells[:, index] for index, name in enumerate(names)})
            del rows[:]
        for (name, dtype), buffer in zip(ROUTE_COLUMNS.items(), (self._experts, self._weights), strict=True):
            columns[name] = np.array(buffer, dtype)
        write_columns(self._parts / f"part-{self._part_count:05d}.safetensors", columns, self._metadata)
        self._part_count += 1
        self._routes_before += len(self._experts)
        del self._experts[:], self._weights[:]


def _plain(rows: Any) -> list[Any]:
    """A tensor, an array or a list as a list."""
    return rows.tolist() if hasattr(rows, "tolist") else rows


def _floats(weights: Any) -> np.ndarray:
    """An array of any weights; tensors that numpy cannot take as they are (bfloat16, with a gradient) are converted."""
    try:
        return np.asarray(weights)
    except (TypeError, RuntimeError):
        return np.asarray(weights.detach().float())


def parts_folder(path: Path) -> Path:
    """Where the parts of a trace lie until it is closed."""
    return path.with_name(path.name + ".parts")
