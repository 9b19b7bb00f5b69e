"""A training run's metrics.jsonl: loss, agreement of heads and gates, gradient norm, over its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stoker.bench.report import charts, parts
from stoker.errors import TraceError

HEIGHT = 220.0
CURVES = (
    ("loss", "Loss", "Of each step's batch, in nats a token (heads: from the gates' distribution)."),
    ("agreement", "Heads and gates", "Share of a layer's experts that head and gate both name."),
    ("grad_norm", "Gradient norm", "Before clipping."),
)
SMOOTHED = 20  # the darker line is a mean over a twentieth of the run


def is_metrics(path: Path) -> bool:
    """Whether the file is one of training's."""
    return path.suffix == ".jsonl" and path.is_file()


def training_section(path: Path) -> str:
    """Curves and a table. Raises TraceError for lines that are no metrics."""
    steps = [_entry(path, number, line) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    if not steps:
        raise TraceError("holds no steps", where=str(path))
    seconds = sum(step.get("seconds", 0.0) for step in steps)
    last = steps[-1]
    tiles = parts.tiles(
        [
            ("steps", f"{len(steps):,}", f"{seconds / len(steps):.2f} s each"),
            ("loss", f"{last['loss']:.4f}", f"from {steps[0]['loss']:.4f}"),
            *([("agreement", parts.percent(last["agreement"]), "the last step")] if "agreement" in last else []),
        ]
    )
    return tiles + "".join(_curve(steps, *curve) for curve in CURVES if curve[0] in last)


def _entry(path: Path, number: int, line: str) -> dict[str, float]:
    try:
        entry = json.loads(line)
        if {"step", "loss"} <= entry.keys():
            return entry
    except (ValueError, AttributeError):
        pass
    raise TraceError("not a line of training metrics", where=f"{path}:{number}", expected='{"step": n, "loss": x, ...}')


def _curve(steps: Sequence[dict[str, float]], key: str, title: str, lead: str) -> str:
    at = [step["step"] for step in steps]
    values = [step[key] for step in steps]
    width_of_mean = max(1, len(values) // SMOOTHED)
    means = [sum(values[max(0, i - width_of_mean + 1) : i + 1]) / min(i + 1, width_of_mean) for i in range(len(values))]

    def draw(width: float) -> str:
        x, y = charts.plot(width, HEIGHT, (at[0], max(at[-1], at[0] + 1)), max(values) * 1.05)
        body = charts.axes(x, y, "step", title)
        body.append(charts.path([(x(s), y(v)) for s, v in zip(at, values, strict=True)], "l0"))
        body.append(charts.path([(x(s), y(v)) for s, v in zip(at, means, strict=True)], "l1"))
        return charts.svg(title, width, HEIGHT, body)

    rows = [(int(s), v) for s, v in zip(at, values, strict=True)]
    thinned = rows[:: max(1, len(rows) // 50)]
    return parts.figure(title, draw, parts.table(["step", title], thinned), lead)
