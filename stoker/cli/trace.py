"""`stoker trace`: look at a recorded run. Owns the table on the screen; the figures come from stoker.trace.summary."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    group = typer.Typer(name="trace", help="Look at a recorded run (`--trace FILE`).", no_args_is_help=True)
    group.command("summary")(summary)
    app.add_typer(group)


def summary(
    file: Annotated[Path, typer.Argument(help="The trace, or the FILE.parts folder of a run that did not end.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Speed, hits, stall, reads, prefetch, working set and memory of one run."""
    from stoker.trace.reader import Trace
    from stoker.trace.summary import summarise

    figures = summarise(Trace(file))
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        _print(figures)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(figures):
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)


def _rows(figures: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested figures as `a.b` lines, in their order."""
    rows: list[tuple[str, str]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, shown(prefix + name, value)))
    return rows


def shown(name: str, value: Any) -> str:
    """A figure for people: sizes in MiB, numbers to four digits."""
    if value is None and name.startswith("about."):
        return "not set"
    if value is None:
        return "n too small" if name.endswith(("p95", "p99")) else "not enough data"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in name:
        return f"{value / 2**20:,.1f} MiB" + ("/s" if name.endswith("_s") else "")
    return f"{value:,}" if isinstance(value, int) else f"{value if abs(value) > 1e-9 else 0:,.4g}"
