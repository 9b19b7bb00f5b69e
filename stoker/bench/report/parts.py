"""The pieces of a page: figures in two widths with their table, tiles, tables, legends. Knows HTML, no traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from stoker.plan.explain import Explanation

WIDE, NARROW = 880.0, 340.0
Cell = str | int | float | None


def figure(title: str, draw: Callable[[float], str], table: str, lead: str = "", legend: str = "") -> str:
    """One drawing for wide and one for narrow screens, a sentence that says how to read it, and the table behind it."""
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3>{f'<p>{escape(lead)}</p>' if lead else ''}</figcaption>{legend}"
        f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'
        f"<details><summary>Figures as a table</summary>{table}</details></figure>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> str:
    """First column names the row; numbers stand right."""
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = ""
    for name, *cells in rows:
        data = "".join(f"<td>{escape(shown(cell))}</td>" for cell in cells)
        body += f'<tr><th scope="row">{escape(shown(name))}</th>{data}</tr>'
    inside = f"<table>{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inside}</div>'


def plain(title: str, words: str) -> str:
    """A figure that has nothing to draw, and says why."""
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p></figcaption></figure>"


def shown(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(class, words) in the order of the drawing."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in entries)
    return f'<ul class="legend">{items}</ul>'


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """(name, value, small print)."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in entries
    )
    return f'<dl class="tiles">{items}</dl>'


def verdict(found: Sequence[Explanation]) -> str:
    """What bounds each run, why, and what would help most."""
    items = ""
    for one in found:
        name = f"{one.source}: " if len(found) > 1 else ""
        gain = f" ({one.gain()})" if one.gain() else ""
        items += (
            f"<li><strong>{escape(name)}bound by {escape(one.bound)}</strong>{escape(one.because)}."
            f'<p class="change">Would help most: {escape(one.change.what)}{escape(gain)}.</p></li>'
        )
    return f'<figure class="verdict"><figcaption><h3>What bounds the speed</h3></figcaption><ul>{items}</ul></figure>'


def megabytes(nbytes: float) -> str:
    """Decimal units, as devices count: 1.25 GB, 80 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def gibibytes(nbytes: float) -> str:
    """Binary units, as memory is counted."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
