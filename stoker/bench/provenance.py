"""Where a figure comes from: command, commit, machine, time. Every committed result carries one."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The folders of an absolute path, up to its last part: they say nothing on another machine.
_FOLDERS = re.compile(r"(?<=[= ])/(?:[^/ ]+/)+(?=[^/ ])")


def provenance() -> dict[str, Any]:
    """Command line, commit (with "+" when the tree has changes), processor, cores, memory, kernel, date (UTC)."""
    return {
        "command": _FOLDERS.sub("", " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parents[2]
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "stoker", "native") else "")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest and count of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result beside its provenance, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"provenance": provenance()} | result, indent=1) + "\n")
    temporary.replace(path)
