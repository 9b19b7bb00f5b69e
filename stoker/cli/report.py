"""`stoker report FILES... --out page.html`: traces and benchmark results as one page that needs no network."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.common import note
from stoker.errors import OptionError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...", help="Traces (`--trace`), results (`stoker bench --out`), metrics.jsonl of training."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PAGE.html", help="The page to write.")],
    title: Annotated[str, typer.Option(help="Its heading.")] = "stoker report",
) -> None:
    """Tokens over time, latencies, experts used, hits against residency, bytes, prefetch and memory, on one page."""
    from stoker.bench.report.page import build_page

    if not out.parent.is_dir():
        raise OptionError("there is no such folder", where="--out", got=str(out.parent))
    if out in files:
        raise OptionError("would overwrite what it reads", where="--out", got=str(out))
    html = build_page(files, title, note)
    unfinished = out.with_name(out.name + ".unfinished")
    unfinished.write_text(html, encoding="utf-8")
    unfinished.replace(out)
    note(f"written to {out}: {len(html.encode()) / 1e6:.1f} MB")
