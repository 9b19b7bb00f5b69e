"""Traces: what goes in comes out, without stoker too; parts, crashes, bounded memory, damage, cost of recording."""

import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from stoker.errors import TraceError
from stoker.trace.events import FORMAT, Phase, ReadClass
from stoker.trace.reader import Trace, is_trace
from stoker.trace.summary import summarise
from stoker.trace.writer import ROUTES_PER_PART, TraceWriter, parts_folder

LAYERS, EXPERTS, K = 3, 16, 4


def record(path: Path, steps: int, close: bool = True, seed: int = 0) -> list[tuple]:
    """Record `steps` decode steps with one prefill in front; returns the layer calls."""
    rng = np.random.default_rng(seed)
    calls = []
    writer = TraceWriter(path, {"model": "toy"})
    for step in range(steps):
        tokens = 5 if step == 0 else 1
        for layer in range(LAYERS):
            experts = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)])
            weights = rng.random((tokens, K), dtype=np.float32)
            writer.layer(step, layer, layer, experts, weights, 3, 1, 1000)
            calls.append((step, layer, experts, weights))
        writer.step(step, Phase.DECODE if step else Phase.PREFILL, tokens, step * 10**6, (step + 1) * 10**6, 7)
    if close:
        writer.close()
    return calls


def test_every_route_comes_back_and_needs_no_stoker(tmp_path: Path) -> None:
    calls = record(tmp_path / "t", 50)
    trace = Trace(tmp_path / "t")
    assert trace.finished and trace.about == {"model": "toy"}
    assert len(trace.column("layer.step")) == len(calls)
    for row, (step, layer, experts, weights) in enumerate(calls):
        got_experts, got_weights = trace.route(row)
        np.testing.assert_array_equal(got_experts, experts)
        np.testing.assert_array_equal(got_weights, weights)
        assert (trace.column("layer.step")[row], trace.column("layer.layer")[row]) == (step, layer)
    with safe_open(tmp_path / "t", "numpy") as file:
        assert file.metadata()["format"] == FORMAT and file.metadata()["version"] == "1"
        assert json.loads(file.metadata()["about"]) == {"model": "toy"}
    raw = load_file(tmp_path / "t")
    start, count = raw["layer.route_start"][-1], raw["layer.tokens"][-1] * raw["layer.k"][-1]
    np.testing.assert_array_equal(raw["route.experts"][start : start + count], calls[-1][2].ravel())


def test_parts_join_to_the_same_trace_and_survive_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "whole", 60)
    monkeypatch.setattr("stoker.trace.writer.ROW_INTEGERS_PER_PART", 300)
    record(tmp_path / "crashed", 60, close=False)
    assert len(list(parts_folder(tmp_path / "crashed").iterdir())) > 3
    crashed = Trace(tmp_path / "crashed")
    assert not crashed.finished and is_trace(tmp_path / "crashed")
    record(tmp_path / "parts", 60)
    assert not parts_folder(tmp_path / "parts").exists()
    whole, parts = Trace(tmp_path / "whole"), Trace(tmp_path / "parts")
    rows = len(crashed.column("layer.step"))
    assert rows > 100
    for name in ("route.experts", "route.weights", "layer.route_start", "layer.hits", "step.end_ns"):
        np.testing.assert_array_equal(whole.column(name), parts.column(name))
        seen = crashed.column(name)
        np.testing.assert_array_equal(whole.column(name)[: len(seen)], seen)


def test_a_prefill_larger_than_a_part(tmp_path: Path) -> None:
    tokens = ROUTES_PER_PART // K + 1000
    experts = np.random.default_rng(0).integers(0, EXPERTS, (tokens, K))
    with TraceWriter(tmp_path / "t") as writer:
        for step in range(2):
            writer.layer(step, 0, 0, experts + step, np.ones((tokens, K)), 1, 0, 0)
            writer.step(step, Phase.PREFILL, tokens, 0, 1, 0)
    trace = Trace(tmp_path / "t")
    for step in range(2):
        np.testing.assert_array_equal(trace.route(step)[0], experts + step)


@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 2, 4)])
@pytest.mark.parametrize("tokens", [(1, 1, 1), (5, 1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_any_kind_come_back(
    tmp_path: Path, widths: tuple[int, ...], tokens: tuple[int, ...], dtype: str
) -> None:
    """As the engine gives them: int64 choices, weights that may be half as wide or carry a gradient."""
    import torch

    random = torch.Generator().manual_seed(0)
    given = []
    with TraceWriter(tmp_path / "t") as writer:
        for step, (count, k) in enumerate(zip(tokens, widths, strict=True)):
            experts = torch.randint(0, 16, (count, k), generator=random)
            weights = torch.rand(count, k, generator=random).to(getattr(torch, dtype)).requires_grad_(step == 1)
            writer.layer(step, 0, 0, experts, weights, 1, 0, 0)
            writer.step(step, Phase.DECODE, count, 0, 1, 0)
            given.append((experts.numpy(), weights.detach().float().numpy()))
    trace = Trace(tmp_path / "t")
    assert trace.column("layer.tokens").tolist() == list(tokens) and trace.column("layer.k").tolist() == list(widths)
    for row, (experts, weights) in enumerate(given):
        np.testing.assert_array_equal(trace.route(row)[0], experts)
        np.testing.assert_array_equal(trace.route(row)[1], weights)


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    experts, weights = np.arange(8)[None], np.ones((1, 8), np.float32)
    tracemalloc.start()
    with TraceWriter(tmp_path / "t") as writer:
        peaks = []
        for step in range(4000):
            for layer in range(24):
                writer.layer(step, layer, layer, experts, weights, 8, 0, 0)
            writer.step(step, Phase.DECODE, 1, 0, 1, 0)
            if step in (1000, 3999):
                peaks.append(tracemalloc.get_traced_memory()[1])
        size = sum(part.stat().st_size for part in parts_folder(tmp_path / "t").iterdir())
    tracemalloc.stop()
    assert size > 1.5 * peaks[0]  # the run was larger than what was ever held
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-100], lambda raw: b"\0" * 40, lambda raw: raw.replace(b"stoker-trace", b"other--trace")],
)
def test_damage_is_named(tmp_path: Path, damage) -> None:
    record(tmp_path / "t", 5)
    raw = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(damage(raw))
    with pytest.raises(TraceError, match="t"):
        trace = Trace(tmp_path / "t")
        for name in ("step.step", "layer.hits", "route.weights", "evict.time_ns", "read.bytes", "route.experts"):
            trace.column(name)


def test_another_version_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "t", 5)
    raw = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(
        raw.replace(b'"version":"1"', b'"version":"9"').replace(b'"version": "1"', b'"version": "9"')
    )
    with pytest.raises(TraceError, match="version"):
        Trace(tmp_path / "t")


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(TraceError, match="exists"):
        TraceWriter(tmp_path / "t")
    assert (tmp_path / "t").read_text() == "mine"


def test_a_run_that_is_killed_leaves_all_but_the_last_seconds(tmp_path: Path) -> None:
    """A process records steps of one second and dies without a chance to close."""
    program = f"""
import os
from pathlib import Path
from stoker.trace.events import Phase
from stoker.trace.writer import TraceWriter
writer = TraceWriter(Path({str(tmp_path / "t")!r}), {{"model": "toy"}})
for step in range(22):
    writer.layer(step, 0, 0, [[step % 8, 9]], [[0.5, 0.5]], 1, 1, 0)
    writer.step(step, Phase.DECODE, 1, step * 10**9, (step + 1) * 10**9, 0)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    trace = Trace(tmp_path / "t")
    steps = trace.column("step.step")
    assert not trace.finished and 18 <= len(steps) < 22 and steps.tolist() == list(range(len(steps)))
    np.testing.assert_array_equal(trace.route(15)[0], [[15 % 8, 9]])
    with pytest.raises(TraceError, match="did not finish"):  # and nobody overwrites it
        TraceWriter(tmp_path / "t")
    assert len(Trace(tmp_path / "t").column("step.step")) == len(steps)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_an_error_that_names_the_trace(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        writer = TraceWriter(tmp_path / "t")
        for step in range(4000):
            writer.layer(step, 0, 0, [list(range(8))], [[0.1] * 8], 8, 0, 0)
        with pytest.raises(TraceError, match="t: cannot be written"):
            writer.step(0, Phase.DECODE, 1, 0, 10**10, 0)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_summary_of_a_run_whose_figures_are_known(tmp_path: Path) -> None:
    ms = 10**6
    with TraceWriter(tmp_path / "t") as writer:
        for step in range(400):
            writer.layer(
                step, 0, 0, [[step % 2, 2]], [[0.5, 0.5]], 1 if step % 4 == 0 else 2, int(step % 4 == 0), 3 * ms
            )
            writer.step(step, Phase.DECODE, 1, step * 10 * ms, step * 10 * ms + 8 * ms, 1000 + step)
        now = time.monotonic_ns()
        writer.read(0, 1, ReadClass.DEMAND, 0, 1 * ms, 3 * ms, 4096)
        writer.read(0, 1, ReadClass.DEMAND, 0, 2 * ms, 5 * ms, 4096)
        writer.read(0, 7, ReadClass.PREFETCH, 0, 5 * ms, 6 * ms, 1000)  # evicted before its use: waste
        writer.evict(0, 7)
        writer.read(0, 9, ReadClass.PREFETCH, now, now, time.monotonic_ns(), 2000)
        writer.read(0, 8, ReadClass.LATE, 0, 6 * ms, 7 * ms, 1000)
        writer.read(0, 5, ReadClass.CANCELLED, 0, 0, 0, 0)
        writer.layer(400, 0, 0, [[7, 9]], [[0.5, 0.5]], 2, 0, 0)
    figures = summarise(Trace(tmp_path / "t"))
    decode = figures["decode"]
    assert decode["tokens"] == 400
    assert decode["tokens_per_s"] == pytest.approx(125)
    assert decode["hit_rate"] == pytest.approx(700 / 800)
    assert decode["full_event_hit_rate"] == pytest.approx(0.75)
    assert decode["stall_ms_per_token"] == pytest.approx(3)
    assert decode["step_ms"]["p95"] == 8 and decode["step_ms"]["p99"] is None  # 400 samples: p95 yes, p99 no
    assert decode["between_steps_ms"]["p50"] == 10
    assert figures["reads"]["demand"]["bytes"] == 8192 and figures["reads"]["cancelled"]["count"] == 1
    assert figures["prefetch"] == {
        "landed_early": 2,
        "late": 1,
        "used": 2,
        "on_time_ratio": 0.5,
        "waste_ratio": 0.25,
        "waste_of_all_reads": 1000 / 12192,
    }
    assert figures["working_set"]["mean"] == 3 and figures["peak_rss_bytes"] == 1399


def test_tensors_of_every_kind_are_taken(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.tensor([[0.25, 0.75]])
    kinds = [weights, weights.bfloat16(), weights.clone().requires_grad_(), weights.half()]
    with TraceWriter(tmp_path / "t") as writer:
        for step, kind in enumerate(kinds):
            writer.layer(step, 0, 0, torch.tensor([[3, 1]]), kind, 1, 1, 0)
    trace = Trace(tmp_path / "t")
    for step in range(len(kinds)):
        experts, got = trace.route(step)
        assert experts.tolist() == [[3, 1]] and got.tolist() == [[0.25, 0.75]]


def test_recording_costs_microseconds(tmp_path: Path) -> None:
    """48 layers, their reads and the step: under 1.2 ms a token, 2% of a 60 ms token."""
    experts, weights = np.arange(8)[None], np.ones((1, 8), np.float32)
    with TraceWriter(tmp_path / "t") as writer:
        best = float("inf")
        for step in range(300):
            start = time.perf_counter()
            for layer in range(48):
                writer.layer(step, layer, layer, experts, weights, 6, 2, 0)
                writer.read(layer, 1, ReadClass.DEMAND, 0, 1, 2, 4096)
                writer.read(layer, 2, ReadClass.DEMAND, 0, 1, 2, 4096)
                writer.evict(layer, 3)
            writer.step(step, Phase.DECODE, 1, 0, 1, 0)
            best = min(best, time.perf_counter() - start)
    assert best < 1.2e-3


def test_an_idle_run_is_saved_without_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.trace.writer.IDLE_S", 0.02)
    writer = TraceWriter(tmp_path / "t")
    with pytest.raises(TraceError, match="nothing saved yet"):
        Trace(tmp_path / "t.parts")
    for step in range(5):
        writer.layer(step, 0, 0, [[step, 9]], [[0.5, 0.5]], 1, 1, 0)
        writer.step(step, Phase.DECODE, 1, step * 10**6, (step + 1) * 10**6, 0)
    wait_for(lambda: is_trace(tmp_path / "t"))
    assert len(Trace(tmp_path / "t").column("step.step")) == 5
    writer.layer(5, 0, 0, [[5, 9]], [[0.5, 0.5]], 1, 1, 0)  # and what comes later follows
    writer.step(5, Phase.DECODE, 1, 5 * 10**6, 6 * 10**6, 0)
    wait_for(lambda: len(Trace(tmp_path / "t").column("step.step")) == 6)
    writer.close()
    trace = Trace(tmp_path / "t")
    assert trace.finished and [trace.route(row)[0].tolist() for row in range(6)] == [[[step, 9]] for step in range(6)]


def test_saving_beside_calls_loses_none(tmp_path: Path) -> None:
    """The thread that saves packs while another records."""
    writer = TraceWriter(tmp_path / "t")
    ended = threading.Event()

    def save() -> None:
        while not ended.is_set():
            writer._save_what_waits()

    saver = threading.Thread(target=save)
    saver.start()
    for step in range(2000):
        writer.layer(step, 0, 0, [[step % 8, 9]], [[0.5, 0.5]], 1, 1, 0)
        writer.read(0, step % 8, ReadClass.DEMAND, 0, 1, 2, 10)
        writer.step(step, Phase.DECODE, 1, step, step + 1, 0)
    ended.set()
    saver.join()
    writer.close()
    trace = Trace(tmp_path / "t")
    assert trace.column("layer.step").tolist() == trace.column("read.step").tolist() == list(range(2000))
    assert all(trace.route(row)[0].tolist() == [[row % 8, 9]] for row in range(0, 2000, 7))


def test_a_folder_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", "..", "/"):
        assert not is_trace(Path(name))
        with pytest.raises(TraceError, match="a folder"):
            Trace(name)


def test_cancelled_reads_are_counted_and_have_no_time(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.read(0, 5, ReadClass.CANCELLED, 10**12, 0, 10**12 + 5, 0)
    assert summarise(Trace(tmp_path / "t"))["reads"]["cancelled"] == {"count": 1}


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)
