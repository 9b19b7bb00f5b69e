"""kill -9 at any moment of packing, then the same command again: the same bytes as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_tiny

from stoker.checkpoint.source import open_checkpoint
from stoker.errors import StoreError
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, PackPlan, plan_pack
from stoker.store.reader import open_store

SHARD_BYTES = 30_000

# Serves requests "DST WHERE N": a fork packs SRC into DST and kills itself at the N-th call of one of the writer's
# functions.
KILLER = """
import os, signal, sys
import torch
import stoker.store.writer as writer
import stoker.store.pack as packing
from pathlib import Path
from stoker.checkpoint.source import open_checkpoint
from stoker.store.packplan import PackOptions, plan_pack

torch.set_num_threads(1)
writer.SYNC_BYTES = 9000


def pack(target, where, nth):
    owner = writer if hasattr(writer, where) else writer.os
    original, calls = getattr(owner, where), 0

    def killing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth:
            if where == "pwrite":  # half of it has reached the file
                original(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, where, killing)
    plan = plan_pack(open_checkpoint(Path(sys.argv[1])), PackOptions(4, 32))
    packing.pack(plan, Path(target), shard_bytes=30_000)


for line in sys.stdin:
    target, where, nth = line.split()
    child = os.fork()
    if child == 0:
        try:
            pack(target, where, int(nth))
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Killer:
    """One process that has torch loaded and forks a victim for each request."""

    def __init__(self, source: Path) -> None:
        command = [sys.executable, "-c", KILLER, str(source)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def pack(self, target: Path, where: str, nth: int) -> int:
        """The exit code: -9 when it killed itself."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{target} {where} {nth}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    save_tiny("qwen3_moe", path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "store"
    pack(_plan(source), path, shard_bytes=SHARD_BYTES)
    return contents(path)


def _plan(source: Path) -> PackPlan:
    return plan_pack(open_checkpoint(source), PackOptions(4, 32))


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def killer(source: Path) -> Iterator[Killer]:
    killer = Killer(source)
    yield killer
    killer.process.communicate("")


@pytest.mark.parametrize(
    ("where", "nth"),
    [
        ("pwrite", 1),  # the first header
        ("pwrite", 7),  # inside a dense tensor
        ("pwrite", 40),
        ("pwrite", 48),  # inside a record
        ("sync_data", 1),
        ("sync_data", 5),
        ("fsync", 3),  # between data and journal
        ("rename", 1),  # a whole file, before its name
        ("rename", 3),
        ("sync_directory", 2),  # after the name
        ("replace_file", 1),  # everything there, no side file
        ("replace_file", 3),
        ("replace_file", 4),  # before the manifest
    ],
)
def test_killed_and_run_again_gives_the_same_bytes(
    where: str, nth: int, killer: Killer, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "store"
    assert killer.pack(target, where, nth) == -signal.SIGKILL, "the process should have killed itself"
    with pytest.raises(StoreError, match="not a store"):
        open_store(target)
    pack(_plan(source), target, shard_bytes=SHARD_BYTES)
    assert contents(target) == whole
    open_store(target).verify()


def test_killed_again_and_again(killer: Killer, source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    target = tmp_path / "store"
    deaths = 0
    for nth in (6, 9, 12, 15, 18):
        deaths += killer.pack(target, "pwrite", nth) == -signal.SIGKILL
    assert deaths >= 3
    pack(_plan(source), target, shard_bytes=SHARD_BYTES)
    assert contents(target) == whole


def test_a_resume_does_not_repeat_what_is_safe(
    killer: Killer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "store"
    killer.pack(target, "rename", 2)
    built = []
    from stoker.store import pack as packing

    original = packing.build_record
    monkeypatch.setattr(packing, "build_record", lambda *args: built.append(args[0]) or original(*args))
    pack(_plan(source), target, shard_bytes=SHARD_BYTES)
    assert 0 < len(built) < 8


def test_bytes_that_rotted_since_are_written_again(
    killer: Killer, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "store"
    killer.pack(target, "rename", 3)
    partial = next(target.glob("*.partial"))
    size = partial.stat().st_size
    with partial.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 4))
    pack(_plan(source), target, shard_bytes=SHARD_BYTES)
    assert contents(target) == whole


def test_a_finished_store_is_left_alone(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    target = tmp_path / "store"
    pack(_plan(source), target, shard_bytes=SHARD_BYTES)
    stamps = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    pack(_plan(source), target, shard_bytes=SHARD_BYTES)
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == stamps
    assert contents(target) == whole


def test_other_options_do_not_continue_an_unfinished_pack(killer: Killer, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "store"
    killer.pack(target, "rename", 3)
    with pytest.raises(StoreError, match="unfinished pack of something else"):
        pack(plan_pack(open_checkpoint(source), PackOptions(8, 32)), target, shard_bytes=SHARD_BYTES)


def test_a_source_that_changed_does_not_continue(killer: Killer, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "store"
    assert killer.pack(target, "rename", 2) == -signal.SIGKILL
    copy = tmp_path / source.name
    shutil.copytree(source, copy)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    with pytest.raises(StoreError, match="unfinished pack of something else") as refused:
        pack(_plan(copy), target, shard_bytes=SHARD_BYTES)
    assert "changed = " in str(refused.value) and "source = " not in str(refused.value)


def test_directories_with_other_things_are_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match="not empty"):
        pack(_plan(source), tmp_path)
    assert contents(tmp_path) == {"precious.txt": b"mine"}


def test_a_store_of_something_else_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    pack(_plan(source), tmp_path / "store")
    before = contents(tmp_path / "store")
    with pytest.raises(StoreError, match="a store here already"):
        pack(plan_pack(open_checkpoint(source), PackOptions(8, 32)), tmp_path / "store")
    assert contents(tmp_path / "store") == before
