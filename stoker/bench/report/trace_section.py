"""One trace on the page: tiles, tokens over time, latencies, heat map, residency curve, bytes, prefetch, ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

import numpy as np

from stoker.bench.judged import judge_trace
from stoker.bench.report import charts, parts
from stoker.bench.report.ledger_section import ledger_figure
from stoker.bench.report.parts import Cell, percent
from stoker.bench.report.trace_data import Curve, TraceView
from stoker.trace.measures import SAMPLES_NEEDED, percentile

CLASSES = {
    "demand": ("c2", "demand: the step waited"),
    "prefetch": ("c3", "prefetch, in time"),
    "late": ("c5", "prefetch, late"),
    "stream": ("c1", "stream: whole-layer prefill"),
}
PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def trace_section(view: TraceView) -> str:
    """Everything about one trace, without its heading."""
    return "".join(
        [
            parts.tiles(_tiles(view)),
            parts.verdict([judge_trace(view.trace)]),
            _over_time(view),
            _latency(view),
            _heat_map(view),
            _curve(view.curve, view) if view.curve is not None else "",
            _bytes(view),
            _prefetch(view),
            ledger_figure({"budget": view.about["ledger"]}) if view.about.get("ledger") else "",
        ]
    )


def _tiles(view: TraceView) -> list[tuple[str, str, str]]:
    figures, found = view.figures, []
    for phase in ("decode", "prefill"):
        of_phase = figures.get(phase)
        if of_phase:
            found.append((phase, f"{charts.short(of_phase['tokens_per_s'])} tok/s", f"{of_phase['tokens']:,} tokens"))
    decode = figures.get("decode")
    if decode:
        mean_ms = decode["step_ms"]["mean"]
        share = decode["stall_ms_per_token"] * decode["tokens"] / decode["steps"] / mean_ms if mean_ms else 0
        found.append(("stall", f"{decode['stall_ms_per_token']:.1f} ms", f"a token: {share:.0%} of a decode step"))
        found.append(("hit rate", percent(decode["hit_rate"]), "of the experts that decode needed"))
    if figures["read_bytes_per_decode_token"] is not None:
        found.append(("read", parts.megabytes(figures["read_bytes_per_decode_token"]), "a token, while decoding"))
    if figures["reads"]["bytes_per_busy_s"]:
        found.append(("device", f"{parts.megabytes(figures['reads']['bytes_per_busy_s'])}/s", "while it was reading"))
    if figures["peak_rss_bytes"]:
        found.append(("peak memory", parts.gibibytes(figures["peak_rss_bytes"]), "resident"))
    return found


def _over_time(view: TraceView) -> str:
    def draw(width: float) -> str:
        bars, reads = view.bars(int(width / 3)), view.reads(int(width / 5))
        x, y = charts.plot(width, 240, (0, view.busy_s), float(bars.ms.max(initial=0)) * 1.08)
        body = charts.axes(x, y, "", "ms a token")
        for i in range(len(bars.ms)):
            prefill = bars.phase[i] == 0
            left, wide = x(bars.start_s[i]), max(x(bars.end_s[i]) - x(bars.start_s[i]), 0.6)
            gap = min(0.6, wide * 0.15)
            tip = (
                f"{'prefill' if prefill else 'decode'}, {bars.tokens[i]} token{'s' if bars.tokens[i] > 1 else ''} at "
                f"{bars.start_s[i]:.2f} s: {bars.ms[i]:.1f} ms each, {bars.stall_ms[i]:.1f} of it stall"
            )
            worked, stalled = y(bars.ms[i] - bars.stall_ms[i]), y(bars.ms[i])
            body.append(charts.rect(left, worked, wide - gap, y(0) - worked, "c1" if prefill else "c0w", tip))
            body.append(charts.rect(left, stalled, wide - gap, worked - stalled, "c2", tip))
        top = charts.svg("Milliseconds a token over time, stall on top of work", width, 240 - 14, body)
        total = np.sum(list(reads.values()), axis=0) / 1e6 if reads else np.zeros(1)
        return top + _read_panel(width, view.busy_s, reads, float(total.max(initial=0)))

    bars = view.bars(24)
    rows: list[list[Cell]] = [
        [
            f"{start:.2f} to {end:.2f}", "prefill" if phase == 0 else "decode", int(tokens), float(ms), float(stall)
        ]
        for start, end, phase, tokens, ms, stall in zip(
            bars.start_s, bars.end_s, bars.phase, bars.tokens, bars.ms, bars.stall_ms, strict=True
        )
    ]  # fmt: skip
    lead = "Each bar is one step (or several neighbours), as wide as it took. Below: what the device delivered."
    if view.left_out_s > 0.5:
        lead += f" {view.left_out_s:.1f} s between steps are left out."
    shown = [("c0w", "work, decode"), ("c1", "work, prefill; stream reads"), ("c2", "stall; demand reads")]
    shown += [(CLASSES[name][0], CLASSES[name][1]) for name in ("prefetch", "late") if name in view.figures["reads"]]
    table = parts.table(["seconds", "phase", "tokens", "ms a token", "stall ms a token"], rows)
    return parts.figure("Tokens over time", draw, table, lead, parts.legend(shown))


def _read_panel(width: float, busy_s: float, reads: dict[str, np.ndarray], most: float) -> str:
    x, y = charts.plot(width, 130, (0, busy_s), most * 1.08)
    body = charts.axes(x, y, "s in steps", "MB/s read")
    bins = len(next(iter(reads.values()))) if reads else 0
    base = np.zeros(bins)
    for name, rate in reads.items():
        for i in np.flatnonzero(rate):
            low, high = x(busy_s * i / bins), x(busy_s * (i + 1) / bins)
            top, foot = y((base[i] + rate[i]) / 1e6), y(base[i] / 1e6)
            tip = f"{name}: {rate[i] / 1e6:,.0f} MB/s at {busy_s * i / bins:.2f} s"
            body.append(charts.rect(low, top, high - low - 0.4, foot - top, CLASSES[name][0], tip))
        base += rate
    return charts.svg("Bytes read over the same time", width, 130, body)


def _latency(view: TraceView) -> str:
    samples = view.latency_ms
    if len(samples) < 2:
        return ""
    low, high = float(samples.min()), float(samples.max())
    log = low > 0 and high > 6 * float(np.median(samples))
    known = [(words, percentile(samples, share), share) for share, words in PERCENTILES]

    def draw(width: float) -> str:
        bins = max(12, int(width / 16))
        left, right = (low * 0.95, high * 1.05) if log else (0.0, high * 1.05)
        edges = np.geomspace(left, right, bins + 1) if log else np.linspace(left, right, bins + 1)
        counts = np.histogram(samples, edges)[0]
        x, y = charts.plot(width, 220, (left, right), float(counts.max()) * 1.35, log)
        body = charts.axes(x, y, "ms between tokens" + (", logarithmic" if log else ""), "tokens")
        for n, a, b in zip(counts, edges[:-1], edges[1:], strict=True):
            if n:
                tip = f"{n} token{'s' if n > 1 else ''} took {a:.1f} to {b:.1f} ms"
                body.append(charts.rect(x(a), y(n), x(b) - x(a) - 1, y(0) - y(n), "c0w", tip))
        body += _marks(x, y, known, width)
        return charts.svg("How long tokens took: a histogram with percentiles", width, 220, body)

    rows: list[list[Cell]] = [
        [words, value if value is not None else _too_small(share)] for words, value, share in known
    ]
    rows = [["tokens", len(samples)], ["mean", float(samples.mean())], *rows, ["max", high]]
    lead = "Time from the end of one decode step to the end of the next. Nothing is trimmed."
    missing = [f"{words} needs {SAMPLES_NEEDED[share]} tokens" for words, value, share in known if value is None]
    if missing:
        lead += f" {len(samples)} tokens: {', '.join(missing)}."
    return parts.figure("Token latency", draw, parts.table(["ms", ""], rows), lead)


def _too_small(share: float) -> str:
    return f"n too small (needs {SAMPLES_NEEDED[share]})"


def _marks(
    x: charts.Scale, y: charts.Scale, known: Sequence[tuple[str, float | None, float]], width: float
) -> list[str]:
    """Percentile lines with labels that step down, so that they never lie on each other."""
    body = []
    for row, (words, value, _) in enumerate((w, v, s) for w, v, s in known if v is not None):
        assert value is not None
        at, height = x(value), y.end + 12 + row * 15
        body.append(charts.line(at, y.start, at, height - 8, "mark"))
        side = at > width * 0.7
        body.append(
            charts.text(
                at + (-5 if side else 5), height, f"{words} {value:.1f} ms", "end" if side else "start", "label"
            )
        )
    return body


def _heat_map(view: TraceView) -> str:
    uses = view.uses_LE
    if not uses.sum():
        return ""
    most = float(uses.max())
    strength = np.log1p(uses) / np.log1p(most)
    order = np.argsort(-uses, axis=1, kind="stable")
    by_use = np.take_along_axis(strength, order, 1)
    data = {"uses": uses.tolist(), "order": order.tolist(), "layers": view.layers}
    pixels = max(3, min(12, 420 // len(uses)))
    picture = (
        f'<div class="heat">{_image(by_use, pixels, "by-use", "Uses of each expert, most used first, a row a layer")}'
        f"{_image(strength, pixels, 'by-id', 'Uses of each expert by id, a row a layer', hidden=True)}"
        f'<p class="reading" aria-live="polite">One row a layer ({view.layers[0]} at the top), one column an expert, '
        "sorted by use (the button: by id); "
        f"the stronger, the more used (logarithmic, up to {uses.max():,} uses).</p>"
        f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script></div>'
    )
    button = '<button type="button" class="heat-order" aria-pressed="false">by expert id</button>'
    total = np.maximum(uses.sum(1), 1)
    ordered = np.take_along_axis(uses, order, 1)
    rows: list[list[Cell]] = [
        [
            f"layer {layer}",
            ", ".join(str(e) for e in order[i, :4]),
            percent(float(ordered[i, :8].sum() / total[i])),
            int((uses[i] > 0).sum()),
            percent(view.hit_rate_by_layer[i]),
        ]
        for i, layer in enumerate(view.layers)
    ]
    table = parts.table(["", "most used", "share of the top 8", "experts ever used", "hit rate"], rows)
    return (
        f"<figure><figcaption><h3>Which experts are used</h3>{button}</figcaption>{picture}"
        f"<details><summary>Figures as a table</summary>{table}</details></figure>"
    )


def _image(strength_LE: np.ndarray, pixels: int, kind: str, words: str, hidden: bool = False) -> str:
    return (
        f'<img class="{kind}"{" hidden" if hidden else ""} style="height:{pixels * len(strength_LE)}px" '
        f'alt="{words}" src="{charts.alpha_png(strength_LE)}">'
    )


def _curve(curve: Curve, view: TraceView) -> str:
    measured = (view.figures.get("decode") or {}).get("hit_rate")
    ledger = view.about.get("ledger")
    share = float(ledger["resident_share"]) if ledger else None

    def draw(width: float) -> str:
        x, y = charts.plot(width, 250, (0, 1), 1.0)
        body = charts.axes(x, y, "share of a layer's experts in memory", "hit rate", _percent, _percent)
        body.append(charts.path([(x(a), y(b)) for a, b in curve.floor], "l1"))
        body.append(charts.path([(x(a), y(b)) for a, b in curve.lru], "l0"))
        body.append(charts.path([(x(a), y(b)) for a, b, _ in curve.best], "l3"))
        body += [charts.dot(x(a), y(b), "c1", f"MIN at {a:.0%}: {b:.1%}", 3) for a, b in curve.floor]
        body += [charts.dot(x(a), y(b), "c3", f"{name} at {a:.0%}: {b:.1%}", 3) for a, b, name in curve.best]
        if measured is not None and share is not None:
            tip = f"this run: {measured:.1%} with {share:.0%} of the experts in memory"
            body.append(charts.dot(x(min(share, 1)), y(measured), "c2 ring", tip, 5))
        return charts.svg("Hit rate against residency for LRU, the best policy and MIN", width, 250, body)

    entries = [("c0w", "LRU"), ("c3", "best policy"), ("c1", "MIN: the best that any policy could do")]
    if measured is not None and share is not None:
        entries.append(("c2", f"this run: {measured:.1%}"))
    lru = dict(curve.lru)
    rows: list[list[Cell]] = [
        [f"{a:.0%}", percent(lru.get(a)), percent(b), name, percent(dict(curve.floor).get(a))]
        for a, b, name in curve.best
    ]
    lead = (
        f"Replayed on {curve.tokens} decode tokens of this trace, the first {curve.warm_up} not counted. "
        "First uses count as misses, so a short trace lies below what a long one would show."
    )
    table = parts.table(["in memory", "LRU", "best", "which", "MIN"], rows)
    return parts.figure("Hit rate against residency", draw, table, lead, parts.legend(entries))


def _bytes(view: TraceView) -> str:
    phases = view.bytes_by_phase
    if not phases:
        return parts.plain("Bytes by class", "Nothing was read: all experts were in memory.")
    rows = []
    for phase, by_class in phases.items():
        rows.append(
            (phase, [(CLASSES[name][0], float(n), f"{name}: {parts.megabytes(n)}") for name, n in by_class.items()])
        )
    shown = [entry for name, entry in CLASSES.items() if any(name in by_class for by_class in phases.values())]
    reads = view.figures["reads"]
    lines: list[list[Cell]] = [
        [name, reads[name]["count"], parts.megabytes(reads[name]["bytes"]), reads[name]["service_ms_p50"],
         reads[name]["service_ms_p99"], reads[name]["queued_ms_p50"]]
        for name in (*CLASSES, "cancelled") if name in reads
    ]  # fmt: skip
    table = parts.table(["", "reads", "bytes", "service p50 ms", "service p99 ms", "queued p50 ms"], lines)
    return parts.figure(
        "Bytes by class",
        lambda width: charts.stacked_row(width, "Bytes read by phase and class", rows, parts.megabytes),
        table,
        "What was read, and whether somebody waited for it.",
        parts.legend(shown),
    )


def _prefetch(view: TraceView) -> str:
    figures = view.figures["prefetch"]
    if not figures["landed_early"] and not figures["late"]:
        return parts.plain("Prefetch", "No expert was prefetched in this run.")
    on_time, late = figures["used"] - figures["late"], figures["late"]
    wasted = figures["landed_early"] - on_time
    shares = [
        ("c3", float(on_time), f"on time: {on_time:,}"),
        ("c5", float(late), f"late: {late:,}"),
        ("c6", float(wasted), f"never used: {wasted:,}"),
    ]
    lead = (
        f"{percent(figures['on_time_ratio'])} of the prefetched records that were used were there in time; "
        f"{percent(figures['waste_ratio'])} of the prefetched bytes were never used."
    )
    table = parts.table(["records", ""], [["on time", on_time], ["late", late], ["never used", wasted]])
    return parts.figure(
        "Prefetch",
        lambda width: charts.stacked_row(
            width, "Prefetched records by outcome", [("records", shares)], lambda n: f"{n:,.0f}"
        ),
        table,
        lead,
        parts.legend([("c3", "on time"), ("c5", "late"), ("c6", "never used")]),
    )


def _percent(value: float) -> str:
    return f"{value:.0%}"


def anchor(name: str) -> str:
    """An id for a heading."""
    return escape("".join(c if c.isalnum() else "-" for c in name).strip("-").lower() or "section", quote=True)
