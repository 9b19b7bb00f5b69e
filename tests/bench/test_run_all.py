"""The one command that reproduces the table: what it plans, what it leaves out and why, going on after a kill."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


run_all, engine, table = script("run_all"), script("engine"), script("table")


def arguments(tmp_path: Path, *words: str) -> Any:
    return run_all.parse(["--layers", "1", "--store", str(tmp_path / "s"), "--gguf", str(tmp_path / "g"),
                          "--work", str(tmp_path / "run"), *words])  # fmt: skip


def test_without_a_peer_the_plan_is_stokers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_LLAMA_PYTHON", raising=False)
    parts = {part.name: part for part in run_all.plan(arguments(tmp_path))}
    assert list(parts) == ["store", "disk", "kernels", "step_overhead", "trace_overhead", "simulate", "engine"]
    assert "--gguf" not in parts["engine"].command
    assert sum(part.minutes for part in parts.values()) < 40


def test_a_peer_that_does_not_work_is_named_and_left_out(tmp_path: Path) -> None:
    asked = arguments(tmp_path, "--llama-python", sys.executable)
    assert "cannot import llama_cpp" in run_all.without_peer(asked)
    assert "gguf" not in [part.name for part in run_all.plan(asked)]


def test_models_that_do_not_fit_or_are_of_another_shape_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(run_all.psutil, "disk_usage", lambda _: usage)
    (store, *_, table_part) = run_all.plan(arguments(tmp_path))
    assert "GB are free" in store.why_not and store.why_not in table_part.why_not
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "stoker.json").write_text("{}")
    (tmp_path / "s" / "config.json").write_text('{"num_hidden_layers": 2}')
    assert "not of this shape" in run_all.plan(arguments(tmp_path))[0].why_not


def test_only_what_is_known_can_be_asked_for(tmp_path: Path) -> None:
    assert [part.name for part in run_all.plan(arguments(tmp_path, "--only", "engine"))] == ["store", "engine"]
    with pytest.raises(SystemExit, match="no such part: tables"):
        run_all.plan(arguments(tmp_path, "--only", "tables"))


def test_a_finished_part_is_not_run_again_but_a_failed_one_is(tmp_path: Path) -> None:
    asked = arguments(tmp_path)
    asked.work.mkdir()
    result = tmp_path / "r.json"
    good = run_all.Part("good", 1, (sys.executable, "-c", f"open({str(result)!r}, 'w').write('1')"), result)
    bad = run_all.Part("bad", 1, (sys.executable, "-c", "import sys; print('why'); sys.exit(3)"), result)
    assert run_all.kept(good, asked) is None
    assert run_all.run(good, asked) and "done" in run_all.kept(good, asked)
    assert not run_all.run(bad, asked) and run_all.kept(bad, asked) is None
    assert (asked.work / "bad.log").read_text() == "why\n"
    asked.again = True
    assert run_all.kept(good, asked) is None


def run_of(tok_s: float) -> dict[str, Any]:
    return {"prefill_tok_s": 10.0, "decode_tok_s": tok_s, "decode_bytes_per_token": 1e6, "cgroup_peak_bytes": 1 << 30,
            "rss_peak_bytes": 1 << 30, "wall_s": 1.0, "prefill_s": 2.0, "prefill_bytes": 6e9,
            "decode_tokens": 10, "stats": {"prefetch_wasted_bytes": 0}}  # fmt: skip


def test_the_table_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the third of six measurements: the next run makes the other four and joins all."""
    made: list[str] = []

    def measure(cell: Any, _: Any) -> dict[str, Any]:
        if len(made) == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt
        made.append(cell.name)
        return run_of(len(made))

    monkeypatch.setattr(engine, "measure", measure)
    monkeypatch.setattr(engine, "device_rate", lambda _, **__: 2e9)
    monkeypatch.setattr(engine, "block_device", lambda _: "vda")
    monkeypatch.setattr(engine.signal, "signal", lambda *_: None)
    words = ["engine.py", "STORE", "--repeats", "2", "--only", "stoker 4GiB", "stoker 8GiB", "stoker 3GiB"]
    words += ["--out", str(tmp_path / "o.json"), "--keep", str(tmp_path / "k.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyboardInterrupt):
        engine.main()
    assert not (tmp_path / "o.json").exists() and len(made) == 2
    engine.main()
    result = json.loads((tmp_path / "o.json").read_text())
    assert len(made) == 6 and not (tmp_path / "k.json").exists()
    assert {name: len(runs) for name, runs in result["runs"].items()} == {
        "stoker 4GiB": 2, "stoker 8GiB": 2, "stoker 3GiB": 2,
    }  # fmt: skip
    assert sorted(run["decode_tok_s"] for runs in result["runs"].values() for run in runs) == [1, 2, 3, 4, 5, 6]


def test_the_bound_is_the_larger_of_reading_and_computing() -> None:
    resident = run_of(8.0) | {"prefill_s": 4.0}
    reading = run_of(2.0) | {"decode_bytes_per_token": 9e8, "prefill_bytes": 10e9, "prefill_s": 6.25}
    reading["stats"] = {"prefetch_wasted_bytes": 1e9}  # of ten tokens
    computing = run_of(4.0) | {"decode_bytes_per_token": 1e6, "prefill_bytes": 1e9, "prefill_s": 5.0}
    runs = {
        "stoker resident": [resident],
        "stoker 4GiB": [reading | {"device_bytes_per_s": 2e9}],
        "stoker 8GiB": [computing | {"device_bytes_per_s": 2e9}],
        "llama.cpp mmap 4GiB": [run_of(1.0)],
    }
    shares = engine.shares_of_bound(runs)
    assert shares.keys() == {"stoker 4GiB", "stoker 8GiB"}
    assert shares["stoker 4GiB"]["decode"]["median"] == pytest.approx(0.4 * 2.0)
    assert shares["stoker 4GiB"]["prefill"]["median"] == pytest.approx(5.0 / 6.25)
    assert shares["stoker 8GiB"]["decode"]["median"] == pytest.approx(4.0 / 8.0)
    assert shares["stoker 8GiB"]["prefill"]["median"] == pytest.approx(4.0 / 5.0)


def test_other_settings_do_not_use_what_was_kept(tmp_path: Path) -> None:
    kept = engine.Measured(tmp_path / "k", {"quick": True}, [1.0], {"a": [run_of(1)]})
    kept.keep()
    assert engine.Measured.start(tmp_path / "k", {"quick": True}).runs == {"a": [run_of(1)]}
    assert engine.Measured.start(tmp_path / "k", {"quick": False}).runs == {}


def test_a_table_without_a_peer_has_stokers_rows_alone() -> None:
    spread = {"median": 2.0, "min": 1.0, "max": 3.0, "n": 2}
    names = ("prefill_tok_s", "decode_tok_s", "decode_bytes_per_token", "rss_peak_bytes")
    text = table.table(
        {
            "provenance": {"cores": 2, "cpu": "a processor", "isa": "AVX2", "commit": "abc"},
            "device_bytes_per_s": spread,
            "cells": {"stoker 4GiB": dict.fromkeys(names, spread)},
        }
    )
    rows = [line for line in text.splitlines() if line.startswith("| stoker") or line.startswith("| llama")]
    assert rows == ["| stoker, 4 GiB | 2.0 | 2.00 | 0 MB | 0.00 GiB |"]
