"""The read queue on real files: content, order, cancellation, deadlines, faults, limits."""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from stoker.errors import ReadError, StokerError
from stoker.native.io import Arena, ReadQueue
from tests.native.reading import (
    BACKENDS,
    BLOCK,
    MODES,
    RECORD,
    RECORDS,
    SENTINEL,
    Reader,
    content,
    make_queue,
    record,
    untouched,
)


@pytest.mark.parametrize(("backend", "direct"), MODES)
@pytest.mark.parametrize("depth", [1, 3, 16])
def test_random_mix_is_read_byte_for_byte(
    backend: str, direct: bool, depth: int, path: Path, data: bytes, arena: Arena
) -> None:
    rng = random.Random(depth)
    with make_queue(depth, backend, direct) as queue:
        assert queue.backend == backend
        file = queue.open(path)
        assert queue.is_direct(file) == direct == queue.direct
        step = BLOCK if direct else 1
        for _ in range(4):
            arena.tensor(0, arena.nbytes).fill_(SENTINEL)
            wanted: dict[int, tuple[int, int, int]] = {}
            for slot in rng.sample(range(RECORDS), RECORDS):
                length = rng.randrange(step, RECORD + 1, step)
                offset = rng.randrange(0, len(data) - length + 1, step)
                ticket = queue.submit(
                    file, offset, length, arena.address + slot * RECORD, prefetch=rng.random() < 0.5, tag=slot
                )
                wanted[ticket] = (slot, offset, length)
                if rng.random() < 0.2:
                    queue.promote(rng.choice(list(wanted)))
            for ticket in rng.sample(list(wanted), len(wanted)):
                slot, offset, length = wanted[ticket]
                queue.wait(ticket)
                assert queue.state(ticket) == "done"
                assert queue.completion(ticket).bytes == length
                assert content(arena, slot, length) == data[offset : offset + length]
                rest = arena.tensor(slot * RECORD + length, RECORD - length)
                assert bool((rest == SENTINEL).all()), "bytes landed beyond the read"
        stats = queue.stats()
        assert stats["demand_reads"] + stats["prefetch_reads"] == 4 * RECORDS
        assert stats["in_flight_max"] <= depth
        assert stats["outstanding"] == stats["pending"] == stats["in_flight"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_records_go_as_one_read_each(backend: str, tmp_path: Path) -> None:
    nbytes, count = 2_654_208, 12
    blob = random.Random(3).randbytes(nbytes * count)
    file_path = tmp_path / "large.bin"
    file_path.write_bytes(blob)
    with Arena(nbytes * count) as arena, make_queue(4, backend) as queue:
        file = queue.open(file_path)
        tickets = [queue.submit(file, i * nbytes, nbytes, arena.address + i * nbytes) for i in range(count)]
        for ticket in tickets:
            queue.wait(ticket)
        assert arena.tensor(0, len(blob)).numpy().tobytes() == blob
        assert queue.stats()["short_results"] == 0
        assert queue.stats()["demand_bytes"] == len(blob)


def test_auto_takes_io_uring_where_it_works() -> None:
    with ReadQueue(2, "auto") as queue:
        try:
            ReadQueue(2, "io_uring").close()
        except StokerError:
            assert queue.backend == "threads"
            assert queue.backend_note
        else:
            assert queue.backend == "io_uring"
            assert queue.backend_note == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_demand_before_prefetch_then_deadline_then_first_come(backend: str, path: Path, arena: Arena) -> None:
    far = time.monotonic_ns() + 10**12
    with make_queue(1, backend) as queue:
        reader = Reader(queue, path, arena)
        hold = reader.hold(0)
        tickets = {
            "prefetch": reader.submit(1, prefetch=True),
            "prefetch due": reader.submit(2, prefetch=True, deadline_ns=far),
            "demand": reader.submit(3),
            "prefetch due sooner": reader.submit(4, prefetch=True, deadline_ns=far - 10**9),
            "demand 2": reader.submit(5),
            "demand due": reader.submit(6, deadline_ns=far),
            "promoted": reader.submit(7, prefetch=True),
        }
        assert queue.promote(tickets["promoted"])
        assert reader.start_order({"hold": hold, **tickets}) == [
            "hold", "demand due", "demand", "demand 2", "promoted",
            "prefetch due sooner", "prefetch due", "prefetch",
        ]  # fmt: skip
        assert queue.stats()["promoted"] == 1
        assert queue.stats()["in_flight_max"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_demand_waits_for_no_prefetch_that_had_not_started(backend: str, path: Path, arena: Arena) -> None:
    with make_queue(3, backend) as queue:
        reader = Reader(queue, path, arena)
        holds = [reader.hold(i) for i in range(3)]
        prefetches = [reader.submit(i, prefetch=True) for i in range(3, 40)]
        demand = reader.submit(40)
        queue.wait(demand)
        started_ns = queue.completion(demand).start_ns
        for ticket in [*holds, *prefetches]:
            queue.wait(ticket)
        assert all(queue.completion(ticket).start_ns >= started_ns for ticket in prefetches)
        assert queue.stats()["in_flight_max"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_bytes_never_land(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    with make_queue(1, backend) as queue:
        reader = Reader(queue, path, arena)
        hold = reader.hold(0)
        pending = reader.submit(1)
        assert not queue.cancel(hold), "it is in flight"
        assert queue.cancel(pending)
        queue.wait(hold)
        queue.wait(reader.submit(2))
        assert content(arena, 0) == record(data, 0)
        assert untouched(arena, 1)
        assert queue.state(pending) == "cancelled"
        with pytest.raises(StokerError, match="cancelled"):
            queue.wait(pending)
        assert not queue.promote(pending)
        assert not queue.cancel(hold), "it is done"
        assert queue.stats()["cancelled"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancellation_races(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    rng = random.Random(11)
    outcomes = {True: 0, False: 0}
    with make_queue(4, backend) as queue:
        reader = Reader(queue, path, arena)
        for _ in range(12):
            arena.tensor(0, arena.nbytes).fill_(SENTINEL)
            tickets = {i: reader.submit(i, prefetch=rng.random() < 0.5) for i in range(RECORDS)}
            victims = rng.sample(range(RECORDS), 24)
            halves = [victims[::2], victims[1::2]]
            cancelled: dict[int, bool] = {}

            def cancel(
                indices: list[int], tickets: dict[int, int] = tickets, cancelled: dict[int, bool] = cancelled
            ) -> None:
                for index in indices:
                    cancelled[index] = queue.cancel(tickets[index])

            threads = [threading.Thread(target=cancel, args=(half,)) for half in halves]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for index, ticket in tickets.items():
                if not cancelled.get(index):
                    queue.wait(ticket)
            for index in range(RECORDS):
                gone = cancelled.get(index, False)
                assert untouched(arena, index) if gone else content(arena, index) == record(data, index)
            for gone in cancelled.values():
                outcomes[gone] += 1
        assert queue.stats()["cancelled"] == outcomes[True] > 0
        assert queue.stats()["outstanding"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_prefetches_are_dropped_and_demands_never(backend: str, path: Path, data: bytes, arena: Arena) -> None:
    soon = time.monotonic_ns() + 10_000_000
    with make_queue(1, backend) as queue:
        reader = Reader(queue, path, arena)
        hold = reader.hold(0)
        late = [reader.submit(i, prefetch=True, deadline_ns=soon) for i in (1, 2)]
        promoted = reader.submit(3, prefetch=True, deadline_ns=soon)
        demand = reader.submit(4, deadline_ns=soon)
        in_time = reader.submit(5, prefetch=True, deadline_ns=soon + 10**12)
        assert queue.promote(promoted)
        waited_ns = queue.wait(late[0])
        assert waited_ns > 0
        for ticket in (hold, promoted, demand, in_time):
            queue.wait(ticket)
            assert queue.state(ticket) == "done"
        assert [queue.state(ticket) for ticket in late] == ["expired", "expired"]
        assert [untouched(arena, i) for i in range(6)] == [False, True, True, False, False, False]
        assert content(arena, 4) == record(data, 4)
        assert not queue.promote(late[1])
        assert queue.completion(late[0]).bytes == 0
        assert queue.cancel(late[1]), "an expired read is freed by cancel"
        assert queue.stats()["expired"] == 2
        assert queue.stats()["outstanding"] == 0


@pytest.mark.parametrize(("backend", "direct"), MODES)
@pytest.mark.parametrize("kind", ["eio", "eof"])
def test_every_nth_failure_hits_one_read_and_nothing_else(
    backend: str, direct: bool, kind: str, path: Path, data: bytes, arena: Arena
) -> None:
    count = 12
    with make_queue(4, backend, direct) as queue:
        reader = Reader(queue, path, arena)
        for nth in range(1, count + 1):
            arena.tensor(0, arena.nbytes).fill_(SENTINEL)
            queue.inject(nth, kind)
            tickets = [reader.submit(i) for i in range(count)]
            failures: list[ReadError] = []
            for index, ticket in enumerate(tickets):
                try:
                    queue.wait(ticket)
                except ReadError as error:
                    failures.append(error)
                    assert queue.state(ticket) == "failed"
                    assert error.tag == index
                else:
                    assert content(arena, index) == record(data, index)
            assert len(failures) == 1
            error = failures[0]
            assert error.tag == nth - 1, "reads of one class start in order"
            assert error.errno == (5 if kind == "eio" else 0)
            assert (error.path, error.offset, error.length) == (str(path), (nth - 1) * RECORD, RECORD)
            for part in (str(path), f"{RECORD} bytes at offset {(nth - 1) * RECORD}", f"tag {nth - 1}"):
                assert part in str(error)
        assert queue.stats()["failed"] == count
        assert queue.stats()["outstanding"] == 0


@pytest.mark.parametrize(("backend", "direct"), MODES)
def test_fewer_may_be_in_flight_than_the_depth(
    backend: str, direct: bool, path: Path, data: bytes, arena: Arena
) -> None:
    with make_queue(4, backend, direct) as queue:
        reader = Reader(queue, path, arena)
        for allowed in (1, 4, 1):
            arena.tensor(0, arena.nbytes).fill_(SENTINEL)
            queue.allow(allowed)
            queue.inject(1, "delay", 100_000_000)
            tickets = [reader.submit(index) for index in range(6)]
            if allowed == 1:
                time.sleep(0.02)
                assert [queue.state(ticket) for ticket in tickets[1:]] == ["pending"] * 5
            for index, ticket in enumerate(tickets):
                queue.wait(ticket)
                assert content(arena, index) == record(data, index)
        for wrong in (0, 5):
            with pytest.raises(StokerError, match="in flight"):
                queue.allow(wrong)


@pytest.mark.parametrize(("backend", "direct"), MODES)
@pytest.mark.parametrize("kind", ["short", "eintr", "eagain", "delay"])
def test_passing_faults_are_overcome(
    backend: str, direct: bool, kind: str, path: Path, data: bytes, arena: Arena
) -> None:
    with make_queue(2, backend, direct) as queue:
        file = queue.open(path)
        for nth, blocks in enumerate((1, 2, 3, 5, 16), start=1):
            arena.tensor(0, arena.nbytes).fill_(SENTINEL)
            queue.inject(nth, kind, 2_000_000)
            tickets = [queue.submit(file, BLOCK, blocks * BLOCK, arena.address + i * RECORD) for i in range(5)]
            for slot, ticket in enumerate(tickets):
                queue.wait(ticket)
                assert content(arena, slot, blocks * BLOCK) == data[BLOCK : (blocks + 1) * BLOCK]
        stats = queue.stats()
        assert stats["failed"] == 0
        assert stats["short_results"] == (5 if kind == "short" else 0)
        assert stats["retries"] == (5 if kind in ("eintr", "eagain") else 0)


@pytest.mark.parametrize(("backend", "direct"), MODES)
def test_a_file_that_ends_early(backend: str, direct: bool, tmp_path: Path, data: bytes, arena: Arena) -> None:
    file_path = tmp_path / "cut.bin"
    file_path.write_bytes(data[: 2 * RECORD])
    with make_queue(2, backend, direct) as queue:
        file = queue.open(file_path)
        os.truncate(file_path, RECORD + BLOCK + 100)  # after it was opened
        for offset, got in ((RECORD, BLOCK + 100), (RECORD + BLOCK, 100), (8 * RECORD, 0)):
            ticket = queue.submit(file, offset, RECORD, arena.address, tag=9)
            with pytest.raises(ReadError, match="ends inside the read") as raised:
                queue.wait(ticket)
            assert (raised.value.errno, raised.value.offset, raised.value.tag) == (0, offset, 9)
            assert f"{got} bytes" in str(raised.value)
        queue.wait(queue.submit(file, 0, RECORD, arena.address))
        assert content(arena, 0) == record(data, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_right_is_refused_before_submission(backend: str, path: Path, arena: Arena) -> None:
    with make_queue(2, backend) as queue:
        file = queue.open(path)
        for offset, length, shift in ((512, BLOCK, 0), (0, BLOCK + 512, 0), (0, BLOCK, 512)):
            with pytest.raises(ValueError, match="multiples of 4096") as raised:
                queue.submit(file, offset, length, arena.address + shift)
            assert str(path) in str(raised.value)
        for call in (
            lambda: queue.submit(file + 1, 0, BLOCK, arena.address),
            lambda: queue.submit(-1, 0, BLOCK, arena.address),
            lambda: queue.submit(file, 0, 0, arena.address),
            lambda: queue.submit(file, 0, BLOCK, 0),
            lambda: queue.submit(file, 2**63, BLOCK, arena.address),
            lambda: queue.wait(12345),
            lambda: queue.wait(-1),
            lambda: queue.wait_any([]),
            lambda: queue.inject(0, "eio"),
            lambda: queue.inject(1, "fire"),
        ):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(TypeError):
            queue.submit(file, -1, BLOCK, arena.address)
        assert queue.stats()["outstanding"] == 0
        buffered = queue.open(path, direct=False)
        assert not queue.is_direct(buffered)
        assert queue.direct, "asked for, so nothing fell back"
        queue.wait(queue.submit(buffered, 1, 77, arena.address + 3))
    for depth in (0, -1, 100_000):
        with pytest.raises(ValueError, match="depth"):
            ReadQueue(depth, backend)
    with pytest.raises(ValueError, match="auto, io_uring, threads"):
        ReadQueue(1, "magic")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with ReadQueue(1) as queue:
        for bad in (tmp_path / "absent", tmp_path):
            with pytest.raises(ReadError, match=re.escape(str(bad))) as raised:
                queue.open(bad)
            assert raised.value.errno != 0
        if os.geteuid() != 0:
            secret = tmp_path / "secret"
            secret.touch(mode=0)
            with pytest.raises(ReadError, match="Permission denied"):
                queue.open(secret)


@pytest.mark.skipif(sys.platform != "linux", reason="a file system known to refuse O_DIRECT")
def test_a_refused_direct_open_falls_back_and_says_so(arena: Arena) -> None:
    refused = "/proc/self/limits"
    with ReadQueue(1) as queue:
        file = queue.open(refused)
        assert not queue.is_direct(file)
        assert not queue.direct
        queue.wait(queue.submit(file, 0, 10, arena.address))
        assert content(arena, 0, 10) == Path(refused).read_bytes()[:10]


@pytest.mark.parametrize("backend", BACKENDS)
def test_thousands_of_tickets_in_bounded_slots(backend: str, path: Path, arena: Arena) -> None:
    with make_queue(8, backend, direct=False) as queue:
        file = queue.open(path)
        highest = 0
        for _ in range(10):
            tickets = [queue.submit(file, i * 64, 64, arena.address + i * 64) for i in range(2000)]
            assert len(set(tickets)) == 2000
            for ticket in tickets:
                queue.wait(ticket)
            highest = max(highest, *(ticket & (1 << 20) - 1 for ticket in tickets))
        assert highest < 2000 + 4096 + 8, "slots are reused"
        assert queue.stats()["demand_reads"] == 20_000
        assert queue.state(tickets[0]) == "done", "recent outcomes stay readable"


def test_tickets_that_are_never_freed_are_bounded(path: Path, arena: Arena) -> None:
    with ReadQueue(1, "threads") as queue:
        reader = Reader(queue, path, arena)
        tickets = [reader.submit(1) for _ in range(65_536)]
        with pytest.raises(StokerError, match="65536 reads are outstanding"):
            reader.submit(1)
        for ticket in tickets:
            if not queue.cancel(ticket):
                queue.wait(ticket)
        queue.wait(reader.submit(1))
        assert queue.stats()["outstanding"] == 0


@pytest.mark.parametrize(("backend", "direct"), MODES)
def test_submission_from_several_threads(backend: str, direct: bool, path: Path, data: bytes, arena: Arena) -> None:
    with make_queue(4, backend, direct) as queue:
        reader = Reader(queue, path, arena)
        wrong: list[int] = []

        def work(part: int) -> None:
            rng = random.Random(part)
            mine = range(part, RECORDS, 4)
            for _ in range(8):
                tickets = {i: reader.submit(i, prefetch=rng.random() < 0.5) for i in mine}
                left = list(tickets)
                while left:
                    index = left.pop(queue.wait_any([tickets[i] for i in left]))
                    queue.wait(tickets[index])
                    slot = arena.tensor(index * RECORD, RECORD)
                    if slot.numpy().tobytes() != record(data, index):
                        wrong.append(index)
                    slot.fill_(SENTINEL)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert queue.stats()["demand_reads"] + queue.stats()["prefetch_reads"] == 8 * RECORDS
