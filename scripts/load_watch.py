"""What a server under load is held to: its memory, files and threads, its queue and ledger, sampled while it works.

Time here is time in which this process ran (`Clock`): a machine that stops everything for a measurement does not age
requests. Knows no request.
"""

import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

MIB = 1 << 20
BLOCK_TOKENS = 64  # of a KV block
LEDGER_PARTS = ("process", "dense", "kv", "prefix", "grammar", "scratch", "slots", "ring", "reserve", "free")
WARM_UP_SHARE = 0.2
FLAT_BYTES = 24 * MIB  # by how much a quarter's median after the warm-up may exceed the first's
MOST_FILES, MOST_THREADS = 16, 4  # by how much the least of the last quarter may exceed that of the first


class Clock:
    """Seconds in which this process ran: a gap longer than GAP_S counts as GAP_S. stops: how many such there were."""

    TICK_S, GAP_S = 0.1, 2.0

    def __init__(self) -> None:
        self.now_s, self.stops, self.stopped_s = 0.0, 0, 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self.TICK_S)
            now = time.monotonic()
            passed, last = now - last, now
            if passed > self.GAP_S:
                self.stops += 1
                self.stopped_s += passed - self.GAP_S
            self.now_s += min(passed, self.GAP_S)


@dataclass(frozen=True)
class Sample:
    """One look. seconds: of the clock; tokens: computed since the start; held_tokens: of KV, cached ones included."""

    seconds: float
    rss_bytes: int
    files: int
    threads: int
    running: int
    waiting: int
    held_tokens: int
    cached_tokens: int
    tokens: int
    dropped: int
    ledger_off_bytes: int


class Watch:
    """Samples a server once a second until `close`; `rows` are the samples."""

    def __init__(self, url: str, pid: int, clock: Clock) -> None:
        self._url, self._process, self._clock = url, psutil.Process(pid), clock
        self.rows: list[Sample] = []
        self.failure: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self) -> Sample:
        live = json.load(urllib.request.urlopen(f"{self._url}/live"))
        (model,) = live["models"].values()
        status, counters, ledger = model["status"], model["counters"], model["ledger"]
        parts = sum(int(ledger[f"{part}_bytes"]) for part in LEDGER_PARTS)
        return Sample(
            self._clock.now_s, self._process.memory_info().rss, self._process.num_fds(), self._process.num_threads(),
            status["running"], status["waiting"], status["kv_used_tokens"],
            BLOCK_TOKENS * model["prefix"]["ram_blocks"],
            counters["prefill_tokens"] + counters["decode_tokens"], counters["dropped_experts"],
            parts - int(ledger["budget_bytes"]),
        )  # fmt: skip

    def peak_bytes(self) -> int:
        """The most that was ever resident, as the kernel counts it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(1.0):
            try:
                self.rows.append(self.look())
            except Exception as error:
                if not self._closed.is_set():
                    self.failure = f"the server could not be looked at: {error!r}"
                return


def quarters(rows: list[Sample], name: str, figure: Callable[[list[float]], float] = statistics.median) -> list[float]:
    """`figure` of each of the four quarters of what comes after the warm-up."""
    steady = rows[int(len(rows) * WARM_UP_SHARE) :]
    cuts = [len(steady) * i // 4 for i in range(5)]
    return [figure([getattr(row, name) for row in steady[a:b]]) for a, b in pairwise(cuts)]


def by_minute(rows: list[Sample]) -> list[dict[str, float]]:
    """For each minute the median of every figure, and the most memory."""
    minutes: dict[int, list[Sample]] = {}
    for row in rows:
        minutes.setdefault(int(row.seconds // 60), []).append(row)
    table = []
    for minute, part in sorted(minutes.items()):
        medians = {name: statistics.median(getattr(row, name) for row in part) for name in asdict(part[0])}
        table.append({"minute": minute, **medians, "most_rss_bytes": max(row.rss_bytes for row in part)})
    return table


def verdicts(rows: list[Sample], budget_bytes: int, peak_bytes: int) -> dict[str, dict[str, Any]]:
    """What was promised of a server's figures; whether each held, with the numbers."""
    memory = quarters(rows, "rss_bytes")
    files, threads = (quarters(rows, name, min) for name in ("files", "threads"))  # crowds of clients come and go
    return {
        "memory flat": {
            "ok": max(memory) - memory[0] <= FLAT_BYTES, "quarters_mib": [round(each / MIB, 1) for each in memory],
            "limit_mib": FLAT_BYTES / MIB,
        },
        "within the budget": {
            "ok": peak_bytes <= budget_bytes, "peak_mib": round(peak_bytes / MIB, 1), "budget_mib": budget_bytes / MIB,
        },
        "files and threads": {
            "ok": files[-1] - files[0] <= MOST_FILES and threads[-1] - threads[0] <= MOST_THREADS,
            "files": files, "threads": threads,
        },
        "no expert dropped": {"ok": all(row.dropped == 0 for row in rows)},
        "ledger adds up": {"ok": all(row.ledger_off_bytes == 0 for row in rows)},
    }  # fmt: skip
