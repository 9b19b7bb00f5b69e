"""The profile's form, its interpolation at known points, and the cache that is keyed by machine."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.cli.probe import profile_for
from stoker.errors import OptionError
from stoker.plan import profile as profiles
from tests.plan.machines import machine


def test_a_profile_survives_json() -> None:
    before = machine()
    after = profiles.from_dict(json.loads(json.dumps(before.as_dict())))
    assert after == before


def test_another_version_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    for change in ({"version": 99}, {"warp": 1}):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(machine().as_dict() | change))
        with pytest.raises(OptionError, match="not a machine profile"):
            profiles.load(path)


def test_bursts_are_returned_where_they_were_measured_and_grow_between() -> None:
    one = machine(record_ms=2.0, latency_ms=0.5)
    for burst in one.bursts:
        first, last = one.burst_ms(burst.record_bytes, burst.reads)
        assert last == pytest.approx(burst.last_ms) and first == pytest.approx(burst.first_ms)
    sizes = [1 << 18, 500_000, 1 << 20, 1_500_000, 1 << 21, 1 << 22, 1 << 24]
    lasts = [one.burst_ms(size, 4)[1] for size in sizes]
    assert lasts == sorted(lasts) and lasts[-1] == pytest.approx(4 * one.burst_ms(1 << 22, 4)[1])
    counts = [one.burst_ms(1 << 20, reads)[1] for reads in (1, 2, 3, 5, 8, 16)]
    assert counts == sorted(counts) and counts[-1] == pytest.approx(2 * counts[-2])
    assert one.burst_ms(1 << 20, 0) == (0.0, 0.0)
    low, middle, high = (one.burst_ms(1 << 20, 4, quartile)[1] for quartile in ("low", "last", "high"))
    assert low < middle < high


def test_rates_between_measured_rows_lie_between_the_rates() -> None:
    rates = {1: 10.0, 8: 100.0, 32: 200.0}
    assert profiles.rate_at(rates, 8) == 100.0
    assert 100.0 < profiles.rate_at(rates, 16) < 200.0
    assert profiles.rate_at(rates, 500) == 200.0 and profiles.rate_at(rates, 0.5) == 10.0


def test_the_cache_is_by_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert profiles.cached(tmp_path, 2) is None
    kept = replace(machine(), machine=profiles.machine_key(tmp_path, 2))
    path = profiles.save(kept)
    assert path.is_relative_to(tmp_path / "cache" / "stoker")
    assert profiles.cached(tmp_path, 2) == kept
    assert profiles.cached(tmp_path, 3) is None, "other threads, another profile"
    path.write_text("{")
    assert profiles.cached(tmp_path, 2) is None, "a damaged file is measured anew"


def test_a_machine_key_names_processor_kernel_device_threads_and_version(tmp_path: Path) -> None:
    key = profiles.machine_key(tmp_path, 2)
    assert set(key) == {"cpu", "kernel", "device", "threads", "version"} and all(key.values())


def test_planning_needs_no_torch() -> None:
    modules = "profile, sizes, forecast, forecast_routing, planner, tuner"
    code = f"import sys; from stoker.plan import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--profile: there is no such file"):
        profiles.load(tmp_path / "gone.json")


def test_measuring_unasked_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`predict` takes half a minute the first time: it says why before it begins."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("stoker.bench.probe.measure", lambda *_, **__: machine())
    profile_for(tmp_path, 2)
    assert "no profile of this machine yet" in capsys.readouterr().err
    profile_for(tmp_path, 2, force=True)
    assert "no profile" not in capsys.readouterr().err
