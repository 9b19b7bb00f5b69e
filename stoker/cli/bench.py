"""`stoker bench MODEL`: prefill, decode and total, cold and warm, of a store's variants and of a peer, interleaved.

Owns options and the table; stoker.bench measures. The table or the JSON goes to stdout, progress to stderr.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import common
from stoker.cli.common import note

if TYPE_CHECKING:
    from stoker.bench.cases import Plan

_WORK = "What is fed"
_COMPARE = "What is compared"
TABLE_WIDTH = 130  # a narrower terminal wraps lines rather than figures


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    context: typer.Context,
    model: common.ModelArgument,
    memory: common.Memory = "auto",
    path: common.PathOption = "auto",
    policy: common.Policy = "lru",
    threads: common.Threads = None,
    ctx_size: common.CtxSize = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Reads in flight at once; measured if not given.", rich_help_panel="Loading"),
    ] = None,
    prefetch: Annotated[
        int | None,
        typer.Option(min=0, help="Reads ahead for the next layer; 0 for none.", rich_help_panel="Loading"),
    ] = None,
    buffered: Annotated[
        bool, typer.Option("--buffered", help="Read through the page cache.", rich_help_panel="Loading")
    ] = False,
    preload: Annotated[
        bool,
        typer.Option(
            "--preload", help="Read every expert that fits first; nothing is cold.", rich_help_panel="Loading"
        ),
    ] = False,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens to prefill.", rich_help_panel=_WORK)] = 256,
    decode: Annotated[int, typer.Option(min=1, help="Tokens to decode and count.", rich_help_panel=_WORK)] = 64,
    warmup: Annotated[
        int, typer.Option(min=0, help="Warm decode steps before those counted.", rich_help_panel=_WORK)
    ] = 8,
    seed: Annotated[int, typer.Option(help="Of the random token ids.", rich_help_panel=_WORK)] = 0,
    ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Given ids: JSON {"prompt": [], "decode": []}.', rich_help_panel=_WORK),
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            rich_help_panel=_WORK,
            help="Follow recorded routes: an .npz with `experts` [L, T, K], or a stoker trace.",
        ),
    ] = None,
    route_weights: Annotated[
        str, typer.Option(metavar="own|uniform", help="Weights of replayed experts.", rich_help_panel=_WORK)
    ] = "own",
    routing: common.Routing = None,
    adapter: common.Adapter = None,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Rounds; each loads every variant afresh.")
    ] = 3,
    vs_path: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Also on this path; repeat.", rich_help_panel=_COMPARE)
    ] = None,
    vs_policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Also with this policy; repeat.", rich_help_panel=_COMPARE)
    ] = None,
    vs: Annotated[
        str | None,
        typer.Option("--vs", metavar="llama.cpp=FILE.gguf", help="A peer on the same ids.", rich_help_panel=_COMPARE),
    ] = None,
    llama_python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="An interpreter that has llama-cpp-python.", rich_help_panel=_COMPARE),
    ] = None,
    no_mmap: Annotated[
        bool, typer.Option("--no-mmap", help="The peer reads its weights into memory.", rich_help_panel=_COMPARE)
    ] = False,
    read_ahead: Annotated[
        int | None,
        typer.Option(metavar="KIB", help="The disk's read-ahead while it runs (root).", rich_help_panel=_COMPARE),
    ] = None,
    trace: common.Trace = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON, with provenance.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Time prefill, decode and both together, each alone, cold and warm apart; median and spread of the rounds.

    With --vs every run is a process of its own, in a memory cgroup of the size of --memory that counts the page cache.
    """
    from stoker.bench.request import Request, build

    request = Request(
        model=model, memory=memory, path=path, policy=policy, threads=threads, ctx_size=ctx_size, depth=depth,
        prefetch=prefetch, buffered=buffered, prompt=prompt, decode=decode, warmup=warmup, repeats=repeats,
        seed=seed, ids=ids, preload=preload, routes=routes, route_weights=route_weights,
        routing=routing, adapter=adapter, vs_paths=tuple(vs_path or ()),
        vs_policies=tuple(vs_policy or ()), peer=vs, peer_python=llama_python, peer_in_memory=no_mmap,
        read_ahead_kib=read_ahead, trace=trace, given=_given(context),
    )  # fmt: skip
    plan, about = build(request)
    if out is not None:
        _check_out(out)
    if plan.separate and not as_json:
        note("each run is a process of its own; caches are dropped before each")
    result = _measure(plan, about, read_ahead)
    if out is not None:
        from stoker.bench.provenance import write_result

        write_result(out, result)
        note(f"written to {out}")
    if as_json:
        from stoker.bench.provenance import provenance

        print(json.dumps({"provenance": provenance()} | result, indent=1))
    else:
        print_result(result)


def _check_out(out: Path) -> None:
    """Before anything is measured: a result that cannot be written is lost."""
    import os

    from stoker.errors import OptionError

    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK) or out.is_dir():
        raise OptionError("cannot be written", where="--out", got=str(out), remedy="name a file in a folder of yours")


def _given(context: typer.Context) -> tuple[str, ...]:
    return tuple(
        n for n in context.params if str(getattr(context.get_parameter_source(n), "name", "")) == "COMMANDLINE"
    )


def _measure(plan: "Plan", about: dict[str, Any], read_ahead_kib: int | None) -> dict[str, Any]:
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from stoker.bench.confine import read_ahead
    from stoker.bench.device import block_device, device_rate
    from stoker.bench.device import read_ahead_kib as current
    from stoker.bench.figures import result
    from stoker.bench.interleave import run_rounds
    from stoker.bench.provenance import spread
    from stoker.errors import OptionError

    store = plan.variants[0].model
    device = block_device(plan.variants[-1].model)
    if read_ahead_kib is not None and device is None:
        raise OptionError("the disk is not known to the system", where="--read-ahead", got=plan.variants[-1].model)
    rates = [device_rate(store, seconds=1.0)]
    setting = read_ahead(read_ahead_kib, device or "") if read_ahead_kib is not None else contextlib.nullcontext()
    with setting:
        seen = current(plan.variants[-1].model)
        runs = run_rounds(plan, note, lambda: rates.append(device_rate(store, seconds=1.0)))
    about = {**about, "device_bytes_per_s": spread(rates), "read_ahead_kib": seen}
    return result(plan, runs, about)


def print_result(result: dict[str, Any]) -> None:
    """One row for each variant and session: medians of the rounds and how far they lay apart."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    titles = ("", "", "prefill tok/s", "decode tok/s", "p50 ms", "total s", "hits", "stall ms", "MB/token", "peak RSS")
    for title in titles:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, figures in result["variants"].items():
        for session in (s for s in ("cold", "warm") if s in figures):
            table.add_row(name, session, *_cells(figures[session]), _gib(figures.get("rss_peak_bytes")))
    console = Console(width=max(Console().width, TABLE_WIDTH))
    console.print(table)
    for line in footnotes(result):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def _cells(figures: dict[str, Any]) -> list[str]:
    p50 = figures["token_ms"]["p50"]
    return [
        _spread(figures.get("prefill_tok_s")),
        _spread(figures.get("decode_tok_s")),
        "-" if p50 is None else f"{p50:.1f}",
        _spread(figures.get("total_s")),
        "-" if "hit_rate" not in figures else f"{figures['hit_rate']['median']:.1%}",
        "-" if "stall_ms_per_token" not in figures else f"{figures['stall_ms_per_token']['median']:.1f}",
        "-" if "decode_bytes_per_token" not in figures else f"{figures['decode_bytes_per_token']['median'] / 1e6:.1f}",
    ]


def _spread(value: dict[str, float] | None) -> str:
    """Median, and half the distance from the least to the most of the rounds in percent of it."""
    if value is None:
        return "-"
    median = value["median"]
    shown = f"{median:,.0f}" if median >= 1000 else f"{median:.4g}"
    if value["n"] == 1 or not median:
        return shown
    return f"{shown} ±{50 * (value['max'] - value['min']) / median:.0f}%"


def _gib(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['max'] / 2**30:.2f} GiB"


def footnotes(result: dict[str, Any]) -> list[str]:
    """How cold was cold, what was fed, what the device gave, and what to mind."""
    cold = {f["cold_by"] + (" (verified)" if f["cold_verified"] else "") for f in result["variants"].values()
            if "cold_by" in f}  # fmt: skip
    rate = result["device_bytes_per_s"]
    first = next(iter(result["variants"].values()))
    fed = next(first[name] for name in ("cold", "warm") if name in first)
    lines = [
        f"{fed['prefill_tokens']} prompt and {fed['decode_tokens']} decode tokens, {result['options']['repeats']} "
        f"rounds, {result['options']['threads']} threads, memory {result['options']['memory']}",
        f"device {rate['median'] / 1e9:.2f} GB/s ({rate['min'] / 1e9:.2f} to {rate['max'] / 1e9:.2f})",
    ]
    if cold:
        lines.insert(0, "cold by " + ", ".join(sorted(cold)))
    if "routes" in result["model"]:
        routes = result["model"]["routes"]
        lines.append(f"routes of {routes['file']}: speed is real, the output means nothing")
        if routes.get("repeated", 1) > 1:
            lines.append(f"its {routes['tokens']} tokens are repeated {routes['repeated']:.1f} times in a session")
    return lines + [f"note: {line}" for line in result["notes"]]
