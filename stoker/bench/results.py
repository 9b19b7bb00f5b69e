"""Benchmark results as files: reads what `stoker bench --out` and benchmarks/engine.py write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.errors import TraceError


def read_result(path: Path) -> dict[str, Any]:
    """A benchmark result. Raises TraceError for a file that is none."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise TraceError("cannot be read", where=str(path), got=error.strerror) from error
    except ValueError as error:
        raise TraceError("is not JSON", where=str(path), got=error) from error
    if not isinstance(document, dict) or "runs" not in document or not ("variants" in document or "cells" in document):
        raise TraceError("is no benchmark result", where=str(path), expected="JSON of `stoker bench --out`")
    return document
