"""`stoker predict MODEL`: how fast would it be here, from headers alone and before any download.

Owns options and what is printed. The model is stoker/store/headers.py's, the forecast stoker/plan's.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.bench.outlook import Assumptions, Row
    from stoker.plan.profile import Profile
    from stoker.plan.sizes import ModelShape
    from stoker.store.headers import Headers

GIB = 1 << 30
DEFAULT_CTX_TOKENS = 4096


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("predict")(predict)


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A store, a checkpoint, a GGUF file, or OWNER/NAME\\[/FILE.gguf]\\[@REVISION]."
        ),
    ],
    memory: Annotated[
        list[str] | None,
        typer.Option("--memory", metavar="SIZE", help="Budget, or auto; may be repeated (default: a ladder)."),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(help="general, code, math, medical, uniform, or a file of routes (default: by the model's form)."),
    ] = None,
    policy: Annotated[str, typer.Option(help="lru, lfru, decayed-lfu:64, s3-fifo.")] = "lru",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt for the time to the first token.")] = 512,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size",
            "-c",
            min=1,
            help="Tokens of context to hold (default: 4096, or the model's length where that is shorter).",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Default: physical cores.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Another machine's profile (`stoker probe --json`).")
    ] = None,
    simple: Annotated[
        bool, typer.Option("--simple", help="Also the naive calculator, misses x size / bandwidth, and its trap.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forecast memory, tok/s and time to the first token at several budgets, without reading any weight."""
    from stoker.bench.budgets import Divider
    from stoker.bench.outlook import overall, rows, simple_figures
    from stoker.bench.shapes import shape_of
    from stoker.store.headers import open_headers

    budgets = [_budget(size) for size in memory or []]
    _check_policy(policy)
    headers = open_headers(model)
    context = _context(ctx_size, headers)
    machine = machine_profile(profile, headers, threads)
    report: dict[str, Any] = {"model": model, "kind": headers.kind, "published_bytes": headers.published_bytes}
    report["fetched_bytes"] = headers.fetched_bytes
    lines = [_headline(headers)]
    for label, manifest in headers.manifests.items():
        shape = shape_of(headers.config, manifest, model)
        divider = Divider(headers.config, manifest, shape, machine.costs.process_bytes, context)
        assumed = assumptions(shape, routing, policy, prompt)
        found = rows(shape, machine, divider, budgets or divider.ladder(), assumed)
        said = overall(found, machine.memory_bytes)
        if not report.get("routing"):
            report["routing"] = assumed.routing.words
            lines += _axes(shape), f"assumed: {assumed.routing.words}", f"band: {_band(assumed)}"
        report.setdefault("formats", {})[label] = {
            "disk_bytes": shape.total_bytes, "floor_bytes": divider.floor_bytes, "whole_bytes": divider.whole_bytes,
            "record_bytes": shape.record_bytes, "dense_bytes": shape.dense_bytes, "verdict": said,
            "rows": [one.as_dict() for one in found],
        }  # fmt: skip
        lines += [
            "",
            *_format_lines(label, shape, divider.floor_bytes, divider.whole_bytes),
            *_table(found, machine.memory_bytes),
            f"  {said}",
        ]
        if simple:
            naive = {str(one.budget_bytes): simple_figures(shape, machine, one.token) for one in found if one.token}
            report["formats"][label]["simple"] = naive
            lines += _simple_lines(naive)
    for label, why in headers.refused.items():
        report.setdefault("refused", {})[label] = why
        lines += ["", f"{label} bits: not possible", *(f"  {line}" for line in why.splitlines())]
    print(json.dumps(report, indent=1) if as_json else "\n".join(lines))


def machine_profile(file: Path | None, headers: "Headers", threads: int | None) -> "Profile":
    """A named profile, the kept one of this machine and the model's disk, or a new one."""
    from stoker.cli.probe import profile_for
    from stoker.plan.profile import load

    if file is not None:
        return load(file)
    return profile_for(headers.directory or Path.cwd(), threads)[0]


def assumptions(shape: "ModelShape", routing: str | None, policy: str, prompt: int) -> "Assumptions":
    """What is assumed of routing: as named, or by the model's form, with the band that goes with it."""
    from stoker.bench.outlook import Assumptions
    from stoker.plan.forecast_routing import assumed, routing_for

    typical, worst, best = assumed(shape.experts)
    if routing is not None:
        typical = worst = best = routing_for(routing, shape)
    return Assumptions(typical, worst, best, policy=policy, prompt_tokens=prompt)


def _check_policy(policy: str) -> None:
    """Refused by name whatever routing is assumed; those that know the future are the simulator's alone."""
    from stoker.residency.policies import POLICIES, make_policy

    known = [name for name in POLICIES if name != "static"]
    base = policy.partition(":")[0]
    if base not in known:
        remedy = "`stoker simulate` replays it" if base in ("min", "static") else None
        raise OptionError("unknown policy", where="--policy", expected=", ".join(known), got=policy, remedy=remedy)
    try:
        make_policy(policy, 8)
    except OptionError as error:
        raise OptionError(error.what, where="--policy", expected=error.expected, got=policy) from error


def _budget(size: str) -> int:
    """`auto` is what this machine would give; other sizes may be another machine's, and are not held to its limits."""
    from stoker.runtime.budget import auto_budget, parse_bytes

    return auto_budget() if size.strip().lower() == "auto" else parse_bytes(size)


def _context(asked: int | None, headers: "Headers") -> int:
    longest = _longest(headers)
    if asked is not None and asked > longest:
        raise OptionError(
            "longer than the model's context", where="--ctx-size", expected=f"at most {longest}", got=asked
        )
    return asked or min(DEFAULT_CTX_TOKENS, longest)


def _longest(headers: "Headers") -> int:
    text = headers.config.get("text_config", headers.config)
    return int(text.get("max_position_embeddings") or 1 << 30)


def _headline(headers: "Headers") -> str:
    from stoker.store.sizes import show_bytes

    told = f"{headers.name}: {headers.kind}, {show_bytes(headers.published_bytes)} as it is"
    return told + (f" ({show_bytes(headers.fetched_bytes)} of headers fetched)" if headers.fetched_bytes else "")


def _axes(shape: "ModelShape") -> str:
    return (
        f"{shape.layers} layers, {shape.moe_layers} with {shape.experts} experts of "
        f"{shape.hidden} x {shape.expert_width}, top {shape.top_k}"
    )


def _band(assumed: "Assumptions") -> str:
    if assumed.worst.name == assumed.best.name:
        return "quartiles of the disk's times"
    return f"from slow reads with {assumed.worst.name} text to fast reads with {assumed.best.name}"


def _format_lines(label: str, shape: "ModelShape", floor_bytes: int, whole_bytes: int) -> list[str]:
    from stoker.store.sizes import show_bytes

    name = f"{label} bits" if label.isdigit() else label
    return [
        f"{name}: {show_bytes(shape.total_bytes)} on disk, experts of {show_bytes(shape.record_bytes)}, "
        f"dense {show_bytes(shape.dense_bytes)}",
        f"  floor {show_bytes(floor_bytes)}; everything in memory from {show_bytes(whole_bytes)}",
    ]


def _table(found: "list[Row]", memory_bytes: int) -> list[str]:
    lines = ["  memory      experts in memory  hits   reads a token   tok/s (band)         first token (band)"]
    for one in found:
        size = f"{one.budget_bytes / GIB:.2f}".rstrip("0").rstrip(".") + " GiB"
        if one.ledger is None or one.token is None or one.prompt is None:
            lines.append(f"  {size:<10}  {one.refused}")
            continue
        slots = f"{sum(one.ledger.slots) / len(one.ledger.slots):.0f} a layer, {one.ledger.resident_share:.0%}"
        speed = _banded(one.token.tokens_s, one.low_tokens_s, one.high_tokens_s)
        first = _banded(one.prompt.total_s, one.low_prompt_s, one.high_prompt_s, " s")
        reads = f"{one.token.read_bytes / 1e6:.0f} MB"
        lines.append(f"  {size:<10}  {slots:<17}  {one.token.hit_rate:4.0%}   {reads:<13}   {speed:<19}  {first}")
        beyond = f"; more than this machine's {memory_bytes / GIB:.1f} GiB" if one.budget_bytes > memory_bytes else ""
        lines.append(f"              {one.verdict}{beyond}")
    return lines


def _banded(value: float, low: float, high: float, unit: str = "") -> str:
    """A forecast and its band to about three digits; no band where it has no width."""
    shown, least, most = (f"{one:.{2 if one < 10 else 1 if one < 100 else 0}f}" for one in (value, low, high))
    return f"{shown}{unit}" if least == most else f"{shown}{unit} ({least} to {most})"


def _simple_lines(naive: dict[str, dict[str, float]]) -> list[str]:
    lines = ["  --simple: computing + misses x size / bandwidth, no overlap:"]
    for budget, one in naive.items():
        lines.append(
            f"  {int(budget) / GIB:.4g} GiB   {one['tokens_s']:.2f} tok/s at {one['bytes_s'] / 1e9:.2f} GB/s, measured "
            f"at this record size; with latency added {one['tokens_s_counted_twice']:.2f}; "
            f"at the best rate of any size ({one['sheet_bytes_s'] / 1e9:.2f} GB/s) {one['tokens_s_sheet']:.2f}"
        )
    lines.append(
        "  the trap: a bandwidth that was measured at the record's own size holds the latency of each read already; "
        "whoever adds it again counts it twice"
    )
    return lines
