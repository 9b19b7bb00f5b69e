"""`stoker trace`: look at a recorded run. Owns the table on the screen; the figures come from stoker.trace.summary."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

_TOLD = (
    "model", "stoker", "command", "memory", "path", "policy", "threads", "ctx_size", "parallel", "direct", "routing",
)  # fmt: skip
_SHARES = ("_rate", "_ratio", "_efficiency", "waste_of_all_reads")  # the names that end so are shares


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
    for name, value in _rows(_most_asked_first(figures)):
        table.add_row(name, value)
    for name, value in _what_ran(figures["about"]):
        table.add_row(name, value)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print("--json has all that is known of the run", style="dim", highlight=False)


def _most_asked_first(figures: dict[str, Any]) -> dict[str, Any]:
    """Decoding's speed, hits and stall before everything else; without `about`, which _what_ran shortens."""
    order = ("decode", "mixed", "prefill")
    return {name: figures[name] for name in order if name in figures} | {
        name: value for name, value in figures.items() if name not in (*order, "about")
    }


def _what_ran(about: dict[str, Any]) -> list[tuple[str, str]]:
    """The few lines of `about` that tell runs apart, and the division of memory."""
    chosen = {name: about[name] for name in _TOLD if about.get(name) is not None}
    sizes = {name: size for name, size in (about.get("ledger") or {}).items() if name.endswith("_bytes") and size}
    return _rows({"about": chosen | ({"ledger": sizes} if sizes else {})})


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
    """A figure for people: sizes in MiB, shares in percent, numbers to four digits."""
    if value is None:
        return "n too small" if name.endswith(("p95", "p99")) else "not enough data"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in name:
        return f"{value / 2**20:,.1f} MiB" + ("/s" if name.endswith("_s") else "")
    if isinstance(value, float) and name.endswith(_SHARES):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value if abs(value) > 1e-9 else 0:,.4g}"
