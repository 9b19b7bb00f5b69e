"""What a run says about its own speed, in one form: figures per decoded token from a trace or a benchmark result.

Reads columns and plain documents; judges nothing (explain.py does). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker.errors import OptionError
from stoker.plan.curves import lru_hits_by_size
from stoker.plan.replay import replay
from stoker.plan.routes import Routes, from_trace
from stoker.trace.events import Phase, ReadClass
from stoker.trace.reader import Trace
from stoker.trace.summary import busy_ns, summarise

CURVE_TOKENS = 300  # enough to be stable, and a verdict comes in seconds
LEAST_CURVE_TOKENS = 20
PATHS_WITHOUT_CACHE = ("exact", "whole_layer")
ONLINE = ("lru", "decayed-lfu", "lfru", "s3-fifo", "arc")


@dataclass(frozen=True)
class Evidence:
    """Per decoded token unless the name says otherwise; None: the source does not tell.

    read_bytes: what was read; busy_ms: time with a read in service; lanes: mean reads in service while busy; needed,
    misses: experts. needed_per_event: distinct experts that one layer of one step needs. slots: expert slots a layer.
    chosen_lengths: prompt and output are as long as a benchmark made them, so their shares of the time say nothing.
    rereads: bytes that the device delivered for each byte that was asked for. hit_rate_with(s): LRU's hit rate with s
    slots a layer, from the run's own routes; best_policy: the best online policy at the run's slots, and what it hits
    above LRU. path: how experts came into memory; overhead_ms: what this machine's profile expects beside reads and
    arithmetic; several: sequences ran side by side, or could (a server).
    """

    source: str
    tokens: int = 0
    token_ms: float = 0.0
    stall_ms: float | None = None
    read_bytes: float = 0.0
    busy_ms: float | None = None
    lanes: float | None = None
    needed: float | None = None
    misses: float | None = None
    needed_per_event: float | None = None
    layers: int | None = None
    experts: int | None = None
    slots: float | None = None
    record_bytes: float | None = None
    dense_bytes: float | None = None
    wasted_bytes: float = 0.0
    prefetch_bytes: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    prefill_stall_s: float | None = None
    prefill_bytes: float = 0.0
    decode_s: float = 0.0
    chosen_lengths: bool = False
    through_page_cache: bool = False
    rereads: float | None = None
    device_bytes_s: float | None = None
    memory_bytes_s: float | None = None
    hit_rate_with: Callable[[float], float] | None = None
    best_policy: tuple[str, float] | None = None
    path: str | None = None
    overhead_ms: float | None = None
    several: bool = False

    @property
    def keeps_nothing(self) -> bool:
        """Whether the path reads every expert again for each token, whatever the ledger has room for."""
        return self.path in PATHS_WITHOUT_CACHE

    @property
    def hit_rate(self) -> float | None:
        return None if not self.needed or self.misses is None else 1 - self.misses / self.needed

    @property
    def touched_bytes(self) -> float | None:
        """Weights that a token's arithmetic reads, in bytes: dense ones and those of its experts."""
        if self.dense_bytes is None or self.needed is None or self.record_bytes is None:
            return None
        return self.dense_bytes + self.needed * self.record_bytes

    def on(
        self, *, device_bytes_s: float | None, memory_bytes_s: float | None, overhead_ms: float | None = None
    ) -> Evidence:
        """With what is known of the machine, where the run itself does not tell."""
        return replace(
            self,
            device_bytes_s=self.device_bytes_s or device_bytes_s,
            memory_bytes_s=self.memory_bytes_s or memory_bytes_s,
            overhead_ms=overhead_ms,
        )


def of_trace(trace: Trace) -> Evidence:
    """A trace's evidence. Time is that of the steps; the reads are those of the decode steps."""
    steps, layers, reads = trace.table("step"), trace.table("layer"), trace.table("read")
    figures, decode = summarise(trace), steps["phase"] == Phase.DECODE
    rows, read_rows = (np.isin(t["step"], steps["step"][decode]) for t in (layers, reads))
    tokens = int(steps["tokens"][decode].sum())
    each = 1 / max(tokens, 1)
    landed = read_rows & (reads["class"] != ReadClass.CANCELLED)
    busy = busy_ns(reads["start_ns"][landed], reads["end_ns"][landed])
    service = int((reads["end_ns"] - reads["start_ns"])[landed].sum())
    hits, misses = int(layers["hits"][rows].sum()), int(layers["misses"][rows].sum())
    ledger, prefill = trace.about.get("ledger") or {}, steps["phase"] == Phase.PREFILL
    spent_s = (steps["end_ns"] - steps["start_ns"]) / 1e9
    prefill_rows, prefill_reads = (np.isin(t["step"], steps["step"][prefill]) for t in (layers, reads))
    prefetched = read_rows & np.isin(reads["class"], (ReadClass.PREFETCH, ReadClass.LATE))
    prefetch_bytes = int(reads["bytes"][prefetched].sum()) * each
    path, parallel = trace.about.get("path"), int(trace.about.get("parallel") or 1)
    found = Evidence(
        source=trace.path.name,
        tokens=tokens,
        token_ms=float(spent_s[decode].sum()) * 1e3 * each,
        stall_ms=float(layers["wait_ns"][rows].sum()) / 1e6 * each,
        read_bytes=int(reads["bytes"][read_rows].sum()) * each,
        busy_ms=busy / 1e6 * each,
        lanes=service / busy if busy else None,
        needed=(hits + misses) * each,
        misses=misses * each,
        needed_per_event=(hits + misses) / max(1, int(rows.sum())),
        layers=len(np.unique(layers["layer"])),
        experts=int(trace.about.get("experts") or 0) or None,
        slots=_slots_used(ledger, path),
        record_bytes=float(reads["bytes"].max()) if len(reads["bytes"]) else None,
        dense_bytes=ledger.get("dense_bytes"),
        wasted_bytes=(figures["prefetch"]["waste_ratio"] or 0.0) * prefetch_bytes,
        prefetch_bytes=prefetch_bytes,
        prefill_tokens=int(steps["tokens"][prefill].sum()),
        prefill_s=float(spent_s[prefill].sum()),
        prefill_stall_s=float(layers["wait_ns"][prefill_rows].sum()) / 1e9,
        prefill_bytes=float(reads["bytes"][prefill_reads].sum()),
        decode_s=float(spent_s[decode].sum()),
        through_page_cache=trace.about.get("direct") is False,
        path=path,
        several=parallel > 1 or bool((steps["tokens"][decode] > 1).any()),
    )
    return _with_curve(found, trace)


def _slots_used(ledger: Mapping[str, Any], path: str | None) -> float | None:
    """Slots a layer that keep experts between tokens: none where the path keeps nothing."""
    if not ledger:
        return None
    return 0.0 if path in PATHS_WITHOUT_CACHE else float(np.mean(ledger["slots"]))


def _with_curve(found: Evidence, trace: Trace) -> Evidence:
    """LRU's hit rate at every size, and the best other policy at the run's size, from the run's decode routes."""
    if int((trace.column("step.phase") == Phase.DECODE).sum()) < LEAST_CURVE_TOKENS:
        return found
    routes = from_trace(trace)
    routes = routes.between(0, min(routes.steps, CURVE_TOKENS))
    warm_up = routes.steps // 10
    needed = sum(int(s.needed[s.step >= warm_up].sum()) for s in routes.streams)
    hits = np.sum([lru_hits_by_size(s, routes.experts, warm_up) for s in routes.streams], axis=0) / needed
    best = None
    most = max(int(s.needed.max(initial=1)) for s in routes.streams)
    if found.slots is not None and most <= found.slots < routes.experts:
        rate, name = best_online(routes, int(found.slots), warm_up)
        best = (name, rate - replay(routes, "lru", int(found.slots), warm_up).hit_rate)
    sizes = np.arange(len(hits))
    return replace(found, hit_rate_with=lambda slots: float(np.interp(slots, sizes, hits)), best_policy=best)


def best_online(routes: Routes, slots: int, warm_up: int) -> tuple[float, str]:
    """The highest hit rate of the online policies at `slots` a layer, and which policy has it."""
    found = []
    for policy in ONLINE:
        with suppress(OptionError):  # a policy that needs more slots than these
            found.append((replay(routes, policy, slots, warm_up).hit_rate, policy))
    return max(found)


def of_result(document: Mapping[str, Any]) -> list[Evidence]:
    """One for each variant of a benchmark result: its warm session where there is one, else what there is."""
    variants = document.get("variants") or document["cells"]
    return [_of_variant(name, figures, document) for name, figures in variants.items()]


def _of_variant(name: str, figures: Mapping[str, Any], document: Mapping[str, Any]) -> Evidence:
    session = next((s for s in ("warm", "cold") if s in figures), "")
    spreads = {**figures, **figures[session]} if session else figures
    runs = document["runs"][name]
    rows = [run["sessions"][session] if session else run for run in runs]
    model, ledger = document.get("model", {}), figures.get("ledger") or runs[0].get("ledger") or {}
    ours = "hit_rate" in spreads

    def median(key: str) -> float | None:
        return spreads[key]["median"] if key in spreads else None

    misses = _mean(rows, "decode_misses", "decode_tokens")
    hits = _mean(rows, "decode_hits", "decode_tokens")
    needed = None if hits is None or misses is None else hits + misses
    if needed is None and model:
        needed = float(model["moe_layers"] * model["top_k"])
    tokens = int(rows[0]["decode_tokens"])
    speed = median("decode_tok_s")
    device = document.get("device_bytes_per_s") or {}
    path = name.split()[1] if ours and name.startswith("stoker ") else None
    buffered = bool((document.get("options") or {}).get("buffered")) or not ours
    layers = model.get("moe_layers") or (len(ledger["slots"]) if ledger else None)
    return Evidence(
        source=f"{name} {session}".strip(),
        tokens=tokens,
        token_ms=1e3 / speed if speed else 0.0,
        stall_ms=median("stall_ms_per_token"),
        read_bytes=median("decode_bytes_per_token") or 0.0,
        needed=needed,
        misses=misses,
        needed_per_event=needed / layers if needed and layers else None,
        layers=layers,
        experts=model.get("experts"),
        slots=_slots_used(ledger, path),
        record_bytes=model.get("record_bytes"),
        dense_bytes=ledger.get("dense_bytes") or model.get("dense_bytes"),
        prefetch_bytes=_mean(rows, "decode_prefetch_bytes", "decode_tokens") or 0.0,
        prefill_tokens=int(rows[0]["prefill_tokens"]),
        prefill_s=median("prefill_s") or rows[0]["prefill_tokens"] / (median("prefill_tok_s") or 1.0),
        prefill_stall_s=median("prefill_stall_s"),
        prefill_bytes=median("prefill_bytes") or 0.0,
        decode_s=tokens / speed if speed else 0.0,
        chosen_lengths=True,
        through_page_cache=buffered,
        rereads=_rereads(runs, ledger) if ours else None,
        device_bytes_s=device.get("median"),
        path=path,
    )


def _mean(rows: list[Mapping[str, Any]], key: str, over: str) -> float | None:
    if not all(key in row for row in rows):
        return None
    return sum(row[key] for row in rows) / max(1, sum(row[over] for row in rows))


def _rereads(runs: list[Mapping[str, Any]], ledger: Mapping[str, Any]) -> float | None:
    """Of a process of its own: bytes from the device for each byte that it asked for, dense weights included."""
    asked = [run["stats"]["demand_bytes"] + run["stats"]["prefetch_bytes"] for run in runs if "stats" in run]
    got = [run["device_bytes"] for run in runs if "device_bytes" in run]
    if not got or len(got) != len(asked):
        return None
    return sum(got) / max(1.0, sum(asked) + len(got) * ledger.get("dense_bytes", 0))
