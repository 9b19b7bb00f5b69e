"""`stoker plan MODEL`: how this model should be run at a budget, each choice with its reason. Loads nothing.

Owns options and what is printed; the choice is stoker/plan/planner.py's.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli import common
from stoker.errors import StoreError

if TYPE_CHECKING:
    from stoker.plan.planner import Choice, RunPlan, Situation

Routes = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Routes of this model (a trace, .npz): slots follow them. Or general, code, math, medical, uniform.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    model: common.ModelArgument,
    memory: common.Memory = "auto",
    routes: Routes = None,
    threads: common.Threads = None,
    ctx_size: common.CtxSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Choose slots, path, policy, prefetch, depth and kind of reads for a budget, and say why."""
    from stoker.plan.planner import plan as choose
    from stoker.plan.tuner import recall

    situation, budget = situation_for(model, memory, routes, threads, ctx_size)
    found = choose(situation)
    kept = recall(choices_of(Path(model), threads), budget)
    if as_json:
        remembered = {"remembered": asdict(kept) if kept else None}
        print(json.dumps({"model": model, "budget_bytes": budget} | found.as_dict() | remembered, indent=1))
        return
    print("\n".join(lines(model, budget, situation, found, kept)))


def choices_of(model: Path, threads: int | None) -> Path:
    """Where what `stoker tune` found for this store on this machine is remembered."""
    from stoker.plan.profile import machine_key
    from stoker.plan.tuner import choices_path
    from stoker.runtime.budget import default_threads
    from stoker.store.reader import open_store

    return choices_path(open_store(model).fingerprint, machine_key(model, threads or default_threads()))


def told(choice: "Choice") -> str:
    """A choice in one line."""
    named = {name: value for name, value in choice.options().items() if name not in ("slots", "direct")}
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in named.items() if value is not None]
    parts.append("direct reads" if choice.direct else "buffered reads")
    return ", ".join(parts) + "; the rest as measured at load"


def situation_for(
    model: str, memory: str, routes: str | None, threads: int | None, ctx_size: int | None
) -> "tuple[Situation, int]":
    """The situation and the budget in bytes."""
    from stoker.bench.situation import situation_of
    from stoker.cli.probe import profile_for
    from stoker.generate.model import DEFAULT_CTX_TOKENS, _model_length
    from stoker.runtime import budget

    path = Path(model)
    if not path.is_dir():
        raise _no_store(path)
    limit = budget.resolve(memory)
    profile = profile_for(path, threads)[0]
    tokens = ctx_size or min(DEFAULT_CTX_TOKENS, _model_length(path))
    return situation_of(path, limit, profile, tokens, routes), limit


def _no_store(path: Path) -> StoreError:
    if path.suffix == ".gguf" and path.is_file():
        return StoreError(
            "is a GGUF, not a store", where=str(path),
            remedy="`stoker predict` reads it as it is; `stoker pack SRC DST` makes a store",
        )  # fmt: skip
    if path.exists():
        return StoreError("is not a store", where=str(path), expected="a folder that `stoker pack` made", got="a file")
    return StoreError("there is no such store", where=str(path), remedy="make one with `stoker pack SRC DST`")


def lines(
    model: str, budget: int, situation: "Situation", found: "RunPlan", remembered: "Choice | None" = None
) -> list[str]:
    """The plan for people: one line a choice, and what an earlier tune decided, which `auto` prefers."""
    from stoker.runtime.ledger import show

    shown = [f"{model} in {show(budget)}; {situation.routing.words}"]
    shown += [f"  {name:<14} {reason}" for name, reason in found.reasons.items()]
    token = found.token
    shown.append(
        f"  forecast       {token.tokens_s:.2f} tok/s: {token.total_ms:.0f} ms a token, of which "
        f"{token.stall_ms:.0f} waiting for {token.misses:.0f} reads, {token.experts_ms:.0f} experts, "
        f"{token.dense_ms + token.head_ms:.0f} dense, {token.overhead_ms + token.attention_ms:.0f} other"
    )
    if found.candidates:
        shown.append(f"  to try         {', '.join(name for name, _ in found.candidates[:4])} (`stoker tune`)")
    if remembered is not None:
        shown.append(f"  remembered     {told(remembered)}: what `stoker tune` kept, and `auto` uses at this budget")
    return shown
