"""Reads a trace: the file, or the parts that a crashed run left behind. Columns come as numpy arrays, mapped lazily.

Checks the format and the version by name. Draws no conclusions: summary.py and the simulator do.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import TraceError
from stoker.trace.columns import map_column, read_header
from stoker.trace.events import FORMAT, ROUTE_COLUMNS, TABLES, VERSION
from stoker.trace.writer import parts_folder


class Trace:
    """One recorded run. `finished` is False where only parts were found. Raises TraceError for anything else."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files, self.finished = _find(self.path)
        headers = [read_header(file) for file in self._files]
        self.metadata = headers[0][0]
        _check(self.path, self.metadata, headers[0][1])
        self._columns = [columns for _, columns in headers]

    @cached_property
    def about(self) -> dict[str, Any]:
        """What ran: model, fingerprint, command, machine, as its recorder wrote it."""
        return json.loads(self.metadata["about"])

    def column(self, name: str) -> np.ndarray:
        """One column over the whole run, for example `layer.hits`."""
        arrays = [map_column(file, columns[name]) for file, columns in zip(self._files, self._columns, strict=True)]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def table(self, name: str) -> dict[str, np.ndarray]:
        """All columns of one of TABLES by their short names, int64 [rows]."""
        return {column: self.column(f"{name}.{column}") for column in TABLES[name]}

    def route(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """experts_TK (int32) and weights_TK (float32) of one row of the layer table."""
        tokens, k, start = (int(self._layer_columns[name][row]) for name in ("tokens", "k", "route_start"))
        experts, weights = (self._routes[name][start : start + tokens * k].reshape(tokens, k) for name in ROUTE_COLUMNS)
        return experts, weights

    @cached_property
    def _layer_columns(self) -> dict[str, np.ndarray]:
        return self.table("layer")

    @cached_property
    def _routes(self) -> dict[str, np.ndarray]:
        return {name: self.column(name) for name in ROUTE_COLUMNS}


def is_trace(path: Path) -> bool:
    """True where `path` is, or has beside it, something of this format (of any version)."""
    try:
        files, _ = _find(path)
        return read_header(files[0])[0].get("format") == FORMAT
    except TraceError:
        return False


def _find(path: Path) -> tuple[list[Path], bool]:
    if path.is_file():
        return [path], True
    for folder in (path, parts_folder(path)):
        parts = sorted(folder.glob("part-*.safetensors")) if folder.is_dir() else []
        if parts:
            return parts, False
    raise _nothing_there(path)


def _nothing_there(path: Path) -> TraceError:
    """The error for a path without a trace, by what is there instead."""
    for folder in (path, parts_folder(path)):
        if folder.is_dir() and folder.suffix == ".parts":
            return TraceError(
                "nothing saved yet", where=str(folder), got="a folder without a part",
                remedy="wait: a run saves its trace every three seconds, from its first step on",
            )  # fmt: skip
    if path.is_dir():
        return TraceError("is not a trace", where=str(path), expected="a file, or a folder FILE.parts", got="a folder")
    return TraceError("no such trace", where=str(path))


def _check(path: Path, metadata: dict[str, str], columns: dict[str, Any]) -> None:
    if metadata.get("format") != FORMAT:
        raise TraceError("is not a trace", where=str(path), expected=FORMAT, got=metadata.get("format"))
    if metadata.get("version") != str(VERSION):
        raise TraceError("trace of another version", where=str(path), expected=VERSION, got=metadata.get("version"))
    wanted = {f"{table}.{name}" for table, names in TABLES.items() for name in names} | set(ROUTE_COLUMNS)
    if missing := wanted - set(columns):
        raise TraceError(
            "columns are missing", where=str(path), expected=", ".join(sorted(missing)), got="none of these"
        )
