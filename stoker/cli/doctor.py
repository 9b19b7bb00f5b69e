"""`stoker doctor [DIR]`: is this machine fit, and if not, what is wrong, in plain words.

Owns the order of the checks and how they are shown. Only a FAIL makes the exit code 1.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.cli.checks import Check


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where models lie, or a store (default: here).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check processor, kernels, disk, memory and limits."""
    place = directory or Path.cwd()
    if not place.is_dir():
        raise OptionError("not a directory", where="DIR", got=str(place))
    found = []
    for check in run_checks(place):
        found.append(check)
        if not as_json:
            _show(check)
    if as_json:
        plain = [{**vars(check), "data": dict(check.data)} for check in found]
        print(json.dumps({"verdict": _worst(found), "checks": plain}, indent=2))
    else:
        print(_summary(found))
    if _worst(found) == "FAIL":
        raise typer.Exit(1)


def run_checks(directory: Path) -> Iterator["Check"]:
    """Every check in turn; those that need the compiled part are left out when it does not load."""
    from stoker.cli.checks import machine

    versions = machine.versions()
    yield from versions
    plain: list[Callable[[], list[Check]]] = [machine.memory, machine.process_limits]
    for run in plain:
        yield from run()
    if any(check.verdict == "FAIL" for check in versions):
        return
    from stoker.cli.checks.disk import check_disk
    from stoker.cli.checks.kernels import check_kernels

    processor = machine.processor()
    yield from processor
    if all(check.verdict != "FAIL" for check in processor):
        yield from check_kernels()
    yield from machine.huge_pages()
    yield from machine.read_backend()
    yield from check_disk(directory)


def _show(check: "Check") -> None:
    import sys
    import textwrap

    colours = {"PASS": "32", "WARN": "33", "FAIL": "31"}
    verdict = f"\x1b[{colours[check.verdict]}m{check.verdict}\x1b[0m" if sys.stdout.isatty() else check.verdict
    lines = textwrap.wrap(check.finding, 96) or [""]
    print(f"{verdict}  {check.name:<11} {lines[0]}")
    for line in lines[1:] + [f"-> {line}" for line in [check.remedy] if line]:
        print(f"{'':<18}{line}", flush=True)


def _worst(found: list["Check"]) -> str:
    verdicts = {check.verdict for check in found}
    return next((verdict for verdict in ("FAIL", "WARN") if verdict in verdicts), "PASS")


def _summary(found: list["Check"]) -> str:
    counts = {verdict: sum(check.verdict == verdict for check in found) for verdict in ("PASS", "WARN", "FAIL")}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return {
        "PASS": f"{told}: this machine is fit",
        "WARN": f"{told}: stoker runs here; the warnings say what would make it better",
        "FAIL": f"{told}: stoker cannot run properly here",
    }[_worst(found)]
