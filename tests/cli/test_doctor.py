"""`stoker doctor`: real checks on this machine, and that each of them notices what is wrong."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.checks import disk, kernels, machine
from stoker.cli.main import build_app
from stoker.errors import BudgetError, StokerError
from stoker.native import kernels as native_kernels
from stoker.runtime.budget import GIB, MemoryLimit
from tests.cli.conftest import stoker


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SECONDS_PER_DEPTH", 0.05)
    monkeypatch.setattr(disk, "PROBE_BYTES", 64 << 20)


def doctor(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), ["doctor", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_everything_is_looked_at(tmp_path: Path) -> None:
    code, out = doctor(tmp_path, "--json")
    report = json.loads(out)
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        "versions", "memory", "limits", "processor", "kernels", "huge pages", "io_uring", "disk"
    ]  # fmt: skip
    assert code == (1 if report["verdict"] == "FAIL" else 0)
    assert all(check["finding"] for check in checks.values())
    assert all(check["remedy"] for check in checks.values() if check["verdict"] != "PASS")
    assert checks["kernels"]["verdict"] == "PASS"
    errors = checks["kernels"]["data"]["relative_l2"]
    assert native_kernels.isa() in errors and "portable" in errors
    assert all(0 < error < 0.01 for error in errors.values())
    rates = checks["disk"]["data"]["bytes_per_second"]
    assert set(rates) == {"1", "2", "4", "8"} and all(rate > 1e6 for rate in rates.values())
    assert not list(tmp_path.iterdir()), "the test file is gone"


def test_plain_words(tmp_path: Path) -> None:
    code, out = doctor(tmp_path)
    assert code == 0
    assert out.splitlines()[0].startswith("PASS  versions")
    assert "this machine" in out.splitlines()[-1] or "stoker runs here" in out.splitlines()[-1]


def test_a_stores_own_records_are_read(store: Path) -> None:
    (check,) = disk.check_disk(store)
    assert check.verdict in ("PASS", "WARN") and "records of the store" in check.finding
    assert check.data["record_bytes"] == os.path.getsize(next(store.glob("experts-*"))) // 16 // 4096 * 4096


def test_a_damaged_store_fails(store: Path, tmp_path: Path) -> None:
    for file in store.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = next(tmp_path.glob("experts-*"))
    shard.write_bytes(shard.read_bytes()[:-8192])
    code, out = doctor(tmp_path)
    assert code == 1 and "FAIL  disk" in out and "cannot run properly" in out


def test_wrong_kernels_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = native_kernels.matmul
    chosen = native_kernels.isa()
    monkeypatch.setattr(native_kernels, "ISAS", (chosen, "portable"))
    with monkeypatch.context() as patch:
        patch.setattr(native_kernels, "matmul", lambda m, x: real(m, x) * 1.02)
        (check,) = kernels.check_kernels()
        assert check.verdict == "FAIL" and "relative error" in check.finding
    with monkeypatch.context() as patch:  # right on average, but a row depends on its batch
        patch.setattr(native_kernels, "matmul", lambda m, x: real(m, x) * (1 + 1e-6 * len(x)))
        assert kernels.check_kernels()[0].verdict == "FAIL"
    with monkeypatch.context() as patch:
        forward = native_kernels.Experts.forward

        def swapped(self: object, addresses: object, *rest: object) -> None:
            forward(self, addresses.flip(0).contiguous(), *rest)  # type: ignore[arg-type,attr-defined]

        patch.setattr(native_kernels.Experts, "forward", swapped)
        assert kernels.check_kernels()[0].verdict == "FAIL"
    assert kernels.check_kernels()[0].verdict == "PASS"
    assert native_kernels.isa() == chosen, "the instruction set in use is put back"


def test_an_unknown_instruction_set_fails(tmp_path: Path) -> None:
    done = stoker("doctor", tmp_path, STOKER_ISA="sse9")
    assert done.returncode == 1 and "FAIL  processor" in done.stdout and "STOKER_ISA" in done.stdout
    assert "Traceback" not in done.stderr


def test_memory_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(available: int) -> list[MemoryLimit]:
        return [MemoryLimit("cgroup v2 /small", "/sys/fs/cgroup/small/memory.max", 4 * GIB, available, GIB // 4)]

    monkeypatch.setattr(machine, "memory_limits", lambda: limit(GIB))
    monkeypatch.setattr(machine, "auto_budget", lambda: GIB)
    (check,) = machine.memory()
    assert check.verdict == "WARN" and "cgroup v2 /small" in check.finding and "1.00 GiB" in check.finding

    def nothing() -> int:
        raise BudgetError("no memory left", remedy="close other programs")

    monkeypatch.setattr(machine, "auto_budget", nothing)
    (check,) = machine.memory()
    assert check.verdict == "FAIL" and check.remedy == "close other programs"


def test_io_uring_that_is_forbidden_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise StokerError("the read queue could not start with backend 'io_uring': Operation not permitted")

    monkeypatch.setattr("stoker.native.io.ReadQueue", refuse)
    (check,) = machine.read_backend()
    assert check.verdict == "WARN" and "not permitted" in check.finding and "threads" in check.remedy


def test_a_disk_without_room_or_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PROBE_BYTES", 1 << 60)
    (check,) = disk.check_disk(tmp_path)
    assert check.verdict == "WARN" and "not measured" in check.finding
    monkeypatch.setattr(disk, "PROBE_BYTES", 64 << 20)
    monkeypatch.setattr(disk, "drop_cache", lambda path: os.truncate(path, 4096))
    (check,) = disk.check_disk(tmp_path)
    assert check.verdict == "FAIL" and "ends inside the read" in check.finding
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(build_app(), ["doctor", str(tmp_path / "nothing")])
    assert done.exit_code == 2 and "not a directory" in done.stderr
