"""The directory of a prefix cache: what is damaged is never used, what is whole outlives kill -9, the size holds."""

import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker.errors import OptionError
from stoker.generate.prefix import disk
from stoker.generate.prefix.disk import Directory, borrow, give_back
from stoker.generate.prefix.segments import SUFFIX, Damaged, Draft, Segment, checksum, read_segment, write_segment
from stoker.generate.prefix.tree import child_digest, key_of
from stoker.runtime.model import Options, load
from tests.generate.prefix.talk import Talk, some_ids
from tests.runtime.conftest import Packer

FINGERPRINT = bytes(range(16))
IDS = some_ids(random.Random(11), 300)


def draft(number: int = 0, blocks: int = 2, nbytes: int = 5000, parent: bytes = FINGERPRINT, start: int = 0) -> Draft:
    data = [(key_of([number, n] * 32), "", memoryview(os.urandom(nbytes))) for n in range(blocks)]
    return Draft(FINGERPRINT, parent, start, data)


# ---- one file


def test_a_segment_comes_back_as_it_was(tmp_path: Path) -> None:
    given = Draft(
        FINGERPRINT, b"p" * 16, 128, [(key_of([1] * 64), "a", memoryview(b"x" * 7000)), (b"", "b", memoryview(b""))]
    )
    written = write_segment(tmp_path, given)
    found = read_segment(written.path)
    assert (found.fingerprint, found.parent, found.start) == (FINGERPRINT, b"p" * 16, 128)
    assert [(part.key, part.meta, part.nbytes) for part in found.parts] == [
        (key_of([1] * 64), "a", 7000),
        (b"", "b", 0),
    ]
    assert found.parts == written.parts and found.nbytes == written.nbytes == written.path.stat().st_size
    assert found.parts[0].offset % 4096 == 0, "read past the page cache, with nothing before it"
    raw = written.path.read_bytes()
    for part in found.parts:
        assert checksum(raw[part.offset : part.offset + part.nbytes]) == part.checksum
    assert found.digests()[1] == child_digest(child_digest(b"p" * 16, key_of([1] * 64)), b"")


def _cut(file: Path, size: int) -> None:
    os.truncate(file, size)


def _flip(file: Path, offset: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: _cut(file, 0),
    "cut in the header": lambda file: _cut(file, 100),
    "cut in the data": lambda file: _cut(file, file.stat().st_size - 1),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "magic": lambda file: _flip(file, 3),
    "header": lambda file: _flip(file, 60),
    "length": lambda file: _flip(file, 11),
    "foreign": lambda file: file.write_bytes(b"{}" * 5000),
    "renamed": lambda file: file.rename(file.with_name("00" * 16 + SUFFIX)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_by_the_header(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start: told in the log, removed, never listed."""
    DAMAGE[damage](write_segment(tmp_path, draft()).path)
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    with pytest.raises(Damaged):
        read_segment(file)
    whole = write_segment(tmp_path, draft(1))
    with caplog.at_level(logging.WARNING, "stoker.prefix"):
        directory = Directory(tmp_path, 1 << 20)
    assert [segment.path for segment in directory.everything()] == [whole.path]
    assert directory.counts.discarded == 1 and file.name in caplog.text and not file.exists()
    assert directory.total_bytes == whole.nbytes
    directory.close()


def test_what_a_killed_process_left_is_removed_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "abc.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    Directory(tmp_path, 1 << 20).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", "notes.txt"]


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """Whatever part of a file a crash left behind under its name."""
    file = write_segment(tmp_path, draft()).path
    raw = file.read_bytes()
    for size in [*range(0, 600, 7), *range(600, len(raw), 97)]:
        file.write_bytes(raw[:size])
        with pytest.raises(Damaged):
            read_segment(file)


# ---- the directory


def written(directory: Directory, one: Draft) -> Path:
    found: list[Path] = []
    assert directory.write(one, lambda segment: found.append(segment.path) if segment else None)
    assert directory.settle(20)
    return found[0]


def test_the_size_holds_and_the_least_recently_used_goes_also_after_a_restart(tmp_path: Path) -> None:
    limit = 100_000
    directory = Directory(tmp_path, limit)
    files = [written(directory, draft(n, 1, 14_000)) for n in range(5)]  # with the header 18,096 bytes each
    by_path = {segment.path: segment for segment in directory.everything()}
    directory.touch([by_path[files[0]]])
    directory.close()

    directory = Directory(tmp_path, limit)
    files += [written(directory, draft(n, 1, 14_000)) for n in (5, 6)]
    assert files[0].exists() and not files[1].exists() and files[-1].exists()
    assert directory.total_bytes == sum(file.stat().st_size for file in tmp_path.glob(f"*{SUFFIX}")) <= limit
    assert directory.counts.evictions > 0
    directory.close()
    Directory(tmp_path, 40_000).close()
    assert [file for file in files if file.exists()] == files[-2:], "a smaller size holds from the start"


def test_the_beginning_of_a_conversation_outlives_its_end(tmp_path: Path) -> None:
    """Written first, so the oldest; but without it the rest is worth nothing. Ends go first, also after a restart."""
    directory, parent = Directory(tmp_path, 100_000), FINGERPRINT
    outcomes: list[Segment | None] = []
    for n in range(9):
        one = draft(n, 1, 14_000, parent, 64 * n)
        directory.write(one, outcomes.append)
        assert directory.settle(20)
        parent = child_digest(parent, one.blocks[0][0])
        if n == 3:
            directory.close()
            directory = Directory(tmp_path, 100_000)
    assert [outcome is not None for outcome in outcomes] == [True] * 5 + [False] * 4, "its end finds no room"
    other = written(directory, draft(20, 1, 14_000))
    chain = [outcome for outcome in outcomes if outcome is not None]
    assert other.exists() and [one.path.exists() for one in chain] == [True] * 4 + [False]
    assert directory.total_bytes <= 100_000
    directory.close()


def test_one_process_at_a_time_and_it_is_told_which(tmp_path: Path) -> None:
    code = "import sys,fcntl,os\nf=os.open(sys.argv[1],os.O_RDWR|os.O_CREAT)\nfcntl.flock(f,fcntl.LOCK_EX)\n"
    code += "os.write(f,str(os.getpid()).encode())\nprint('held',flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(OptionError, match=f"another process uses this prefix cache(.|\n)*{other.pid}"):
            borrow(tmp_path, 1 << 20)
        other.kill()
    give_back(borrow(tmp_path, 1 << 20))


def test_models_of_one_process_share_a_directory(tmp_path: Path) -> None:
    one, two = borrow(tmp_path, 1 << 20), borrow(tmp_path / "." / "", 1 << 20)
    assert one is two
    give_back(one)
    assert written(two, draft()).exists()
    give_back(two)
    with pytest.raises(OptionError, match="cannot be used"):
        borrow(tmp_path / "lock" / "below", 1 << 20)


def test_nothing_of_a_model_is_written_after_it_was_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, written_of = threading.Event(), threading.Event(), []

    def slowly(path: Path, given: Draft, between: Callable[[], None]) -> Segment:
        begun.set()
        assert go_on.wait(60)
        written_of.append(given.fingerprint)
        return write_segment(path, given, between)

    monkeypatch.setattr(disk, "write_segment", slowly)
    directory, told, other = Directory(tmp_path, 1 << 30), [], b"o" * 16
    for of in (FINGERPRINT, FINGERPRINT, other):
        directory.write(Draft(of, of, 0, draft(len(told)).blocks), told.append)
    assert begun.wait(60)
    threading.Timer(0.3, go_on.set).start()
    directory.abandon(FINGERPRINT)
    assert written_of[:1] == [FINGERPRINT], "what had begun is finished first"
    assert directory.settle(60) and written_of == [FINGERPRINT, other]
    assert len(told) == 3 and told.count(None) == 1
    directory.close()


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the size of files stands for the disk: the system refuses the write."""
    directory = Directory(tmp_path, 1 << 30)
    first = written(directory, draft(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    outcomes: list[object] = []
    taken = 0
    with caplog.at_level(logging.WARNING, "stoker.prefix"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            for n in (1, 2, 3):
                taken += directory.write(draft(n, 1, 3 << 20), outcomes.append)
            assert directory.settle(20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert taken >= 1 and outcomes == [None] * taken
    warnings = [record for record in caplog.records if os.strerror(errno.EFBIG) in record.getMessage()]
    assert len(warnings) == 1 and not list(tmp_path.glob("*.partial"))
    assert not directory.write(draft(4), outcomes.append), "until the next start"
    assert read_segment(first)
    directory.close()


# ---- with a model


def test_damaged_data_is_computed_again(packed: Packer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bit of a block's bytes: found when it is read, never used; the beginning is still taken up."""
    with Talk(packed("qwen3_moe", 8), tmp_path) as talk:
        fresh = talk.fresh(IDS)
        for end in (128, 256, 300):  # three files
            talk.answer(IDS[:end])
        talk.cache.settle()
        second = next(one for one in map(read_segment, tmp_path.glob(f"*{SUFFIX}")) if one.start == 128)
        _flip(second.path, second.parts[0].offset + 17)
        talk.reopen()
        with caplog.at_level(logging.WARNING, "stoker.prefix"):
            cached, logits = talk.answer(IDS)
        assert cached == 128 and torch.equal(logits, fresh) and "checksum of a block" in caplog.text
        talk.reopen()
        cached, logits = talk.answer(IDS)
        assert cached == 299 and torch.equal(logits, fresh), "what was computed again is whole on disk"


def test_a_file_that_vanishes_is_no_error(packed: Packer, tmp_path: Path) -> None:
    with Talk(packed("qwen3_moe", 8), tmp_path) as talk:
        fresh = talk.fresh(IDS)
        talk.answer(IDS)
        talk.reopen()
        for file in tmp_path.glob(f"*{SUFFIX}"):
            file.unlink()
        cached, logits = talk.answer(IDS)
        assert cached == 0 and torch.equal(logits, fresh)


def test_a_conversation_writes_each_token_about_once(packed: Packer, tmp_path: Path) -> None:
    """Turns add what is new (and a last block that is not full yet); they do not write the whole again."""
    source, turn = random.Random(8), list[int]()
    with Talk(packed("qwen3_moe", 8), tmp_path, ctx_size=2048) as talk:
        pool = talk.runtime.kv
        assert pool is not None
        for _ in range(12):
            turn += some_ids(source, 100)
            talk.answer(turn)
            talk.cache.settle()
        blocks = -(-len(turn) // 64)
        stats = talk.cache.stats()
        assert stats["disk_written_bytes"] < (blocks + 12) * (pool.shape.block_bytes + 4096)
        assert stats["disk_bytes"] < (blocks + 1) * pool.shape.block_bytes + 24 * 4096
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) <= 13


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_kill_9_leaves_whole_blocks(name: str, packed: Packer, tmp_path: Path) -> None:
    """Killed while it writes; the next process takes up what is whole and gives the numbers of a fresh one."""
    code = (
        "import random, sys\nfrom pathlib import Path\nfrom tests.generate.prefix.talk import Talk, some_ids\n"
        "talk = Talk(Path(sys.argv[1]), Path(sys.argv[2]), ctx_size=2048)\nsource, turn = random.Random(21), []\n"
        "for _ in range(60):\n"
        "    turn = (turn if len(turn) < 1500 else []) + some_ids(source, 70)\n    talk.answer(turn)\n"
    )
    store, directory = packed(name, 8), tmp_path / "cache"
    with subprocess.Popen([sys.executable, "-c", code, str(store), str(directory)]) as server:
        deadline = time.monotonic() + 100
        while len(list(directory.glob(f"*{SUFFIX}"))) < 5 and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.002)
        server.send_signal(signal.SIGKILL)
    assert server.returncode == -signal.SIGKILL
    turn = some_ids(random.Random(21), 70 * 5)
    with load(store, Options(memory="8GiB", ctx_size=2048, prefix_ram=8 << 20)) as runtime:
        talk = Talk(store, directory, runtime=runtime)
        cached, logits = talk.answer(turn)
        assert cached >= 70 and talk.cache.stats()["discarded"] == 0
        if name == "qwen3_moe":
            assert torch.equal(logits, talk.fresh(turn))
        talk.cache.close()
