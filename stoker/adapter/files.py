"""Reading an adapter's files with errors that name them. Knows JSON, safetensors and hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from stoker.errors import AdapterError

PIECE_BYTES = 8 << 20


def read_json(file: Path) -> dict[str, Any]:
    """An object. Raises AdapterError where it is none."""
    try:
        found = json.loads(file.read_text())
    except OSError as problem:
        raise AdapterError("cannot be read", where=str(file), got=problem.strerror) from problem
    except ValueError as problem:
        raise AdapterError("is not valid JSON", where=str(file), got=str(problem)) from problem
    if not isinstance(found, dict):
        raise AdapterError("is not a JSON object", where=str(file), got=type(found).__name__)
    return found


def load_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as problem:
        raise AdapterError("cannot be read", where=str(file), got=str(problem)) from problem


def names_and_metadata(file: Path) -> tuple[list[str], dict[str, str]]:
    """Of a safetensors file, without its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys()), dict(opened.metadata() or {})
    except (OSError, SafetensorError) as problem:
        raise AdapterError("cannot be read", where=str(file), got=str(problem)) from problem


def digest(file: Path) -> str:
    """sha256 of a file, in hex."""
    found = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                found.update(piece)
    except OSError as problem:
        raise AdapterError("cannot be read", where=str(file), got=problem.strerror) from problem
    return found.hexdigest()
