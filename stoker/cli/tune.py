"""`stoker tune MODEL`: verify the plan live, keep what wins, remember it for `auto`. Owns options and printing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli import common
from stoker.cli.plan import Routes, situation_for


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
    from stoker.plan.profile import machine_key
    from stoker.plan.tuner import choices_path, remember
    from stoker.runtime.budget import default_threads
    from stoker.store.reader import open_store

    situation, budget = situation_for(model, memory, routes, threads, ctx_size)
    found = choose(situation)
    file = routes if routes and Path(routes).exists() else None
    store = open_store(Path(model))
    context = ctx_size or min(4096, _longest(store.config))
    request = Request(Path(model), budget, threads, context, seconds, file)
    choice, trials = run(request, found.choice, found.candidates, say=common.note)
    machine = machine_key(Path(model), threads or default_threads())
    path = choices_path(store.fingerprint, machine)
    remember(path, budget, choice, trials)
    if as_json:
        print(json.dumps({"choice": asdict(choice), "trials": [asdict(trial) for trial in trials]}, indent=1))
        return
    changed = [trial.change for trial in trials if trial.kept]
    print(f"kept: {', '.join(changed) if changed else 'the plan as it was, nothing beat it'}")
    told = {name: value for name, value in choice.options().items() if name != "slots" and value is not None}
    print(f"  {', '.join(f'{name} {value}' for name, value in told.items())}; the rest as measured at load")
    print(f"remembered in {path}; `--path auto --policy auto` uses it at about this budget")


def _longest(config: dict) -> int:
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings") or 4096)
