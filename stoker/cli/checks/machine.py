"""Versions, processor, memory, limits, huge pages, io_uring: what the machine is and what it allows."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from stoker import __version__
from stoker.cli.checks import Check
from stoker.errors import StokerError
from stoker.runtime.budget import GIB, auto_budget, default_threads, format_bytes, memory_limits

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
)
_SMALL_BUDGET_BYTES = 2 * GIB
_ARENA_BYTES = 64 << 20


def versions() -> list[Check]:
    """Versions of stoker and what it stands on, and whether its compiled parts load."""
    found = {"stoker": __version__, "python": platform.python_version()}
    missing = []
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    listing = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        return [
            Check("versions", "FAIL", f"{listing}; not installed: {', '.join(missing)}", "install stoker again", found)
        ]
    try:
        from stoker.native import io, kernels  # noqa: F401
    except ImportError as error:
        remedy = "install stoker again: pip install --force-reinstall stoker"
        return [Check("versions", "FAIL", f"{listing}; the compiled part does not load: {error}", remedy, found)]
    return [Check("versions", "PASS", listing, data=found)]


def processor() -> list[Check]:
    """Instruction sets that matter here, the one that the kernels chose, cores."""
    from stoker.native import kernels

    name, flags = _cpu()
    useful = [flag for flag in _FLAGS if flag in flags]
    threads = default_threads()
    finding = f"{name}, {threads} threads by default; has {', '.join(useful) or 'no vector extension that is used'}"
    data = {"name": name, "flags": useful, "threads": threads, "logical_cpus": os.cpu_count()}
    try:
        isa = kernels.isa()
    except StokerError as error:
        return [Check("processor", "FAIL", f"{finding}; {error.what}", error.remedy or "", data)]
    data["isa"] = isa
    forced = os.environ.get("STOKER_ISA")
    finding += f"; kernels use {isa}" + (f", forced by STOKER_ISA={forced}" if forced else "")
    if isa == "portable":
        remedy = "unset STOKER_ISA" if forced else "AVX2 or newer is several times faster; prefer small models here"
        return [Check("processor", "WARN", finding, remedy, data)]
    return [Check("processor", "PASS", finding, data=data)]


def memory() -> list[Check]:
    """The machine's memory, every limit above the process, and the budget that `auto` would take."""
    limits = memory_limits()
    data = {
        "limits": [
            {"name": limit.name, "where": limit.where, "limit_bytes": limit.limit_bytes,
             "available_bytes": limit.available_bytes, "headroom_bytes": limit.headroom_bytes}
            for limit in limits
        ]
    }  # fmt: skip
    told = "; ".join(
        f"{limit.name}: {format_bytes(limit.available_bytes)} free of {format_bytes(limit.limit_bytes)}"
        for limit in limits
    )
    try:
        budget = auto_budget()
    except StokerError as error:
        return [Check("memory", "FAIL", f"{told}; {error.what}", error.remedy or "", data)]
    data["auto_budget_bytes"] = budget  # type: ignore[assignment]
    finding = f"{told}; --memory auto would take {format_bytes(budget)}"
    if budget < _SMALL_BUDGET_BYTES:
        return [
            Check("memory", "WARN", finding, "close other programs or raise the limit: few models fit so little", data)
        ]
    return [Check("memory", "PASS", finding, data=data)]


def process_limits() -> list[Check]:
    """ulimits that stop a large process or many files."""
    import resource

    names = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA, "open files": resource.RLIMIT_NOFILE}
    limits = {name: resource.getrlimit(which)[0] for name, which in names.items()}
    plain = {name: None if value == resource.RLIM_INFINITY else value for name, value in limits.items()}
    tight = [
        f"{name} {format_bytes(value)}" for name, value in plain.items() if name != "open files" and value is not None
    ]
    if plain["open files"] is not None and plain["open files"] < 256:
        tight.append(f"open files {plain['open files']}")
    if tight:
        remedy = "ulimit -v unlimited; ulimit -n 1024: torch maps more address space than it uses"
        return [Check("limits", "WARN", f"ulimits in force: {', '.join(tight)}", remedy, plain)]
    return [Check("limits", "PASS", "no ulimit on memory; enough open files", data=plain)]


def huge_pages() -> list[Check]:
    """Whether an arena really gets huge pages: it is made, touched and measured."""
    if sys.platform != "linux":
        return [Check("huge pages", "PASS", "not used on this system")]
    from stoker.native.io import Arena

    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled").strip()
    try:
        with Arena(_ARENA_BYTES) as arena:
            arena.populate()
            pages = arena.pages()
    except StokerError as error:
        return [
            Check("huge pages", "FAIL", f"no arena of {format_bytes(_ARENA_BYTES)}: {error.what}", error.remedy or "")
        ]
    share = pages.huge_bytes / _ARENA_BYTES
    data = {"setting": setting, "share": share}
    finding = f"{share:.0%} of a test arena of {format_bytes(_ARENA_BYTES)} lies in huge pages (system: {setting})"
    if share < 0.9:
        remedy = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
            if "[never]" in setting
            else "memory is fragmented: fewer huge pages cost up to a third of the speed of memory"
        )
        return [Check("huge pages", "WARN", finding, remedy, data)]
    return [Check("huge pages", "PASS", finding, data=data)]


def read_backend() -> list[Check]:
    """Whether the kernel lets the process use io_uring."""
    if sys.platform != "linux":
        return [Check("io_uring", "PASS", "not on this system; reads use threads")]
    from stoker.native.io import ReadQueue

    try:
        with ReadQueue(backend="io_uring"):
            return [Check("io_uring", "PASS", "available", data={"available": True})]
    except StokerError as error:
        setting = _read("/proc/sys/kernel/io_uring_disabled").strip()
        reason = f"{error.what}; kernel.io_uring_disabled = {setting or 'unknown'}"
        remedy = "reads use threads instead, at some cost in CPU; containers often forbid io_uring (seccomp)"
        return [Check("io_uring", "WARN", reason, remedy, {"available": False})]


def _cpu() -> tuple[str, set[str]]:
    """(name, flags) of the first processor."""
    fields: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name") or platform.processor() or platform.machine(), flags


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
