"""Budgets: parsing, and limits read from made-up /proc and /sys trees of both cgroup versions."""

from pathlib import Path

import pytest

from stoker.errors import BudgetError, OptionError
from stoker.runtime import budget
from stoker.runtime.budget import GIB, MIB

GOOD = {
    "3GiB": 3 * GIB, "3gib": 3 * GIB, "4G": 4 * GIB, "4g": 4 * GIB, "500MB": 500_000_000, "500 MB": 500_000_000,
    " 1.5GiB ": 3 * GIB // 2, ".5G": GIB // 2, "2T": 2 << 40, "1TB": 10**12, "64k": 65536, "100KB": 100_000,
    "2097152": 2 * MIB, "12345678B": 12_345_678, "16KiB": 16384, "7MiB": 7 * MIB, "1GB": 10**9,
}  # fmt: skip


@pytest.mark.parametrize(("text", "nbytes"), GOOD.items())
def test_sizes(text: str, nbytes: int) -> None:
    assert budget.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "3 GiB GiB", "3XB", "-3GiB", "1e9", "3,5GiB", "0", "0GiB", "auto", "4", "١GiB"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        budget.parse_bytes(text, option="--memory")
    assert "--memory" in str(caught.value) and "3GiB" in str(caught.value) and caught.value.exit_code == 2


def test_numbers_are_bytes() -> None:
    assert budget.parse_bytes(5) == 5
    for bad in (0, -1, True, 1.5, None):
        with pytest.raises(OptionError):
            budget.parse_bytes(bad)  # type: ignore[arg-type]


def test_a_forgotten_unit_is_named() -> None:
    with pytest.raises(OptionError, match="write 4GiB"):
        budget.parse_bytes("4")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * MIB, "1.50 GiB"), (640 * MIB, "640 MiB"),
     (1023 * MIB + 900 * 1024, "1.00 GiB"), (12 * GIB + GIB // 4, "12.2 GiB"), (1 << 50, "1024 TiB"),
     (-MIB, "-1.00 MiB")],
)  # fmt: skip
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert budget.format_bytes(nbytes) == text


def machine(root: Path, total: int = 16 * GIB, available: int = 10 * GIB, rss: int = 0) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"
    )
    (root / "proc/self/status").write_text(f"Name:\tx\nVmRSS:\t{rss // 1024} kB\n")
    return root


def mount(root: Path, *lines: str) -> None:
    (root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")


def group(root: Path, path: str, **files: object) -> None:
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 32 0:31 / /sys/fs/cgroup/memory rw shared:13 - cgroup cgroup rw,memory"
V1_CPU = "36 32 0:32 / /sys/fs/cgroup/cpu,cpuacct rw shared:14 - cgroup cgroup rw,cpu,cpuacct"


def test_the_machine_alone(tmp_path: Path) -> None:
    root = machine(tmp_path, 16 * GIB, 10 * GIB)
    (limit,) = budget.memory_limits(root)
    assert (limit.limit_bytes, limit.available_bytes) == (16 * GIB, 10 * GIB)
    assert budget.auto_budget(root) == 10 * GIB - int(0.15 * 16 * GIB)


def test_what_the_process_holds_already_is_part_of_its_budget(tmp_path: Path) -> None:
    root = machine(tmp_path, 16 * GIB, 10 * GIB, rss=GIB)
    assert budget.auto_budget(root) == 11 * GIB - int(0.15 * 16 * GIB)


def test_a_small_machine_keeps_a_gibibyte(tmp_path: Path) -> None:
    assert budget.auto_budget(machine(tmp_path, 4 * GIB, 3 * GIB)) == 2 * GIB


def test_v2_limits_are_found_up_the_hierarchy(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, V2)
    (root / "proc/self/cgroup").write_text("0::/user.slice/app.scope\n")
    group(root, "sys/fs/cgroup/user.slice/app.scope", memory__max="max", memory__high="max", memory__current=GIB)
    group(root, "sys/fs/cgroup/user.slice", memory__max=6 * GIB, memory__high=4 * GIB, memory__current=2 * GIB,
          memory__stat=f"anon 5\nfile {GIB}\nactive_file {GIB // 4}\ninactive_file {GIB // 4}\nshmem 0")  # fmt: skip
    machine_limit, slice_limit = budget.memory_limits(root)
    assert slice_limit.where.endswith("user.slice/memory.high") and slice_limit.name == "cgroup v2 /user.slice"
    assert slice_limit.limit_bytes == 4 * GIB
    assert slice_limit.available_bytes == 4 * GIB - 2 * GIB + GIB // 2
    assert budget.auto_budget(root) == 5 * GIB // 2 - int(0.05 * 4 * GIB)
    assert machine_limit.limit_bytes == 16 * GIB


def test_v1_limits_and_its_way_to_say_unlimited(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, V1_CPU, V1)
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/other\n4:memory:/a/b\n0::/\n")
    unlimited = 9223372036854771712
    group(root, "sys/fs/cgroup/memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=9 * GIB)
    group(root, "sys/fs/cgroup/memory/a", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB,
          memory__stat="cache 1\nactive_file 7\ninactive_file 7\ntotal_active_file 0\n"
          f"total_inactive_file {GIB}")  # fmt: skip
    group(root, "sys/fs/cgroup/memory/a/b", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=GIB)
    limits = budget.memory_limits(root)
    assert [limit.name for limit in limits[1:]] == ["cgroup v1 /a"]
    assert limits[1].available_bytes == 3 * GIB
    assert budget.auto_budget(root) == 3 * GIB - int(0.05 * 3 * GIB)


def test_a_container_sees_its_limit_at_the_mount_point(tmp_path: Path) -> None:
    """Without a cgroup namespace the path names the host's hierarchy; the mount shows the container's part of it."""
    root = machine(tmp_path)
    mount(root, V1.replace(" / /sys", " /docker/abc /sys"))
    (root / "proc/self/cgroup").write_text("4:memory:/docker/abc\n")
    group(root, "sys/fs/cgroup/memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    assert [limit.limit_bytes for limit in budget.memory_limits(root)] == [16 * GIB, 2 * GIB]
    (root / "proc/self/cgroup").write_text("4:memory:/../../elsewhere\n")
    assert [limit.limit_bytes for limit in budget.memory_limits(root)] == [16 * GIB, 2 * GIB]


def test_a_hybrid_machine_counts_both_versions(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, V1, V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "))
    (root / "proc/self/cgroup").write_text("4:memory:/a\n0::/a\n")
    group(root, "sys/fs/cgroup/memory/a", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=0)
    group(root, "sys/fs/cgroup/unified/a")
    assert [limit.limit_bytes for limit in budget.memory_limits(root)] == [16 * GIB, 3 * GIB]


def test_nothing_left_is_said_with_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, V2)
    (root / "proc/self/cgroup").write_text("0::/full\n")
    group(root, "sys/fs/cgroup/full", memory__max=GIB, memory__current=GIB)
    with pytest.raises(BudgetError, match="cgroup v2 /full") as caught:
        budget.auto_budget(root)
    assert caught.value.exit_code == 3 and "1.00 GiB" in str(caught.value)


def test_resolve(tmp_path: Path) -> None:
    root = machine(tmp_path, 16 * GIB, 10 * GIB)
    assert budget.resolve("auto", root) == budget.resolve(" AUTO ", root) == budget.auto_budget(root)
    assert budget.resolve("12GiB", root) == 12 * GIB  # more than is free now: the user may know better
    assert budget.resolve(7 * GIB, root) == 7 * GIB
    with pytest.raises(BudgetError, match="larger than the machine's memory"):
        budget.resolve("17GiB", root)


def test_an_unreadable_machine_asks_for_a_number(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="cannot be read"):
        budget.auto_budget(tmp_path)
    assert budget.resolve("3GiB", tmp_path) == 3 * GIB


def test_this_machine() -> None:
    import psutil

    limits = budget.memory_limits()
    assert limits[0].limit_bytes == psutil.virtual_memory().total
    assert 0 < budget.auto_budget() < limits[0].limit_bytes
    for measure in (budget.resident_bytes, budget.resident_bytes_now):
        assert measure() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def cpus(monkeypatch: pytest.MonkeyPatch, root: Path, cores: list[tuple[int, int]]) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(len(cores))))
    for cpu, (package, core) in enumerate(cores):
        group(root, f"sys/devices/system/cpu/cpu{cpu}/topology", core_id=core, physical_package_id=package)


def test_threads_are_physical_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus(monkeypatch, machine(tmp_path), [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1), (1, 0), (1, 1)])
    assert budget.default_threads(tmp_path) == 4


def test_threads_respect_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path)
    cpus(monkeypatch, root, [(0, core) for core in range(8)])
    mount(root, V2)
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    group(root, "sys/fs/cgroup/a/b", cpu__max="max 100000")
    group(root, "sys/fs/cgroup/a", cpu__max="250000 100000")
    assert budget.default_threads(root) == 3
    mount(root, V1_CPU)
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/a\n")
    group(root, "sys/fs/cgroup/cpu,cpuacct/a", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert budget.default_threads(root) == 1
    group(root, "sys/fs/cgroup/cpu,cpuacct/a", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert budget.default_threads(root) == 8


def test_threads_without_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3})
    assert budget.default_threads(tmp_path) == 2
