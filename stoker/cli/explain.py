"""`stoker explain FILES...`: what bounds the speed of a recorded run or a benchmark, and what would help most."""

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Traces (`--trace`) and results (`stoker bench --out`).")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """Name what bounds the speed, with the figures, and the one change that would help most.

    What a run does not tell of its machine comes from the profile of `stoker probe`, where there is one for this
    machine.
    """
    from stoker.bench.judged import judge_file

    verdicts = [verdict for file in files for verdict in judge_file(file)]
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    else:
        print("\n\n".join("\n".join(verdict.lines()) for verdict in verdicts))
