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
    """Command line, commit (with "+" when the tree has changes), processor with its widest instruction set that matters
    here, cores, memory, kernel, date (UTC)."""
    return {
        "command": _FOLDERS.sub("", " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "commit": _commit(),
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "isa": _instruction_set(),
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


def _instruction_set() -> str:
    flags = _cpuinfo("flags").split()
    if "avx512_vnni" in flags:
        return "AVX-512"
    return "AVX2" if "avx2" in flags else platform.machine()


def _cpuinfo(field: str) -> str:
    """The first processor's value, empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest and count of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result beside its provenance, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"provenance": provenance()} | result, indent=1) + "\n")
    temporary.replace(path)
