"""A benchmark result on the page: a table, speeds with their spread, latencies of every variant, ledgers, provenance.

Takes results of `stoker bench` and of benchmarks/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from stoker.bench.judged import judge_result
from stoker.bench.report import charts, parts
from stoker.bench.report.ledger_section import ledger_figure
from stoker.bench.report.parts import Cell
from stoker.plan.explain import Explanation
from stoker.trace.measures import percentile

SPEEDS = (("decode_tok_s", "Decode"), ("prefill_tok_s", "Prefill"))
COLOURS = ("c0w", "c2", "c3", "c4", "c5", "c1", "c6")
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class BenchView:
    """sessions: (variant, session) -> spreads; latencies_ms: (variant, session) -> all counted tokens."""

    name: str
    sessions: dict[tuple[str, str], Figures]
    latencies_ms: dict[tuple[str, str], np.ndarray]
    ledgers: dict[str, Figures]
    cold: dict[str, str]
    notes: list[str]
    provenance: Figures
    device: Figures | None
    verdicts: list[Explanation]


def view(name: str, document: Figures) -> BenchView:
    """From a result of either kind."""
    sessions: dict[tuple[str, str], Figures] = {}
    latencies: dict[tuple[str, str], list[float]] = {}
    ledgers, cold = {}, {}
    for variant, figures in (document.get("variants") or document["cells"]).items():
        names = [n for n in ("cold", "warm") if n in figures] if "variants" in document else [""]
        for session in names:
            sessions[variant, session] = {**figures, **figures[session]} if session else figures
        if "cold_by" in figures:
            cold[variant] = figures["cold_by"] + ("" if figures["cold_verified"] else ", not verified")
    for variant, runs in document["runs"].items():
        for run in runs:
            for session, figures in (run.get("sessions") or {"": run}).items():
                latencies.setdefault((variant, session), []).extend(figures.get("decode_ms", ()))
            if "ledger" in run:
                ledgers[variant] = run["ledger"]
    return BenchView(
        name,
        sessions,
        {key: np.array(ms) for key, ms in latencies.items() if len(ms) > 1},
        ledgers,
        cold,
        list(document.get("notes", ())),
        document.get("provenance", {}),
        document.get("device_bytes_per_s"),
        judge_result(document),
    )


def bench_section(view: BenchView) -> str:
    """Everything about one result, without its heading."""
    return "".join(
        [
            _summary(view),
            parts.verdict(view.verdicts),
            *(_speed(view, key, title) for key, title in SPEEDS),
            _latency(view),
            ledger_figure(_distinct(view.ledgers)) if view.ledgers else "",
            _provenance(view),
        ]
    )


def _label(key: tuple[str, str]) -> str:
    return " ".join(part for part in key if part)


def _summary(view: BenchView) -> str:
    head = ["", "prefill tok/s", "decode tok/s", "ms/token p50", "hit rate", "stall ms/token", "read/token", "peak RSS"]
    rows: list[list[Cell]] = []
    for key, figures in view.sessions.items():
        rows.append(
            [
                _label(key),
                _spread(figures.get("prefill_tok_s")),
                _spread(figures.get("decode_tok_s")),
                _p50(view, key),
                parts.percent(_median(figures.get("hit_rate"))),
                _median(figures.get("stall_ms_per_token")),
                _of(figures.get("decode_bytes_per_token"), parts.megabytes),
                _of(figures.get("rss_peak_bytes"), parts.gibibytes),
            ]
        )
    lines = [f"{name}: cold by {how}." for name, how in view.cold.items()]
    if view.device:
        lines.append(
            f"The device gave {view.device['median'] / 1e9:.2f} GB/s between rounds "
            f"({view.device['min'] / 1e9:.2f} to {view.device['max'] / 1e9:.2f})."
        )
    notes = "".join(f"<li>{escape(line)}</li>" for line in [*lines, *view.notes])
    table = parts.table(head, rows, "Medians; least to most of the rounds in brackets")
    return f'<figure>{table}<ul class="notes">{notes}</ul></figure>'


def _p50(view: BenchView, key: tuple[str, str]) -> float | None:
    """Of all counted tokens together, as in the table of latencies; results without them have a median a round."""
    if key in view.latencies_ms:
        return percentile(view.latencies_ms[key], 0.5)
    return _median(view.sessions[key].get("decode_ms_median"))


def _of(value: Figures | None, shown: Any) -> str | None:
    return None if value is None else shown(value["median"])


def _median(value: Figures | None) -> float | None:
    return None if value is None else float(value["median"])


def _spread(value: Figures | None) -> str | None:
    if value is None:
        return None
    middle = charts.short(value["median"])
    return middle if value["n"] == 1 else f"{middle} ({charts.short(value['min'])} to {charts.short(value['max'])})"


def _speed(view: BenchView, key: str, title: str) -> str:
    found = [(_label(name), figures[key]) for name, figures in view.sessions.items() if figures.get(key)]
    if not found:
        return ""
    most = max(value["max"] for _, value in found)

    def draw(width: float) -> str:
        beside = width > 500  # on a narrow screen the name stands above its bar
        label, pitch = (240.0, 34.0) if beside else (2.0, 48.0)
        scale = charts.Scale(0, most * 1.04, label, width - 60)
        body = []
        for row, (name, value) in enumerate(found):
            y, tip = (row + 1) * pitch - 30, f"{name}: {_spread(value)} tok/s"
            body.append(
                charts.text(label - 8, y + 16, name, "end", "label")
                if beside
                else charts.text(label, y - 3, name, "start", "label")
            )
            body.append(charts.rect(label, y + 3, scale(value["median"]) - label, 18, _colour(view, row), tip))
            if value["n"] > 1:
                low, high, at = scale(value["min"]), scale(value["max"]), y + 12
                body.append(charts.line(low, at, high, at, "whisker"))
                body += [charts.line(end, at - 5, end, at + 5, "whisker") for end in (low, high)]
            place = scale(value["max"]) + 6
            body.append(charts.text(place, y + 16, charts.short(value["median"]), "start", "label"))
        return charts.svg(f"{title} speed of each variant", width, len(found) * pitch + 4, body)

    rows: list[list[Cell]] = [[name, value["median"], value["min"], value["max"], value["n"]] for name, value in found]
    table = parts.table(["tok/s", "median", "least", "most", "rounds"], rows)
    return parts.figure(f"{title} speed, tok/s", draw, table, "Median of the rounds; the line runs from least to most.")


def _colour(view: BenchView, row: int) -> str:
    """One colour a variant, shared by its sessions."""
    variants = list(dict.fromkeys(name for name, _ in view.sessions))
    return COLOURS[variants.index(list(view.sessions)[row][0]) % len(COLOURS)]


def _latency(view: BenchView) -> str:
    if not view.latencies_ms:
        return ""
    low = min(float(ms.min()) for ms in view.latencies_ms.values())
    high = max(float(ms.max()) for ms in view.latencies_ms.values())
    log = low > 0 and high > 6 * low
    variants = list(dict.fromkeys(name for name, _ in view.latencies_ms))

    def draw(width: float) -> str:
        left = low * 0.95 if log else 0.0
        x, y = charts.plot(width, 240, (left, high * 1.05), 1.0, log)
        body = charts.axes(x, y, "ms a token" + (", logarithmic" if log else ""), "share of tokens below", _percent)
        for (variant, session), ms in view.latencies_ms.items():
            ordered = np.sort(ms)
            share = np.arange(1, len(ms) + 1) / len(ms)
            points = [(x(left), y(0.0))]
            for value, part in zip(ordered, share, strict=True):
                points += [(x(float(value)), points[-1][1]), (x(float(value)), y(float(part)))]
            kind = COLOURS[variants.index(variant) % len(COLOURS)].replace("c", "l").removesuffix("w")
            body.append(charts.path(points, kind + (" dashed" if session == "cold" else "")))
        return charts.svg("Latency distribution of each variant", width, 240, body)

    rows: list[list[Cell]] = []
    for key, ms in view.latencies_ms.items():
        quantiles = [percentile(ms, share) for share in (0.5, 0.95, 0.99)]
        shown: list[Cell] = ["n too small" if q is None else q for q in quantiles]
        rows.append([_label(key), len(ms), float(ms.mean()), *shown, float(ms.max())])
    table = parts.table(["ms a token", "tokens", "mean", "p50", "p95", "p99", "max"], rows)
    entries = [(COLOURS[i % len(COLOURS)], variant) for i, variant in enumerate(variants)]
    lead = "Cumulative: the further left, the faster." + (
        " Cold is dashed." if any(session == "cold" for _, session in view.latencies_ms) else ""
    )
    return parts.figure("Token latency", draw, table, lead, parts.legend(entries))


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _distinct(ledgers: Mapping[str, Figures]) -> dict[str, Figures]:
    """One entry for variants that share a ledger, by the first one's name and how many others there are."""
    shared: list[tuple[list[str], Figures]] = []
    for variant, ledger in ledgers.items():
        same = next((names for names, other in shared if other["slots"] == ledger["slots"]), None)
        if same is None:
            shared.append(([variant], ledger))
        else:
            same.append(variant)
    return {names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""): ledger for names, ledger in shared}


def _provenance(view: BenchView) -> str:
    rows: list[list[Cell]] = [
        [key, parts.gibibytes(value) if key.endswith("_bytes") else str(value)]
        for key, value in view.provenance.items()
    ]
    return f"<details class=provenance><summary>Where this comes from</summary>{parts.table(['', ''], rows)}</details>"
