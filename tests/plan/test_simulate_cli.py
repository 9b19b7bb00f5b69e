"""`stoker simulate` and `stoker trace summary` as commands: figures, tables, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from stoker.cli import simulate, trace
from stoker.errors import OptionError, StokerError, TraceError
from stoker.plan.routes import load_routes
from stoker.routing.replay import RouteReplay
from stoker.trace.events import Phase
from stoker.trace.writer import TraceWriter

app = typer.Typer()
simulate.register(app)
trace.register(app)
runner = CliRunner()


@pytest.fixture
def npz(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    routes = np.stack([[rng.permutation(16)[:2] for _ in range(2500)] for _ in range(3)])
    np.savez(tmp_path / "r.npz", experts=routes)
    return str(tmp_path / "r.npz")


def rows(*arguments: str) -> list[dict]:
    result = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_hit_rates(npz: str) -> None:
    found = rows("simulate", npz, "--policy", "lru,min", "--slots", "4,50%", "--workers", "1")
    assert [(row["policy"], row["slots_per_layer"]) for row in found] == [
        ("lru", 4),
        ("lru", 8),
        ("min", 4),
        ("min", 8),
    ]
    assert found[0]["hit_rate"] == pytest.approx(4 / 16, abs=0.02)  # uniform routes: LRU hits as often as it holds
    assert found[1]["hit_rate"] == pytest.approx(8 / 16, abs=0.02)
    assert found[2]["gap_recovered"] == 1 and found[2]["hit_rate"] > found[0]["hit_rate"]
    assert found[0]["warm_up_tokens"] == 250


def test_partitions(npz: str) -> None:
    shared = rows("simulate", npz, "-p", "lru", "-s", "4", "--global", "--workers", "1")[0]
    assert shared["partition"] == "global" and shared["slots"] == 12
    dealt = rows("simulate", npz, "-p", "lru", "-s", "4", "--greedy", "--workers", "1")[0]
    assert dealt["partition"] == "greedy" and dealt["slots"] <= 12 and dealt["warm_up_tokens"] == 1250


def test_time_and_prefetch(npz: str) -> None:
    timed = ("simulate", npz, "-p", "lru", "-s", "8", "--record-ms", "0.5", "--jitter", "0")
    none, gate, table, markov = (
        rows(*timed, "--prefetch", how)[0] for how in ("none", "gate:0.9/2", "co-occurrence/2", "markov/1")
    )
    assert none["tokens"] == 1200 and none["prefetch"] == "none" and none["waste_ratio"] is None
    assert gate["stall_ms_per_token"] < none["stall_ms_per_token"]
    assert gate["on_time_ratio"] > 0.4 and gate["waste_ratio"] < 0.2
    assert table["waste_ratio"] > 0.3 and markov["on_time_ratio"] > 0
    assert rows(*timed, "--lanes", "4")[0]["stall_ms_per_token"] < none["stall_ms_per_token"]
    assert rows(*timed, "--greedy")[0]["partition"] == "greedy" and rows(*timed, "--global")[0]["partition"] == "global"
    slow = rows(*timed, "--layer-ms", "2,2")[0]
    assert slow["token_ms"]["p50"] > none["token_ms"]["p50"] + 8


def test_roster(npz: str) -> None:
    found = rows("simulate", npz, npz, "--roster", "8", "--window", "100", "--prefix", "0.2")
    assert len(found) == 4 and found[0]["mean"] == pytest.approx(0.5, abs=0.05) and found[0]["windows"] == 25


def test_synthetic_routes() -> None:
    routes = load_routes("synthetic:general:60")
    assert (routes.steps, routes.layers, routes.experts, routes.k) == (60, 48, 128, 8)
    assert load_routes("synthetic:general:60:0").streams[5].events() == routes.streams[5].events()
    assert load_routes("synthetic:general:60:1").streams[5].events() != routes.streams[5].events()
    for wrong in ("synthetic:general:many", "synthetic:prose", "synthetic:general:1:2:3"):
        with pytest.raises(OptionError):
            load_routes(wrong)


def test_tables_show_what_json_has(npz: str) -> None:
    result = runner.invoke(app, ["simulate", npz, "-p", "lru", "-s", "4", "--workers", "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "hit rate" in result.stdout and "lru" in result.stdout


def test_a_terminal_of_80_columns_cuts_nothing_off(npz: str) -> None:
    arguments = ["simulate", npz, "-p", "lru,decayed-lfu,min", "-s", "4", "--workers", "1"]
    result = runner.invoke(app, arguments, env={"COLUMNS": "80"})
    (row,) = rows("simulate", npz, "-p", "decayed-lfu", "-s", "4", "--workers", "1")
    line = next(line for line in result.stdout.splitlines() if "decayed-lfu" in line)
    assert f"{row['hit_rate']:.1%}" in line and f"{row['misses_per_token']:.1f}" in line and "…" not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", "belady"],
        ["-s", "many"],
        ["-s", "1"],
        ["-s", "1000"],
        ["-s", "200%"],
        ["--global", "--greedy"],
        ["--prefetch", "gate:0.9"],
        ["--record-ms", "1", "--prefetch", "psychic"],
        ["--record-ms", "1", "--prefetch", "gate:2"],
        ["--record-ms", "1", "--prefetch", "markov/0"],
        ["--record-ms", "1", "--layer-ms", "1"],
        ["--record-ms", "-1"],
        ["--record-ms", "1", "--prefetch", "markov", "--tokens", "2400"],
        ["--record-ms", "1", "-p", "min"],
        ["--roster", "1"],
        ["--roster", "8", "--record-ms", "1"],
        ["--roster", "8", "-p", "lru"],
        ["--lanes", "2"],
        ["--window", "100"],
        ["--record-ms", "1", "--greedy", "--tokens", "2300"],
        ["--record-ms", "0"],
        ["--tokens", "-5"],
        ["--warm-up", "-1"],
        ["--warm-up", "1000000"],
        ["-s", "0"],
        ["--roster", "8", "--tokens", "100"],
    ],
)
def test_refusals_name_the_option(npz: str, arguments: list[str]) -> None:
    result = runner.invoke(app, ["simulate", npz, "--workers", "1", *arguments])
    by_typer = result.exit_code == 2 and arguments[-2] in result.output
    assert isinstance(result.exception, OptionError) or by_typer, result.output
    if len(arguments) == 2 and arguments[0].startswith("--"):
        assert arguments[0] in str(result.exception) + result.output


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = runner.invoke(app, ["simulate", str(tmp_path / "gone.npz"), "--workers", "1"])
    assert isinstance(result.exception, StokerError) and "gone.npz" in str(result.exception)


def test_trace_summary(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", {"model": "toy"}) as writer:
        for step in range(10):
            writer.layer(step, 0, 0, [[step % 3, 7]], [[0.5, 0.5]], 1, 1, 500_000)
            writer.step(step, Phase.DECODE, 1, step * 2_000_000, step * 2_000_000 + 1_000_000, 2**30)
    figures = json.loads(runner.invoke(app, ["trace", "summary", str(tmp_path / "t"), "--json"]).stdout)
    assert figures["decode"]["hit_rate"] == 0.5 and figures["decode"]["tokens_per_s"] == pytest.approx(1000)
    assert figures["decode"]["stall_ms_per_token"] == pytest.approx(0.5)
    shown = runner.invoke(app, ["trace", "summary", str(tmp_path / "t")], env={"COLUMNS": "200"}).stdout
    assert "1,024.0 MiB" in shown and "n too small" in shown and "not enough data" in shown
    lines = shown.splitlines()
    assert lines[0].startswith("decode.steps") and "50.0%" in shown  # the figures first, what ran last
    assert any(line.startswith("about.model") for line in lines[-3:]) and "not set" not in shown


def test_warm_up_small_counts_and_shares_are_told(npz: str) -> None:
    arguments = ["simulate", npz, "--record-ms", "1", "-p", "lru", "-s", "8", "--tokens", "150"]
    (row,) = rows(*arguments)
    assert (row["tokens"], row["warm_up_tokens"]) == (120, 30)
    shown = " ".join(runner.invoke(app, arguments).stdout.split())
    assert "warm up tokens 30" in shown and "token ms p95 n too small" in shown
    assert f"ready rate {row['ready_rate']:.1%}" in shown


def test_a_table_for_a_file_is_not_cut_and_has_a_legend(npz: str) -> None:
    shown = runner.invoke(app, ["simulate", npz, "--roster", "8", "--greedy"], env={"COLUMNS": "60"}).stdout
    assert "mean with equal m" in shown and "…" not in shown
    assert "loads per token: experts read to fill the rosters" in shown and "worst: " in shown


@pytest.mark.parametrize(
    ("experts", "told"),
    [(np.full((1, 5, 2), 0.5), "whole numbers"), (np.zeros((1, 5, 2), int), "an expert twice")],
)
def test_arrays_that_are_no_routes_are_refused(tmp_path: Path, experts: np.ndarray, told: str) -> None:
    np.savez(tmp_path / "wrong.npz", experts=experts)
    for load in (load_routes, RouteReplay.open):
        with pytest.raises(TraceError, match=told):
            load(tmp_path / "wrong.npz")
