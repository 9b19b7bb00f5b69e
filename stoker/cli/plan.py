"""`stoker plan MODEL`: how this model should be run at a budget, each choice with its reason. Loads nothing.

Owns options and what is printed; the choice is stoker/plan/planner.py's.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli import common
from stoker.errors import StoreError

if TYPE_CHECKING:
    from stoker.plan.planner import RunPlan, Situation

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

    situation, budget = situation_for(model, memory, routes, threads, ctx_size)
    found = choose(situation)
    if as_json:
        print(json.dumps({"model": model, "budget_bytes": budget} | found.as_dict(), indent=1))
        return
    print("\n".join(lines(model, budget, situation, found)))


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
        raise StoreError("there is no such store", where=model, remedy="make one with `stoker pack SRC DST`")
    limit = budget.resolve(memory)
    profile = profile_for(path, threads)[0]
    tokens = ctx_size or min(DEFAULT_CTX_TOKENS, _model_length(path))
    return situation_of(path, limit, profile, tokens, routes), limit


def lines(model: str, budget: int, situation: "Situation", found: "RunPlan") -> list[str]:
    """The plan for people: one line a choice."""
    from stoker.runtime.ledger import show

    told = [f"{model} in {show(budget)}; {situation.routing.words}"]
    told += [f"  {name:<14} {reason}" for name, reason in found.reasons.items()]
    token = found.token
    told.append(
        f"  forecast       {token.tokens_s:.2f} tok/s: {token.total_ms:.0f} ms a token, of which "
        f"{token.stall_ms:.0f} waiting for {token.misses:.0f} reads, {token.experts_ms:.0f} experts, "
        f"{token.dense_ms + token.head_ms:.0f} dense, {token.overhead_ms + token.attention_ms:.0f} other"
    )
    if found.candidates:
        told.append(f"  to try         {', '.join(name for name, _ in found.candidates[:4])} (`stoker tune`)")
    return told
