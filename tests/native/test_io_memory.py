"""Memory under reads: the arena, closing with reads in flight, waiting; the synchronous reads past the page cache."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from stoker.errors import BudgetError, ReadError, StokerError
from stoker.native.io import Arena, ReadQueue, cached_bytes, drop_cache, read_file_into
from tests.native.reading import (
    BACKENDS,
    BLOCK,
    DELAY_NS,
    RECORD,
    Reader,
    content,
    make_queue,
    record,
    untouched,
)

HUGE = 2 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps")


# ---- arena


def test_arena_is_aligned_writable_and_shared() -> None:
    with Arena(3 * HUGE + 5) as arena:
        assert arena.address % HUGE == 0
        assert arena.nbytes == 3 * HUGE + BLOCK, "rounded up to whole blocks"
        whole, part = arena.tensor(0, arena.nbytes), arena.tensor(BLOCK, 16)
        assert (whole.dtype, whole.data_ptr(), part.data_ptr()) == (torch.uint8, arena.address, arena.address + BLOCK)
        whole.fill_(9)
        part.fill_(1)
        assert int(whole.sum()) == 9 * (arena.nbytes - 16) + 16
        for offset, nbytes in ((arena.nbytes, 1), (0, arena.nbytes + 1), (arena.nbytes + 1, 0)):
            with pytest.raises(ValueError, match="not in an arena"):
                arena.tensor(offset, nbytes)


def test_tensors_outlive_the_arena() -> None:
    arena = Arena(HUGE)
    tensor = arena.tensor(0, HUGE)[10:20]
    tensor.fill_(42)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        _ = arena.address
    del arena
    gc.collect()
    others = [Arena(HUGE) for _ in range(4)]
    for other in others:
        other.tensor(0, HUGE).fill_(7)
    assert tensor.tolist() == [42] * 10


@linux
def test_pages_are_reported_and_given_back() -> None:
    def mapped(address: int) -> bool:
        return f"{address:x}-" in Path("/proc/self/maps").read_text()

    with Arena(8 * HUGE) as arena, Arena(8 * HUGE, huge_pages=False) as small:
        assert arena.pages().resident_bytes == 0, "nothing is touched before it is used"
        arena.populate()
        small.populate()
        assert arena.pages().resident_bytes == small.pages().resident_bytes == 8 * HUGE
        assert small.pages().huge_bytes == 0
        granted = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if granted.exists() and "[never]" not in granted.read_text():
            assert arena.pages().huge_bytes == 8 * HUGE
        address = arena.address
        assert mapped(address)
    assert not mapped(address)


def test_no_room_is_a_budget_error_with_the_size() -> None:
    with pytest.raises(BudgetError, match=str(1 << 46)):
        Arena(1 << 46)
    for nbytes in (0, -5):
        with pytest.raises(StokerError, match="at least one byte"):
            Arena(nbytes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_past_the_arena_fails_and_harms_nothing(backend: str, path: Path, data: bytes) -> None:
    with Arena(RECORD) as arena, make_queue(1, backend, direct=False) as queue:
        file = queue.open(path)
        for address in (arena.address + RECORD, arena.address - BLOCK):
            with pytest.raises(ReadError, match="Bad address"):
                queue.wait(queue.submit(file, 0, BLOCK, address))
        queue.wait(queue.submit(file, 0, RECORD, arena.address))
        assert content(arena, 0) == record(data, 0)


# ---- the end of queues and arenas


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_waits_for_what_is_in_flight(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    queue = make_queue(2, backend)
    reader = Reader(queue, path, arena)
    held = [reader.hold(0), reader.hold(1)]
    pending = [reader.submit(2), reader.submit(3, prefetch=True)]
    waiter_saw: list[str] = []

    def wait() -> None:
        try:
            queue.wait(pending[0])
        except StokerError as error:
            waiter_saw.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.005)
    queue.close()
    waiter.join()
    assert "cancelled" in waiter_saw[0]
    assert [queue.state(ticket) for ticket in held] == ["done", "done"]
    assert [queue.state(ticket) for ticket in pending] == ["cancelled", "cancelled"]
    assert [content(arena, i) == record(data, i) for i in (0, 1)] == [True, True]
    assert untouched(arena, 2) and untouched(arena, 3)
    queue.wait(held[0])
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        reader.submit(4)
    with pytest.raises(ValueError, match="closed"):
        queue.open(path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collecting_a_queue_waits_too(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    queue = make_queue(1, backend)
    reader = Reader(queue, path, arena)
    reader.hold(0)
    del queue, reader
    gc.collect()
    assert content(arena, 0) == record(data, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_arena_goes_only_after_its_reads(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    with make_queue(1, backend) as queue:
        doomed = Arena(arena.nbytes)
        reader = Reader(queue, path, doomed)
        hold = reader.hold(0)
        pending = reader.submit(1)
        elsewhere = Reader(queue, path, arena).submit(2)
        doomed.close()
        assert queue.state(hold) == "done"
        assert queue.state(pending) == "cancelled"
        queue.wait(elsewhere)
        assert content(arena, 2) == record(data, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_sleeps_without_the_interpreter_lock(backend: str, path: Path, arena: Arena) -> None:
    with make_queue(1, backend) as queue:
        reader = Reader(queue, path, arena)
        queue.inject(1, "delay", 400_000_000)
        ticket = reader.submit(0)
        ticks = 0
        over = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not over.wait(0.02):
                ticks += 1

        thread = threading.Thread(target=tick)
        thread.start()
        cpu_before = time.process_time_ns()
        waited_ns = queue.wait(ticket)
        cpu_ns = time.process_time_ns() - cpu_before
        over.set()
        thread.join()
        assert waited_ns > 300_000_000
        assert ticks >= 5, "another thread ran in the meantime"
        assert cpu_ns < waited_ns / 4, "nobody span"
        assert queue.wait(ticket) == 0, "it had ended"


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_interrupts_a_wait_and_leaves_the_ticket(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    with make_queue(1, backend) as queue:
        reader = Reader(queue, path, arena)
        queue.inject(1, "delay", 1_500_000_000)
        ticket = reader.submit(0)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        before = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            queue.wait(ticket)
        assert time.monotonic() - before < 1.2
        assert queue.state(ticket) == "in_flight"
        queue.wait(ticket)
        assert content(arena, 0) == record(data, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wait_any_returns_the_first_to_end(backend: str, path: Path, arena: Arena) -> None:
    with make_queue(2, backend) as queue:
        reader = Reader(queue, path, arena)
        slow, quick = reader.hold(0), reader.submit(1)
        assert queue.wait_any([slow, quick]) == 1
        assert not queue.poll(slow)
        assert queue.poll(quick)
        assert queue.wait_any([slow]) == 0
        times = queue.completion(slow)
        assert 0 < times.submit_ns <= times.start_ns < times.end_ns <= time.monotonic_ns()
        assert times.end_ns - times.start_ns >= DELAY_NS
        stats = queue.stats()
        assert stats["busy_ns"] <= stats["service_ns"]
        assert stats["busy_ns"] >= DELAY_NS


# ---- synchronous reads and the page cache


@pytest.mark.parametrize("shift", [0, 1, 100, 4095])
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 70_001])
def test_read_file_into_at_any_alignment(shift: int, offset: int, tmp_path: Path) -> None:
    blob = random.Random(5).randbytes(9_000_123)
    file = tmp_path / "dense.bin"
    file.write_bytes(blob)
    drop_cache(file)
    with Arena(len(blob) + 2 * BLOCK) as arena:
        memory = arena.tensor(0, arena.nbytes)
        for length in (0, 1, 5000, BLOCK, len(blob) - offset):
            memory.fill_(0x5C)
            assert read_file_into(file, offset, length, arena.address + shift)
            assert memory[shift : shift + length].numpy().tobytes() == blob[offset : offset + length]
            assert bool((memory[:shift] == 0x5C).all()) and bool((memory[shift + length :] == 0x5C).all())
        assert cached_bytes(file) == 0, "nothing stays in the page cache"
        with pytest.raises(ReadError, match="ends inside the read") as raised:
            read_file_into(file, offset, len(blob) - offset + 1, arena.address + shift)
        assert f"got:      {len(blob) - offset} bytes" in str(raised.value)
        with pytest.raises(ReadError, match="ends inside the read"):
            read_file_into(file, len(blob) + 10 * BLOCK, 1, arena.address)


def test_read_file_into_errors(tmp_path: Path) -> None:
    with Arena(BLOCK) as arena:
        with pytest.raises(ReadError, match="absent"):
            read_file_into(tmp_path / "absent", 0, 10, arena.address)
        with pytest.raises(ReadError, match="directory"):
            read_file_into(tmp_path, 0, 10, arena.address)
        for call in (drop_cache, cached_bytes):
            with pytest.raises(ReadError, match="absent"):
                call(tmp_path / "absent")


@linux
def test_direct_reads_leave_the_page_cache_alone_and_buffered_ones_do_not(path: Path, arena: Arena) -> None:
    for direct in (True, False):
        drop_cache(path)
        assert cached_bytes(path) == 0
        with ReadQueue(2, direct=direct) as queue:
            queue.wait(Reader(queue, path, arena).submit(3))
        assert (cached_bytes(path) == 0) == direct
    drop_cache(path)
