"""How much memory the user named, and what the machine can give: memory and cores. Owns parsing, limits, `auto`.

Pure but for reading /proc and /sys under a root that tests replace. Knows no model: what a budget buys, and the floor
below which it is refused, belong to the ledger.
"""

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from stoker.errors import BudgetError, OptionError

MIB = 1 << 20
GIB = 1 << 30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")
_EXAMPLES = "a size with a unit, such as 3GiB, 4G (= 4GiB), 500MB (= 500 million bytes), or auto"

# Headroom of `auto` on the whole machine: the larger of 1 GiB and 15% of RAM. The kernel keeps 1 to 2% for itself
# (watermarks), other programs grow while a model runs (a browser tab is 100 to 500 MiB), and when the page cache of the
# running programs' own code is squeezed out, the machine thrashes long before it is "out of memory".
MACHINE_HEADROOM_FRACTION = 0.15
MACHINE_HEADROOM_MIN_BYTES = GIB
# Inside a cgroup the rest of the machine is somebody else's: what remains is memory that the kernel charges to the
# group and that no ledger sees (page tables, about 0.2% of mapped memory; sockets; page cache of libraries).
CGROUP_HEADROOM_FRACTION = 0.05
CGROUP_HEADROOM_MIN_BYTES = 128 * MIB
# cgroup v1 writes "no limit" as the largest multiple of the page size in an int64.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """One thing that bounds the process: the machine itself or a cgroup above it. All in bytes.

    limit: the hard figure; available: what can be taken now without passing it (reclaimable page cache counts as free);
    headroom: what `auto` leaves untouched under this limit.
    """

    name: str
    where: str
    limit_bytes: int
    available_bytes: int
    headroom_bytes: int

    def room_bytes(self, held_bytes: int) -> int:
        """The largest budget that this limit allows for a process that holds `held_bytes` already."""
        return min(self.available_bytes + held_bytes, self.limit_bytes) - self.headroom_bytes


def parse_bytes(text: str | int, *, option: str = "--memory") -> int:
    """Bytes from a size such as `3GiB`, `500MB`, `4G`, or a plain number of bytes.

    KiB, MiB, GiB, TiB and the bare letters K, M, G, T are powers of 1024; KB, MB, GB, TB are powers of 1000. Case does
    not matter. Raises OptionError for anything else, for zero, and for a bare number below 1 MiB (a forgotten unit).
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise OptionError("not a size", where=option, expected=_EXAMPLES, got=repr(text))
    if isinstance(text, int):
        if text <= 0:
            raise OptionError("a size must be positive", where=option, expected=_EXAMPLES, got=text)
        return text
    match = _NUMBER.fullmatch(text.strip())
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise OptionError("not a size", where=option, expected=_EXAMPLES, got=repr(text))
    nbytes = int(float(match.group(1)) * _UNITS[unit]) if "." in match.group(1) else int(match.group(1)) * _UNITS[unit]
    if nbytes <= 0:
        raise OptionError("a size must be positive", where=option, expected=_EXAMPLES, got=repr(text))
    if unit == "" and nbytes < MIB:
        remedy = f"write {match.group(1)}GiB or {match.group(1)}MiB"
        what = "a size without a unit is in bytes"
        raise OptionError(what, where=option, expected=_EXAMPLES, got=repr(text), remedy=remedy)
    return nbytes


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people, in binary units with three digits: 1.50 GiB, 640 MiB, 12 B."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[0]}"


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Everything that bounds this process's memory: the machine, then each limited cgroup from the innermost out."""
    machine = _machine(root)
    return ([machine] if machine else []) + list(_cgroups(root))


def resident_bytes(root: Path = Path("/")) -> int:
    """What the process holds now (RSS), so that a budget for the whole process can count it as already taken."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    if root == Path("/"):
        import psutil

        return int(psutil.Process().memory_info().rss)
    return 0


def resident_bytes_now() -> int:
    """The same in a few microseconds, for every step's record: one file stays open."""
    try:
        return int(os.pread(_statm(os.getpid()), 256, 0).split()[1]) * _PAGE_BYTES
    except OSError:  # not Linux
        return resident_bytes()


@lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """The file of this process; a child opens its own."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """The most that the process has held (its own VmHWM; getrusage's figure starts from the parent's)."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def auto_budget(root: Path = Path("/")) -> int:
    """The budget, in bytes, that `--memory auto` stands for: the tightest limit's room, headroom left free.

    Raises BudgetError, naming the limit, when nothing is left.
    """
    limits, held = memory_limits(root), resident_bytes(root)
    if not limits:
        raise BudgetError("the memory of this machine cannot be read", remedy="name a budget, such as --memory 4GiB")
    tightest = min(limits, key=lambda limit: limit.room_bytes(held))
    room = tightest.room_bytes(held)
    if room <= 0:
        raise BudgetError(
            f"no memory left for a budget under {tightest.name}",
            where=tightest.where,
            expected=f"more than the headroom of {format_bytes(tightest.headroom_bytes)}",
            got=f"{format_bytes(tightest.available_bytes)} free of {format_bytes(tightest.limit_bytes)}",
            remedy="close other programs, raise the limit, or name a budget with --memory",
        )
    return room


def resolve(memory: str | int, root: Path = Path("/")) -> int:
    """`auto` or a size, as bytes. Whether it suffices is for the ledger to say; that it exists is checked here.

    Raises BudgetError for a budget above a hard limit: it could only end in swapping or in the kernel's OOM killer.
    """
    if isinstance(memory, str) and memory.strip().lower() == "auto":
        return auto_budget(root)
    budget = parse_bytes(memory)
    for limit in memory_limits(root):
        if budget > limit.limit_bytes:
            raise BudgetError(
                f"the budget is larger than {limit.name}",
                where=limit.where,
                expected=f"at most {format_bytes(limit.limit_bytes)}",
                got=format_bytes(budget),
                remedy="name a smaller --memory, or auto",
            )
    return budget


def default_threads(root: Path = Path("/")) -> int:
    """The cores that the process may use: physical ones (a second hardware thread adds no memory bandwidth) within its
    affinity, and no more than a cgroup's CPU quota, rounded up."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(root, cpu) for cpu in allowed}
    quotas = [math.ceil(quota) for quota in _cpu_quotas(root)]
    return max(1, min([len(cores), *quotas]))


def _core(root: Path, cpu: int) -> tuple[str, str]:
    """(package, core) of a logical CPU; the CPU itself where the machine does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    core = _read(topology / "core_id").strip()
    return (_read(topology / "physical_package_id").strip(), core) if core else ("", f"cpu{cpu}")


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPU quotas of the process's cgroups, in cores."""
    for directory, version, _ in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(directory / "cpu.max").strip().partition(" ")
        else:
            quota, period = (
                _read(directory / "cpu.cfs_quota_us").strip(),
                _read(directory / "cpu.cfs_period_us").strip(),
            )
        if quota.isdigit() and period.isdigit() and int(period) > 0 and int(quota) > 0:
            yield int(quota) / int(period)


def _machine(root: Path) -> MemoryLimit | None:
    fields = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in _read(root / "proc/meminfo").splitlines()
        if len(line.split()) >= 2
    }
    if "MemTotal" in fields and "MemAvailable" in fields:
        total, available, where = fields["MemTotal"], fields["MemAvailable"], str(root / "proc/meminfo")
    elif root == Path("/"):  # macOS and others
        import psutil

        memory = psutil.virtual_memory()
        total, available, where = int(memory.total), int(memory.available), "psutil.virtual_memory"
    else:
        return None
    headroom = max(MACHINE_HEADROOM_MIN_BYTES, int(total * MACHINE_HEADROOM_FRACTION))
    return MemoryLimit("the machine's memory", where, total, available, headroom)


@dataclass(frozen=True)
class _Hierarchy:
    """Where one cgroup version keeps its figures."""

    version: int
    limit_files: tuple[str, ...]
    usage_file: str
    file_cache_keys: tuple[str, str]


# v1's memory.stat counts the group alone under the plain names and the group with its children under total_*.
_V1 = _Hierarchy(1, ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
# memory.high throttles before memory.max kills: for a budget it is a limit all the same.
_V2 = _Hierarchy(2, ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


def _cgroups(root: Path) -> Iterator[MemoryLimit]:
    """Each memory-limited cgroup that holds the process, from the innermost out, v1 and v2 hierarchies alike."""
    for directory, version, group in _groups(root, "memory"):
        limit = _group_limit(_V2 if version == 2 else _V1, directory, group)
        if limit is not None:
            yield limit


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int, str]]:
    """(directory, cgroup version, name) of each visible cgroup above the process that may hold `controller`."""
    membership = _read(root / "proc/self/cgroup").splitlines()
    for mount_root, mount_point, version in _mounts(root, controller):
        for line in membership:
            number, controllers, path = line.split(":", 2)
            is_v2 = number == "0" and controllers == ""
            if is_v2 == (version == 2) and (is_v2 or controller in controllers.split(",")):
                for group in _upwards(path, mount_root):
                    yield root / mount_point.lstrip("/") / group, version, "/" + group


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str, int]]:
    """(root inside the hierarchy, mount point, version) of each mounted cgroup hierarchy that may hold `controller`."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2" or (kinds[0] == "cgroup" and controller in kinds[2].split(",")):
            yield fields[3], fields[4].replace("\\040", " "), 2 if kinds[0] == "cgroup2" else 1


def _upwards(path: str, mount_root: str) -> Iterator[str]:
    """The group and its ancestors as paths below the mount point, innermost first, ending with the mount point itself.

    In a container the mount shows only a part of the hierarchy (`mount_root`), and the process's path may lie outside
    it or start with `..`; then the mount point alone is what can be seen.
    """
    group = PurePosixPath(path)
    visible = PurePosixPath(mount_root)
    inside = ".." not in group.parts and group.is_relative_to(visible)
    relative = group.relative_to(visible) if inside else PurePosixPath(".")
    while relative != PurePosixPath("."):
        yield str(relative)
        relative = relative.parent
    yield ""


def _group_limit(hierarchy: _Hierarchy, directory: Path, group: str) -> MemoryLimit | None:
    """The tightest limit of one group, or None when it has none (or is not visible)."""
    limits = [(_number(directory / name), name) for name in hierarchy.limit_files]
    limited = [(value, name) for value, name in limits if value is not None and value < _UNLIMITED_BYTES]
    if not limited:
        return None
    limit, name = min(limited)
    used = _number(directory / hierarchy.usage_file) or 0
    stat = dict(line.split(maxsplit=1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
    reclaimable = sum(int(stat.get(key, 0)) for key in hierarchy.file_cache_keys)
    available = max(0, min(limit, limit - used + reclaimable))
    headroom = max(CGROUP_HEADROOM_MIN_BYTES, int(limit * CGROUP_HEADROOM_FRACTION))
    return MemoryLimit(f"cgroup v{hierarchy.version} {group}", str(directory / name), limit, available, headroom)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """The file's text, or nothing where there is no such file: absent limits are no limits."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
