"""What a machine can do, in numbers that the forecast uses: reads by size and burst, memory, kernels, fixed costs.

Owns the profile's form and its cache: one file for each machine (processor, kernel, device, format version). Measures
nothing (stoker/bench/probe.py does) and imports no torch.
"""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stoker.errors import OptionError

VERSION = 8


@dataclass(frozen=True)
class Burst:
    """`reads` records of `record_bytes` asked for at once, from idle: mean ms (without the slowest fiftieth) until the
    first and the last are there. low_ms, high_ms: quartiles of the last, or that mean; n: how many bursts were timed.
    """

    record_bytes: int
    reads: int
    first_ms: float
    last_ms: float
    low_ms: float
    high_ms: float
    n: int


@dataclass(frozen=True)
class Sustained:
    """Reads that follow each other without a pause at a queue depth: bytes a second, and how a single one takes."""

    record_bytes: int
    depth: int
    bytes_s: float
    latency_p50_ms: float
    latency_p95_ms: float


@dataclass(frozen=True)
class Costs:
    """What a step costs beside arithmetic and reads, in ms: measured on a model too small to compute anything.

    step: once a step; layer: each layer with native attention; plain_layer: with transformers' own attention; keep:
    more for a layer whose experts are not all in memory (what leaves, what to read ahead); miss: the processor's share
    of one demand read; wait: what a layer takes longer after a wait, with threads and caches cold. load_s and
    load_layer_s: the start of a model without the bytes of its weights, in seconds, and more of it for each layer.
    """

    step_ms: float
    layer_ms: float
    plain_layer_ms: float
    keep_ms: float
    miss_ms: float
    wait_ms: float
    process_bytes: int
    load_s: float
    load_layer_s: float


@dataclass(frozen=True)
class Kernels:
    """Rates of arithmetic with all threads.

    read_bytes_s: plain loads by threads, {1: ..., n: ...}; matvec_bytes_s: a dense 4-bit matrix times one token, back
    to back; experts_bytes_s: several experts in one call; dense_macs_s and expert_macs_s: multiply-accumulates a second
    by tokens (rows) a matrix; attention_macs_s: scores and values, "decode" over a long context and "prefill";
    pair_bytes_s: bytes a second through the weighted sum of experts' outputs.
    """

    isa: str
    read_bytes_s: dict[int, float]
    matvec_bytes_s: float
    experts_bytes_s: float
    dense_macs_s: dict[int, float]
    expert_macs_s: dict[int, float]
    attention_macs_s: dict[str, float]
    pair_bytes_s: float


@dataclass(frozen=True)
class FirstUse:
    """Memory used for the first time by one thread while all compute: its rate, the share of computing lost.
    alone_bytes_s: its rate while nothing is computed."""

    bytes_s: float
    holds: float
    alone_bytes_s: float

    def takes_s(self, nbytes: float, compute_s: float, threads: int = 1) -> tuple[float, float]:
        """(how long finding so much memory takes, how long computing of `compute_s` is held up by it). Computing that
        goes on all along is prolonged; what it leaves to find comes at the rate of `threads` with nothing else."""
        beside_s = compute_s / max(1e-3, 1 - self.holds)
        beside_bytes = beside_s * self.bytes_s
        if nbytes <= beside_bytes:
            return nbytes / self.bytes_s, nbytes / self.bytes_s * self.holds
        return beside_s + (nbytes - beside_bytes) / (threads * self.alone_bytes_s), beside_s - compute_s


@dataclass(frozen=True)
class Waits:
    """What reading and computing do to each other.

    progress: how fast reads get on, of their own pace, while all threads walk through weights (1: undisturbed);
    alone_bytes_s: one expert in a call of its own, after its read was waited for; dense_bytes_s: dense matrices after a
    layer that waited; holds: the share of computing with many tokens that is lost while reads follow each other.
    """

    progress: float
    alone_bytes_s: float
    dense_bytes_s: float
    holds: float


@dataclass(frozen=True)
class Profile:
    """One machine. `machine` is what it is keyed by; `direct` and `backend` say how records were read."""

    machine: dict[str, str]
    threads: int
    memory_bytes: int
    directory: str
    backend: str
    direct: bool
    bursts: tuple[Burst, ...]
    sustained: tuple[Sustained, ...]
    depth: int  # reads in flight, as the engine would choose it; bursts were measured so
    buffered_bytes_s: float  # sequential use of the page cache's path: buffered reads of cold records at depth 8
    kernels: Kernels
    waits: Waits
    first_use: FirstUse
    costs: Costs
    measured: str = ""  # date, UTC
    seconds: float = 0.0
    version: int = VERSION

    def burst_ms(self, record_bytes: float, reads: int, quartile: str = "last") -> tuple[float, float]:
        """(first, last) ms of `reads` records of `record_bytes` asked for at once; `quartile`: last, low or high.

        Interpolated in the logarithms of size and number; beyond the largest number at its rate, beyond the sizes at
        the nearest size's rate (larger) or latency (smaller).
        """
        if reads <= 0:
            return 0.0, 0.0
        last = self._burst(record_bytes, reads, lambda b: b.last_ms)
        if quartile != "last":
            last = self._burst(record_bytes, reads, lambda b: b.low_ms if quartile == "low" else b.high_ms)
        return min(last, self._burst(record_bytes, reads, lambda b: b.first_ms)), last

    def _burst(self, record_bytes: float, reads: int, of: Any) -> float:
        sizes = sorted({b.record_bytes for b in self.bursts})
        by_size = []
        for size in sizes:
            row = sorted((b.reads, of(b)) for b in self.bursts if b.record_bytes == size)
            by_size.append(_log_interpolated([r for r, _ in row], [t for _, t in row], reads))
        return _log_interpolated(sizes, by_size, record_bytes)

    def sustained_bytes_s(self, record_bytes: float, depth: int = 8) -> float:
        """Bytes a second of back-to-back reads of that size, at the nearest measured depth that is not above."""
        depths = sorted({s.depth for s in self.sustained})
        nearest = max([d for d in depths if d <= depth], default=depths[0])
        row = sorted((s.record_bytes, s.bytes_s) for s in self.sustained if s.depth == nearest)
        return _interpolated([float(size) for size, _ in row], [rate for _, rate in row], record_bytes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _log_interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Power law between neighbours; above the last point in proportion to x, below the first constant."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * x / xs[-1]
    at = next(i for i in range(1, len(xs)) if x <= xs[i])
    share = math.log(x / xs[at - 1]) / math.log(xs[at] / xs[at - 1])
    return math.exp((1 - share) * math.log(ys[at - 1]) + share * math.log(ys[at]))


def _interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear in log x, constant outside."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    at = next(i for i in range(1, len(xs)) if x <= xs[i])
    share = math.log(x / xs[at - 1]) / math.log(xs[at] / xs[at - 1])
    return (1 - share) * ys[at - 1] + share * ys[at]


def rate_at(rates: Mapping[int, float], rows: float) -> float:
    """Of a table by rows: linear in log rows, constant outside."""
    known = sorted(rates)
    return _interpolated([float(r) for r in known], [rates[r] for r in known], rows)


# ---- the cache ---------------------------------------------------------------------------------------------------


def machine_key(directory: Path, threads: int) -> dict[str, str]:
    """What a profile depends on: processor, operating system's kernel, the device under `directory`, threads."""
    return {
        "cpu": _cpu_model(),
        "kernel": platform.release(),
        "device": device_of(directory),
        "threads": str(threads),
        "version": str(VERSION),
    }


def device_of(directory: Path) -> str:
    """The block device that holds a directory, with its model where the system tells; else the device number."""
    number = directory.stat().st_dev
    where = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not where.exists():
        return f"device {os.major(number)}:{os.minor(number)}"
    place = where.resolve()
    disk = place.parent if (place / "partition").exists() else place
    model = disk / "device/model"
    return f"{place.name} {model.read_text().strip() if model.exists() else ''}".strip()


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/stoker, by default ~/.cache/stoker."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "stoker"


def cache_path(machine: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()
    return cache_directory() / "profiles" / f"{digest[:16]}.json"


def save(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile, whole or not at all; by default to the cache."""
    path = path or cache_path(profile.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(profile.as_dict(), indent=1) + "\n")
    temporary.replace(path)
    return path


def cached(directory: Path, threads: int) -> Profile | None:
    """The profile of this machine and of the device under `directory`; None when there is none (or a damaged one)."""
    machine = machine_key(directory, threads)
    path = cache_path(machine)
    if not path.is_file():
        return None
    try:
        profile = load(path)
    except OptionError:
        return None
    return profile if profile.machine == machine else None


def load(path: Path) -> Profile:
    """Read a profile. Raises OptionError for a file that is none."""
    if not path.is_file():
        raise OptionError("there is no such file", where="--profile", got=str(path))
    try:
        return from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            "not a machine profile", where=str(path), expected="the output of `stoker probe --json`", got=str(error)
        ) from error


def from_dict(data: Mapping[str, Any]) -> Profile:
    """The inverse of `as_dict`, through JSON. Raises ValueError for another version or unknown fields."""
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')}, and this stoker reads {VERSION}")
    unknown = set(data) - {field.name for field in fields(Profile)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    kernels = dict(data["kernels"])
    for name in ("read_bytes_s", "dense_macs_s", "expert_macs_s"):
        kernels[name] = {int(key): float(value) for key, value in kernels[name].items()}
    return Profile(
        **{
            **data,
            "bursts": tuple(Burst(**one) for one in data["bursts"]),
            "sustained": tuple(Sustained(**one) for one in data["sustained"]),
            "kernels": Kernels(**kernels),
            "waits": Waits(**data["waits"]),
            "first_use": FirstUse(**data["first_use"]),
            "costs": Costs(**data["costs"]),
        }
    )
