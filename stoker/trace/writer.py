"""Records a run into one trace file, cheaply and in bounded memory.

Rows and routes are held as they came and packed into flat arrays between steps, many at a time, so that a layer hardly
waits for its recorder. Every few seconds the end of a step saves what has gathered in a part beside the
file, and begins another when it is half a megabyte; when no step comes any more, a thread saves what is left.
`close` joins the parts into FILE and removes them. After a crash the parts remain and can be read. Must not need torch:
tensors are joined by the torch that they came from.
"""

import json
import os
import shutil
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic_ns
from typing import Any

import numpy as np
from safetensors import SafetensorError

from stoker.errors import TraceError
from stoker.trace.columns import join_files, write_columns
from stoker.trace.events import FORMAT, ROUTE_COLUMNS, TABLES, VERSION

ROUTES_PER_PART = 1 << 17
ROW_INTEGERS_PER_PART = 1 << 16  # what has gathered is written again with each save: parts are small
SAVE_EVERY_NS = 3 * 10**9  # what a crash may lose
LONGEST_SAVE_S = 5.0  # closing waits no longer: while the interpreter ends, the thread may never run again
IDLE_S = 1.0  # without a step for so long, what waits is saved too
HELD_COLUMNS = ("step", "pool", "layer", "hits", "misses", "wait_ns", "time_ns")
ROWS_HELD = 1 << 9  # rows, and tokens of routes, that wait to be packed between steps: later, and they leave the caches


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
        self._gathering = Lock()  # the arrays below; what is held needs none (see _pack)
        self._idle = _IdleSaver(self._save_what_waits)
        self._running_step = 0
        self._routes_before = 0  # entries in earlier parts
        self._experts, self._weights = array("i"), array("f")
        self._held_layers: list[tuple[int, ...]] = []  # of each layer call HELD_COLUMNS; its routes are in the lists
        self._held_experts: list[Any] = []
        self._held_weights: list[Any] = []
        self._held_reads: list[tuple[int, ...]] = []
        self._held_evictions: list[tuple[int, ...]] = []
        self._layer, self._read, self._evict, self._step = (array("q") for _ in range(4))

    def describe(self, **more: Any) -> None:
        """Add to `about` what is known only once the model is loaded; call it before the first step."""
        self._about |= more
        self._metadata["about"] = json.dumps(self._about, default=str)

    def layer(
        self, step: int, pool: int, layer: int, experts_TK: Any, weights_TK: Any, hits: int, misses: int, wait_ns: int
    ) -> None:
        self._running_step = step
        self._held_layers.append((step, pool, layer, hits, misses, wait_ns, monotonic_ns()))
        self._held_experts.append(experts_TK)
        self._held_weights.append(weights_TK)

    def read(self, pool: int, expert: int, cls: int, submit_ns: int, start_ns: int, end_ns: int, nbytes: int) -> None:
        self._held_reads.append((self._running_step, pool, expert, cls, submit_ns, start_ns, end_ns, nbytes))

    def evict(self, pool: int, expert: int) -> None:
        self._held_evictions.append((self._running_step, pool, expert, monotonic_ns()))

    def step(self, step: int, phase: int, n_tokens: int, start_ns: int, end_ns: int, rss_bytes: int) -> None:
        with self._gathering:
            self._end_step(step, phase, n_tokens, start_ns, end_ns, rss_bytes)
        self._idle.wake()

    def _end_step(self, step: int, phase: int, n_tokens: int, start_ns: int, end_ns: int, rss_bytes: int) -> None:
        self._step.extend((step, phase, n_tokens, start_ns, end_ns, rss_bytes))
        self._running_step = step + 1
        if self._saved_ns is None:
            self._saved_ns = start_ns
        if max(len(self._held_layers) * n_tokens, len(self._held_reads), len(self._held_evictions)) > ROWS_HELD:
            self._pack()
        integers = len(self._held_layers) * len(TABLES["layer"])
        integers += len(self._layer) + len(self._read) + len(self._evict) + len(self._step)
        if integers > ROW_INTEGERS_PER_PART or len(self._experts) > ROUTES_PER_PART // 2:
            self._write_part()
            self._saved_ns = end_ns
        elif end_ns - self._saved_ns > SAVE_EVERY_NS:
            self._save()
            self._saved_ns = end_ns

    def close(self) -> None:
        if self._closed:
            return
        self._idle.stop()
        self._write_part()
        with self._writing():
            join_files([self._part(index) for index in range(self._part_count)], self.path, self._metadata)
            shutil.rmtree(self._parts)
        self._closed = True

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pack(self) -> None:
        """Copy what is held into the arrays, many calls at a time.

        Calls may come meanwhile: each list is copied and shortened by what was copied, so that nothing gets lost.
        """
        for held, packed in ((self._held_reads, self._read), (self._held_evictions, self._evict)):
            if rows := held[:]:
                packed.frombytes(np.array(rows, np.int64).tobytes())
                del held[: len(rows)]
        if count := len(self._held_weights):  # the last that a call appends to
            self._pack_layers(count)

    def _pack_layers(self, count: int) -> None:
        columns = dict(zip(HELD_COLUMNS, np.array(self._held_layers[:count], np.int64).T, strict=True))
        experts, tokens, widths = _joined(self._held_experts[:count])
        weights, _, _ = _joined(self._held_weights[:count])
        entries = tokens * widths
        columns |= {"tokens": tokens, "k": widths}
        columns["route_start"] = self._routes_before + len(self._experts) + np.cumsum(entries) - entries
        table = np.stack([columns[name] for name in TABLES["layer"]], 1)
        self._layer.frombytes(table.astype(np.int64).tobytes())
        self._experts.frombytes(experts.astype(np.int32).tobytes())
        self._weights.frombytes(weights.astype(np.float32).tobytes())
        for held in (self._held_layers, self._held_experts, self._held_weights):
            del held[:count]

    def _save_what_waits(self) -> None:
        with self._gathering, suppress(TraceError):  # the next step or `close` meets it too, and can say so
            self._save()

    def _write_part(self) -> None:
        """Save the current part for good and begin another."""
        self._save()
        self._part_count += 1
        self._routes_before += len(self._experts)
        for rows in (self._layer, self._read, self._evict, self._step, self._experts, self._weights):
            del rows[:]

    def _save(self) -> None:
        """Write what the current part holds so far; the file is whole at all times."""
        self._pack()
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


class _IdleSaver:
    """Calls `save` once when `wake` has not been called for IDLE_S. A thread from the first `wake` to `stop`."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._woken = self._saved = 0
        self._ended = Event()
        self._thread: Thread | None = None

    def wake(self) -> None:
        self._woken += 1
        if self._thread is None:
            self._thread = Thread(target=self._watch, name="trace-idle", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(LONGEST_SAVE_S)

    def _watch(self) -> None:
        seen = 0
        while not self._ended.wait(IDLE_S):
            if seen == self._woken > self._saved:
                self._save()
                self._saved = seen
            seen = self._woken


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


def _joined(calls: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices [T, K] of several calls, flat one after the other; the T and the K of each.

    torch, where the caller uses it, joins its tensors much faster than they can be converted one by one.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(calls[0], torch.Tensor):
        with suppress(RuntimeError, TypeError):  # of several widths or kinds: one by one
            joined = torch.cat(calls).detach()
            single = len(joined) == len(calls)  # a decode step's
            tokens = np.ones(len(calls), np.int64) if single else np.array([len(call) for call in calls])
            return _array(joined).reshape(-1), tokens, np.full(len(calls), joined.shape[1])
    arrays = [_array(call) for call in calls]
    shapes = np.array([one.shape for one in arrays])
    return np.concatenate([one.reshape(-1) for one in arrays]), shapes[:, 0], shapes[:, 1]


def _array(matrix: Any) -> np.ndarray:
    """An array of any matrix; tensors that numpy cannot take as they are (bfloat16, with a gradient) are converted."""
    try:
        return np.asarray(matrix)
    except (TypeError, RuntimeError):
        return np.asarray(matrix.detach().float())


def parts_folder(path: Path) -> Path:
    """Where the parts of a trace lie until it is closed."""
    return path.parent / f"{path.name}.parts"  # with_name refuses a path without a name, such as "."
