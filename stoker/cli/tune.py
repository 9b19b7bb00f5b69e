"""`stoker tune MODEL`: verify the plan live, keep what wins, remember it for `auto`. Owns options and printing."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli import common
from stoker.cli.plan import Routes, choices_of, situation_for, told

if TYPE_CHECKING:
    from stoker.plan.planner import Choice
    from stoker.plan.tuner import Trial


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune")(tune)


def tune(
    model: common.ModelArgument,
    memory: common.Memory = "auto",
    routes: Routes = None,
    threads: common.Threads = None,
    ctx_size: common.CtxSize = None,
    seconds: Annotated[float, typer.Option(min=1, max=120, help="At most so long.")] = 110,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the plan with its alternatives on the model itself, in pairs; the winner serves `auto` from then on."""
    from stoker.bench.tune import Request
    from stoker.bench.tune import tune as run
    from stoker.plan.planner import plan as choose
    from stoker.plan.tuner import recall, remember
    from stoker.store.reader import open_store

    situation, budget = situation_for(model, memory, routes, threads, ctx_size)
    found = choose(situation)
    path = choices_of(Path(model), threads)
    kept = recall(path, budget)
    file = routes if routes and Path(routes).exists() else None
    context = ctx_size or min(4096, _longest(open_store(Path(model)).config))
    request = Request(Path(model), budget, threads, context, seconds, file)
    if kept is not None:
        common.note(f"begins with what was remembered: {told(kept)}")
    candidates = [*found.candidates, *([("the plan as it is", found.choice)] if found.candidates else [])]
    choice, trials = run(request, kept or found.choice, candidates, common.note, planned=found.choice)
    if trials:  # where nothing was decided, an earlier decision stands
        remember(path, budget, choice, trials)
    if as_json:
        print(json.dumps({"choice": asdict(choice), "trials": [asdict(trial) for trial in trials]}, indent=1))
        return
    print("\n".join(_verdict(choice, trials, bool(found.candidates), kept is not None)))
    if trials:
        print(f"remembered in {path}; `--path auto --policy auto` uses it at about this budget")


def _verdict(choice: "Choice", trials: "Sequence[Trial]", anything_to_try: bool, remembered: bool) -> list[str]:
    """What was kept and why, for people."""
    begun = "what was remembered" if remembered else "the plan as it was"
    if not trials:
        why = (
            "nothing could be tried in this time: give more --seconds" if anything_to_try
            else "nothing to try: no choice is open at this budget"
        )  # fmt: skip
        return [why, f"  {begun} stays: {told(choice)}"]
    changed = [trial.change for trial in trials if trial.kept]
    return [f"kept: {', '.join(changed) if changed else f'{begun}, nothing beat it'}", f"  {told(choice)}"]


def _longest(config: dict) -> int:
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings") or 4096)
