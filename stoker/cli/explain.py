"""`stoker explain FILES...`: what bounds the speed of a recorded run or a benchmark, and what would help most."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stoker.plan.evidence import Evidence


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
    from stoker.plan.explain import explain as judge

    verdicts = [judge(evidence) for file in files for evidence in evidence_of(file)]
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    else:
        print("\n\n".join("\n".join(verdict.lines()) for verdict in verdicts))


def evidence_of(file: Path) -> "list[Evidence]":
    """The evidence in a file, with what this machine's profile adds where the run is of this machine's store."""
    from stoker.bench.report.page import read_result
    from stoker.plan.evidence import of_result, of_trace
    from stoker.trace.reader import Trace

    if file.suffix == ".json":
        document = read_result(file)
        options = document.get("options") or {}
        model = (document.get("model") or {}).get("path")
        return [_on_this_machine(e, model, options.get("threads")) for e in of_result(document)]
    trace = Trace(file)
    return [_on_this_machine(of_trace(trace), trace.about.get("model"), trace.about.get("threads"))]


def _on_this_machine(evidence: "Evidence", model: str | None, threads: int | None) -> "Evidence":
    from stoker.plan.profile import cached
    from stoker.runtime.budget import default_threads

    if model is None or not Path(model).exists():
        return evidence
    profile = cached(Path(model), threads or default_threads())
    if profile is None:
        return evidence
    return evidence.on(
        device_bytes_s=profile.sustained_bytes_s(evidence.record_bytes) if evidence.record_bytes else None,
        memory_bytes_s=profile.kernels.matvec_bytes_s,
    )
