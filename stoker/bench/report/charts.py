"""SVG by hand: scales, axes, bars, lines, and a tiny PNG for heat maps. Colours are CSS classes, so both themes work.

Every drawing takes the width that it will be shown at (no scaling of text). Knows numbers and words, no traces.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

import numpy as np

LEFT, RIGHT, TOP, BOTTOM = 52.0, 18.0, 22.0, 34.0
HEAT = (16, 62, 140)  # red, green, blue of the strongest cell on a light page; a dark one turns it around
_numbers = count()


@dataclass(frozen=True)
class Scale:
    """Values low..high to pixels start..end, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.log else value
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values inside the scale, no more than about `most`."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
                if len(found) <= most + 1:
                    break
            return found
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / most
        unit = 10 ** math.floor(math.log10(raw))
        step = next(unit * s for s in (1, 2, 2.5, 5, 10) if unit * s >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number of three digits or so: 1,250; 12.5; 0.04."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".") if size < 100 else ""


def svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A drawing with its accessible name."""
    name = f"t{next(_numbers)}"
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-labelledby="{name}"><title id="{name}">{escape(title)}</title>{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> str:
    """`tip` is shown when the pointer or a finger is on it."""
    data = f' data-tip="{escape(tip, quote=True)}"' if tip else ""
    size = f'width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} class="{kind}"{data}/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    steps = " ".join(f"{'M' if i == 0 else 'L'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path d="{steps}" class="{kind}"/>'


def dot(x: float, y: float, kind: str, tip: str = "", radius: float = 3.5) -> str:
    data = f' data-tip="{escape(tip, quote=True)}"' if tip else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"{data}/>'


def axes(
    x: Scale,
    y: Scale,
    x_name: str,
    y_name: str,
    shown: Callable[[float], str] = short,
    shown_x: Callable[[float], str] = short,
) -> list[str]:
    """Grid lines, tick labels and names. The y name stands above the plot."""
    most_x = max(4, int((x.end - x.start) / 70))
    parts = [text(x.start, y.end - 8, y_name, "start", "name")]
    for tick in y.ticks(4):
        parts.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(text(x.start - 6, y(tick) + 4, shown(tick), "end", "tick"))
    for tick in x.ticks(most_x):
        parts.append(text(x(tick), y.start + 15, shown_x(tick), "middle", "tick"))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    parts.append(text(x.end, y.start + 30, x_name, "end", "name"))
    return parts


def plot(
    width: float, height: float, x: tuple[float, float], y_high: float, log_x: bool = False
) -> tuple[Scale, Scale]:
    """The x and y scales of a plot with room for its axes; y begins at 0."""
    high = y_high if y_high > 0 else 1.0
    return Scale(*x, LEFT, width - RIGHT, log_x), Scale(0.0, high, height - BOTTOM, TOP)


def stacked_row(
    width: float,
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]],
    total_text: Callable[[float], str],
) -> str:
    """Horizontal stacked bars on one scale: rows of (name, [(class, value, tip)])."""
    most = max((sum(value for _, value, _ in parts) for _, parts in rows), default=0) or 1.0
    label = 78.0
    scale = Scale(0, most, label, width - 76)
    body, pitch = [], 30.0
    for index, (name, parts) in enumerate(rows):
        y, at = index * pitch + 4, 0.0
        body.append(text(label - 8, y + 15, name, "end", "label"))
        for kind, value, tip in parts:
            body.append(rect(scale(at), y, scale(at + value) - scale(at), 20, kind, tip))
            at += value
        body.append(text(scale(at) + 6, y + 15, total_text(at), "start", "label"))
    return svg(title, width, len(rows) * pitch + 2, body)


def alpha_png(values_RC: np.ndarray) -> str:
    """A data URI of an image that is opaque where the value is 1 and clear where it is 0: one cell, one pixel."""
    alpha = (np.clip(values_RC, 0, 1) * 255).astype(np.uint8)
    rows, columns = alpha.shape
    pixels = np.empty((rows, columns, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = HEAT, alpha
    raw = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, columns * 4)], 1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()
