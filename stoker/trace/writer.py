"""Records a run into one trace file, cheaply and in bounded memory.

Rows are appended to flat integer arrays. Routes are held as they came and copied between steps, many at a time, so that
a layer hardly waits for its recorder. Every few seconds the end of a step saves what has gathered in a part beside the
file, and begins another when it is a few megabytes; `close` joins the parts into FILE and removes them. After a crash
the parts remain and can be read. Must not know torch: tensors come in by numpy's array protocol.
"""

import json
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
from safetensors import SafetensorError

from stoker.errors import TraceError
from stoker.trace.columns import join_files, write_columns
from stoker.trace.events import FORMAT, ROUTE_COLUMNS, TABLES, VERSION

ROUTES_PER_PART = 1 << 18
ROW_INTEGERS_PER_PART = 1 << 18
SAVE_EVERY_NS = 3 * 10**9  # what a crash may lose
TOKENS_HELD = 1 << 10  # tokens (times layers) whose routes wait to be copied between steps


class TraceWriter:
    """A Recorder that writes `path`. `about`: what ran (model, fingerprint, command, machine ...), kept as JSON text.

    Raises TraceError at once where the file exists, or parts of a run that crashed, or where its folder does not; later
    where the disk is full.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._parts = parts_folder(self.path)
        check_new(self.path)
        with self._writing():
            shutil.rmtree(self._parts, ignore_errors=True)
            self._parts.mkdir()
        self._about = dict(about or {})
        self._metadata = {"format": FORMAT, "version": str(VERSION)}
        self.describe()
        self._part_count = 0
        self._saved_ns: int | None = None  # on the clock of the steps
        self._closed = False
        self._running_step = 0
        self._routes_before = 0  # entries in earlier parts
        self._experts, self._weights = array("i"), array("f")
        self._held: list[tuple[Any, ...]] = []  # what `layer` was given, and when
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

    def read(self, pool: int, expert: int, cls: int, submit_ns: int, start_ns: int, end_ns: int, nbytes: int) -> None:
        self._read.extend((self._running_step, pool, expert, cls, submit_ns, start_ns, end_ns, nbytes))

    def evict(self, pool: int, expert: int) -> None:
        self._evict.extend((self._running_step, pool, expert, monotonic_ns()))

    def step(self, step: int, phase: int, n_tokens: int, start_ns: int, end_ns: int, rss_bytes: int) -> None:
        self._step.extend((step, phase, n_tokens, start_ns, end_ns, rss_bytes))
        self._running_step = step + 1
        if self._saved_ns is None:
            self._saved_ns = start_ns
        if len(self._held) * n_tokens > TOKENS_HELD:
            self._take_routes()
        held = len(self._held) * len(TABLES["layer"])
        integers = held + len(self._layer) + len(self._read) + len(self._evict) + len(self._step)
        if integers > ROW_INTEGERS_PER_PART or len(self._experts) > ROUTES_PER_PART // 2:
            self._write_part()
            self._saved_ns = end_ns
        elif end_ns - self._saved_ns > SAVE_EVERY_NS:
            self._save()
            self._saved_ns = end_ns

    def close(self) -> None:
        if self._closed:
            return
        self._write_part()
        with self._writing():
            join_files([self._part(index) for index in range(self._part_count)], self.path, self._metadata)
            shutil.rmtree(self._parts)
        self._closed = True

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_routes(self) -> None:
        """Copy what is held, many steps at a time: code that has just run runs faster."""
        all_experts, all_weights, add_row = self._experts, self._weights, self._layer.extend
        for step, pool, layer, experts_TK, weights_TK, hits, misses, wait_ns, time_ns in self._held:
            route_start = self._routes_before + len(all_experts)
            tokens = len(experts_TK)
            if tokens == 1:  # a decode step has many of these: lists are the fast way
                experts = _plain(experts_TK)[0]
                k = len(experts)
                all_experts.extend(experts)
                all_weights.extend(_plain(weights_TK)[0])
            else:
                experts = np.asarray(experts_TK)
                k = experts.shape[1]
                all_experts.frombytes(experts.astype(np.int32).tobytes())
                all_weights.frombytes(_floats(weights_TK).astype(np.float32).tobytes())
            add_row((step, pool, layer, tokens, k, hits, misses, wait_ns, time_ns, route_start))
        self._held.clear()

    def _write_part(self) -> None:
        """Save the current part for good and begin another."""
        self._save()
        self._part_count += 1
        self._routes_before += len(self._experts)
        for rows in (self._layer, self._read, self._evict, self._step, self._experts, self._weights):
            del rows[:]

    def _save(self) -> None:
        """Write what the current part holds so far; the file is whole at all times."""
        self._take_routes()
        columns: dict[str, np.ndarray] = {}
        for table, names in TABLES.items():
            cells = np.array(getattr(self, f"_{table}"), np.int64).reshape(-1, len(names))
            columns.update({f"{table}.{name}": cells[:, index] for index, name in enumerate(names)})
        for (name, dtype), buffer in zip(ROUTE_COLUMNS.items(), (self._experts, self._weights), strict=True):
            columns[name] = np.array(buffer, dtype)
        unfinished = self._parts / "unfinished"
        with self._writing():
            write_columns(unfinished, columns, self._metadata)
            os.replace(unfinished, self._part(self._part_count))

    def _part(self, index: int) -> Path:
        return self._parts / f"part-{index:05d}.safetensors"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            got = getattr(error, "strerror", None) or error
            raise TraceError("cannot be written", where=str(self.path), got=got) from error


def check_new(path: Path) -> None:
    """Raises TraceError where no trace can be begun: the file or parts of a crashed run are there, or no folder is."""
    parts = parts_folder(path)
    if path.exists():
        raise TraceError("exists already", where=str(path), remedy="name another trace file, or delete this one")
    if any(parts.glob("part-*")):
        raise TraceError(
            "a run that did not finish left its trace", where=str(parts),
            remedy="name another trace file, or delete this folder (`stoker trace summary` reads it)",
        )  # fmt: skip
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        got = "no right to write" if path.parent.is_dir() else "there is no such folder"
        raise TraceError("cannot be written", where=str(path), got=got)


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
