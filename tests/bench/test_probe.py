"""The probe measures what is there: bounded by physics, repeatable, kept, and gone from the disk afterwards."""

import json
import time
from pathlib import Path

import pytest

from stoker.bench import probe_costs, probe_disk, probe_kernels, probe_memory, probe_waits
from stoker.plan import profile as profiles
from stoker.plan.profile import Sustained
from tests.cli.conftest import stoker


def test_the_disk_is_measured_on_a_scratch_file_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_disk, "SCRATCH_BYTES", 64 << 20)
    with probe_disk.weight_files(tmp_path) as files:
        found = probe_disk.measure(files, 1.5)
    assert not list(tmp_path.iterdir())
    assert {(b.record_bytes, b.reads) for b in found.bursts} == {
        (size, reads) for size in probe_disk.RECORD_BYTES for reads in probe_disk.BURSTS
    }
    for burst in found.bursts:
        assert 0 < burst.first_ms <= burst.last_ms and burst.low_ms <= burst.last_ms <= burst.high_ms
    largest = max(probe_disk.RECORD_BYTES)
    one, eight = (next(b for b in found.bursts if (b.record_bytes, b.reads) == (largest, n)) for n in (1, 8))
    assert eight.last_ms > 1.5 * one.last_ms, "eight reads of 8 MB are not as fast as one"
    assert all(1e6 < s.bytes_s < 1e12 for s in found.sustained) and found.buffered_bytes_s > 1e6


def test_weight_files_are_read_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_disk, "WEIGHTS_BYTES", 32 << 20)
    (tmp_path / "model.safetensors").write_bytes(bytes(40 << 20))
    with probe_disk.weight_files(tmp_path) as files:
        assert files == [tmp_path / "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_kernels_stay_below_memory_and_above_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_kernels, "WORKING_SET_BYTES", 96 << 20)
    from stoker.native import kernels

    before = kernels.threads()
    found = probe_kernels.measure(1)
    assert kernels.threads() == before
    assert found.matvec_bytes_s < 2 * found.read_bytes_s[1], "weights cannot be multiplied faster than they are read"
    assert found.expert_macs_s[32] > found.expert_macs_s[1] and found.dense_macs_s[32] > found.dense_macs_s[1]
    assert all(rate > 0 for rate in found.attention_macs_s.values())


def test_the_probe_measures_what_the_engine_may_choose() -> None:
    assert set(probe_disk.CHOICES) & set(probe_disk.DEPTHS) >= {3, 4, 8}


def test_the_depth_is_the_least_that_nearly_reaches_the_best_rate() -> None:
    def rates(*by_depth: float) -> list[Sustained]:
        return [Sustained(1 << 20, d, rate, 1.0, 1.0) for d, rate in zip((1, 3, 4, 8), by_depth, strict=True)]

    assert probe_disk.engines_depth(rates(2.0, 1.9, 2.0, 2.0)) == 3
    assert probe_disk.engines_depth(rates(1.0, 1.5, 1.9, 2.0)) == 4


def test_progress_of_reads_beside_computing_by_hand() -> None:
    assert probe_waits.progress_of(2.0, 2.0, 1.0) == 1, "not disturbed"
    assert probe_waits.progress_of(2.0, 3.0, 1.0) == 0, "began when the computing was over"
    assert probe_waits.progress_of(2.0, 2.5, 1.0) == pytest.approx(0.5)
    assert probe_waits.progress_of(1.0, 4.0, 8.0) == pytest.approx(0.25), "over while the computing went on"


def test_a_rehearsed_layer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_disk, "SCRATCH_BYTES", 64 << 20)
    with probe_disk.weight_files(tmp_path) as files:
        found = probe_waits.measure(files, 1, 0.3, depth=2)
    assert 0 <= found.progress <= 1 and 0 <= found.holds < 1
    assert 1e7 < found.alone_bytes_s < 1e12 and 1e7 < found.dense_bytes_s < 1e12


def test_first_use_counts_what_had_to_be_found_by_hand() -> None:
    parts = [(0.0, 0.1), (0.1, 1.1), (1.1, 2.1)]  # one part that was at hand, two that had to be found
    products = [(0.0, 0.05), (0.05, 0.1), (0.1, 0.35), (0.35, 0.6), (0.6, 0.85), (0.85, 1.1), (1.1, 2.1)]
    alone = [(3.0, 3.05), (3.05, 3.45), (3.45, 3.95)]
    found = probe_memory.first_use(parts, 100, products, usual_s=0.05, alone=alone)
    assert found.bytes_s == pytest.approx(100.0)
    assert found.holds == pytest.approx(1 - 5 * 0.05 / 2.0), "five products in two seconds, where forty would be usual"
    assert found.alone_bytes_s == pytest.approx(250.0), "the median part, with nothing beside it"


def test_first_use_of_memory_takes_time_and_at_most_all_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_memory, "FRESH_BYTES", 128 << 20)
    found = probe_memory.measure(1)
    assert 1e7 < found.bytes_s <= found.alone_bytes_s < 1e12 and 0 <= found.holds <= 1


@pytest.mark.slow
def test_fixed_costs_are_small_and_transformers_own_attention_costs_more() -> None:
    costs = probe_costs.measure(1)
    assert 0 < costs.layer_ms < 20 and costs.plain_layer_ms > costs.layer_ms
    assert costs.step_ms >= 0 and costs.miss_ms >= 0 and costs.process_bytes > 100 << 20


@pytest.mark.slow
def test_the_command_keeps_what_it_measured(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = time.monotonic()
    first = stoker("probe", tmp_path, "--threads", 1, "--json", **cache)
    assert first.returncode == 0, first.stderr
    took_s = time.monotonic() - started
    started = time.monotonic()
    again = stoker("probe", tmp_path, "--threads", 1, "--json", **cache)
    assert json.loads(again.stdout) == json.loads(first.stdout) and "measuring" not in again.stderr
    assert time.monotonic() - started < took_s / 3
    assert profiles.from_dict(json.loads(first.stdout)).machine["threads"] == "1"
    forced = stoker("probe", tmp_path, "--threads", 1, "--force", **cache)
    assert "measuring" in forced.stderr and "kept in" in forced.stdout
