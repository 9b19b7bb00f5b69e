"""`stoker simulate`: replay routes through caches, with or without time. Owns options and tables, computes nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.errors import OptionError

ONLINE_POLICIES = "lru,decayed-lfu,lfru,s3-fifo,arc,static"
WIDE = 14  # more figures than this are shown one a line, with one column a replay
_SHOWN = {
    "trace": "trace", "policy": "policy", "slots_per_layer": "slots", "hit_rate": "hit rate",
    "full_event_hit_rate": "full", "misses_per_token": "misses", "misses_above_floor": "above MIN",
    "gap_recovered": "gap",
}  # fmt: skip
_SHARES = ("hit_rate", "full_event_hit_rate", "misses_above_floor", "gap_recovered")
_WORDS = {
    "m": "experts a layer in the roster",
    "mean": "share of the choices after the prefix that lie in the roster, over all layers",
    "worst": "the same in the layer that it covers least",
    "loads_per_token": "experts read to fill the rosters, spread over the tokens of a window",
    "mean_with_equal_m": "what rosters of the same size in each layer would cover",
    "warm_up_tokens": "replayed first and not counted",
}
FILE_WIDTH = 400  # columns of a table that goes to no terminal: nothing is cut
_TIME = "With time (needs --record-ms)"
_ROSTER = "Roster coverage instead of caches"


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


def simulate(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Stoker traces, .npz with `experts` [L, T, K], route .csv, or synthetic:PRESET[:TOKENS[:SEED]]."
        ),
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            help=f"Comma-separated ({ONLINE_POLICIES},min); also decayed-lfu:H, static:SHARE, min:WINDOW.",
        ),
    ] = None,
    slots: Annotated[
        str, typer.Option("--slots", "-s", help="Slots a layer, comma-separated: numbers, or shares such as 25%.")
    ] = "25%",
    global_cache: Annotated[bool, typer.Option("--global", help="One cache of slots x layers for all layers.")] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Deal slots (or roster places) out by the first half; judge on the second.")
    ] = False,
    warm_up: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens that are replayed and not counted (default: a tenth; with time, 200 or a fifth).",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Replay only so many tokens (default: all; with time, 1400).")
    ] = None,
    record_ms: Annotated[
        float | None, typer.Option(help="Time to read one expert on one lane: turns time on.", rich_help_panel=_TIME)
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, help="Reads that run side by side.", rich_help_panel=_TIME)] = 1,
    jitter: Annotated[
        float, typer.Option(min=0, help="Spread of a read: deviation / mean.", rich_help_panel=_TIME)
    ] = 0.5,
    layer_ms: Annotated[
        str, typer.Option(metavar="ATTENTION,EXPERTS", help="Compute of one layer for a token.", rich_help_panel=_TIME)
    ] = "0.6,0.4",
    prefetch: Annotated[
        str,
        typer.Option(
            help="none, gate:RECALL, co-occurrence or markov, each with /MOST for the most reads an event sends out.",
            rich_help_panel=_TIME,
        ),
    ] = "none",
    roster: Annotated[int | None, typer.Option(help="Experts a layer in the roster.", rich_help_panel=_ROSTER)] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens a sequence.", rich_help_panel=_ROSTER)] = 256,
    prefix: Annotated[
        float, typer.Option(help="Share of it before the roster is pinned.", rich_help_panel=_ROSTER)
    ] = 0.2,
    workers: Annotated[int, typer.Option(min=0, help="Processes for hit rates (0: one for each core).")] = 0,
    seed: Annotated[int, typer.Option(help="For jitter and the gate model.", rich_help_panel=_TIME)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Replay routes event-atomically: hit rates of policies and sizes; with --record-ms also stalls and latencies."""
    from stoker.plan import sweep, timing

    if global_cache and greedy:
        raise OptionError("a shared cache has no layers to deal slots to", where="--greedy", remedy="drop --global")
    timing.refuse_unused(
        record_ms is not None,
        roster is not None,
        timed={
            "--lanes": lanes != 1,
            "--jitter": jitter != 0.5,
            "--layer-ms": layer_ms != "0.6,0.4",
            "--prefetch": prefetch != "none",
        },
        rostered={"--window": window != 256, "--prefix": prefix != 0.2},
        cached={"--policy": policy is not None, "--global": global_cache},
    )
    partition = "global" if global_cache else "greedy" if greedy else "per-layer"
    names = [str(trace) for trace in traces]
    if roster is not None:
        rows = timing.rosters(names, roster, window, prefix, tokens, by_need=greedy)
    elif record_ms is None:
        cells = [
            sweep.Cell(name, one, size, partition, warm_up, tokens)
            for name in names
            for one in (policy or f"{ONLINE_POLICIES},min").split(",")
            for size in sweep.sizes(name, slots)
        ]
        rows = _with_progress(cells, workers, quiet=as_json)
        sweep.add_gap_to_floor(rows)
    else:
        request = timing.Request(
            (policy or ONLINE_POLICIES).split(","), slots, partition, warm_up, tokens, prefetch, layer_ms, seed
        )
        rows = timing.timed_rows(names, request, record_ms, lanes, jitter)
    if as_json:
        print(json.dumps(rows, indent=1))
    elif "full_event_hit_rate" in rows[0]:
        _hit_rates(rows, partition)
    else:
        _table(rows)


def _with_progress(cells: list[Any], workers: int, quiet: bool) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from stoker.plan.sweep import sweep

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = quiet or not console.is_terminal  # without one it would leave an empty line
    with Progress(*columns, console=console, disable=quiet, transient=True) as progress:
        task = progress.add_task("", total=len(cells))
        return sweep(cells, workers, lambda count: progress.update(task, completed=count))


def _hit_rates(rows: list[dict[str, Any]], partition: str) -> None:
    """The figures that decide, one line a replay, on a terminal of 80 columns."""
    from rich.console import Console
    from rich.table import Table

    names = [name for name in _SHOWN if any(row.get(name) is not None for row in rows)]
    traces = sorted({row["trace"] for row in rows})
    if len(traces) == 1:
        names.remove("trace")
    table = Table(box=None, pad_edge=False)
    for name in names:
        text = isinstance(rows[0][name], str)
        table.add_column(_SHOWN[name], justify="left" if text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_figure(name, row.get(name)) for name in names))
    console = Console(soft_wrap=True)
    console.print(table)
    caches = {"global": "one cache for all layers", "greedy": "slots dealt out by need"}.get(
        partition, "equal slots a layer"
    )
    warm_up = " and ".join(sorted({str(row["warm_up_tokens"]) for row in rows}))
    lines = [f"{traces[0]}: {caches}" if len(traces) == 1 else caches]
    lines[0] += f"; the first {warm_up} tokens are not counted; --json has every figure"
    lines += ["full: layers that miss nothing; misses: experts a token"]
    if "misses_above_floor" in names:
        lines.append("above MIN: misses beyond the best possible; gap: how much of LRU's distance to it is closed")
    console.print("\n".join(lines), style="dim", highlight=False, markup=False)


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _table(rows: list[dict[str, Any]]) -> None:
    """The plain numbers of each row; lists and nested figures are for --json."""
    from rich.console import Console
    from rich.table import Table

    from stoker.cli.trace import shown

    flat = [_flat(row) for row in rows]
    names = [name for name in flat[0] if _has_say(name) or any(row.get(name) is not None for row in flat)]
    cells = [[_cell(name, row.get(name), shown) for name in names] for row in flat]
    titles = [name.replace("_", " ") for name in names]
    if len(names) > WIDE:
        table = Table(box=None, pad_edge=False, show_header=False)
        for figure in zip(titles, *cells, strict=True):
            table.add_row(*figure)
    else:
        table = Table(box=None, pad_edge=False)
        for title, name in zip(titles, names, strict=True):
            table.add_column(title, justify="left" if isinstance(flat[0][name], str) else "right")
        for line in cells:
            table.add_row(*line)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    console.print(table)
    for words in _legend(names):
        console.print(words, style="dim", highlight=False, markup=False)


def _has_say(name: str) -> bool:
    """Whether a figure is shown although no row has it: that n is too small is an answer."""
    return name.endswith(("p95", "p99"))


def _cell(name: str, value: Any, shown: Any) -> str:
    return "-" if value is None and not _has_say(name) else shown(name, value)


def _legend(names: Sequence[str]) -> list[str]:
    return [f"{name.replace('_', ' ')}: {words}" for name, words in _WORDS.items() if name in names]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            out.update({f"{name}_{key}": value[key] for key in ("p50", "p95", "p99") if key in value})
        elif not isinstance(value, list | tuple):
            out[name] = value
    return out
