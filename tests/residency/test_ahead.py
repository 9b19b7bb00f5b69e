"""Reading ahead of demand: hot prefetch, staged buffers, the ring and its read-ahead. Never twice, never in the way."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import ReadError, StokerError
from stoker.native.io import ReadQueue
from stoker.residency import Residency
from tests.residency.books import check_books, stream_all, take_all
from tests.residency.records import RecordFile

BLOCK = 4096
SLOW_NS = 300_000_000  # longer than a busy machine keeps a test waiting between two lines


def reads_of(queue: ReadQueue) -> int:
    stats = queue.stats()
    return stats["demand_reads"] + stats["prefetch_reads"]


def quiet(queue: ReadQueue) -> None:
    """Wait until nothing is pending or in flight."""
    limit = time.monotonic() + 5
    while queue.stats()["pending"] or queue.stats()["in_flight"]:
        assert time.monotonic() < limit
        time.sleep(0.001)


def started(queue: ReadQueue) -> None:
    """Wait until the first read is under way."""
    limit = time.monotonic() + 5
    while not queue.stats()["in_flight"]:
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.fixture(params=["io_uring", "threads"])
def narrow(request: pytest.FixtureRequest) -> Iterator[ReadQueue]:
    """One read at a time, so that one delayed read holds up everything behind it."""
    with ReadQueue(depth=1, backend=request.param) as opened:
        yield opened


# Hot prefetch.


def test_a_prefetch_on_time_is_a_hit_and_is_read_once(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=8) as residency:
        assert residency.prefetch(0, [1, 2, 3]) == 3
        assert residency.prefetch(0, [1, 2, 3]) == 0
        quiet(queue)
        assert take_all(residency, store, 0, [1, 2, 9])[0] == [1, 2]
        take_all(residency, store, 0, [1, 2])
        c = residency.counters()
        assert (c["hits"], c["misses"]) == (4, 1)
        assert (c["prefetch_submitted"], c["prefetch_used"], c["prefetch_on_time"], c["prefetch_late"]) == (3, 2, 2, 0)
        assert (c["prefetch_bytes"], c["demand_bytes"]) == (3 * 2 * BLOCK, 2 * BLOCK)
        assert c["on_time_ratio"] == 1.0 and c["prefetch_wasted"] == 0
        assert reads_of(queue) == 4


def test_an_unfinished_prefetch_is_promoted_and_awaited_not_read_again(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="hot", slots=8) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        residency.prefetch(0, [1, 2, 3])
        groups = take_all(residency, store, 0, [3])
        assert groups == [[3]]
        assert narrow.stats()["promoted"] == 1
        quiet(narrow)
        assert reads_of(narrow) == 3
        c = residency.counters()
        assert (c["hits"], c["misses"], c["prefetch_late"], c["prefetch_on_time"]) == (0, 1, 1, 0)
        assert c["demand_bytes"] == 0


def test_demand_overtakes_prefetches(store: RecordFile, narrow: ReadQueue) -> None:
    """The first prefetch is held up until the demand is there; the next read of all, which fails, must be the demand.

    A machine that pauses the test for longer than the first read is held up proves nothing: then once more, slower.
    """
    for hold_ns in (SLOW_NS, 4 * SLOW_NS, 20 * SLOW_NS):
        with Residency(store, narrow, path="hot", slots=16) as residency:
            narrow.inject(1, "delay", delay_ns=hold_ns)
            narrow.inject(2, "eio")
            began = time.monotonic_ns()
            assert residency.prefetch(0, list(range(10))) == 10
            started(narrow)
            with residency.acquire(1, [5]) as lease:
                if time.monotonic_ns() - began < hold_ns:
                    with pytest.raises(ReadError, match="pool 1 expert 5"):
                        list(lease.arrivals())
                    assert take_all(residency, store, 1, [5]) == [[5]]
                    return
        quiet(narrow)
    pytest.fail("the machine never let the demand come in time")


def test_a_prefetch_never_takes_a_pinned_slot_or_one_that_is_read_into(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=4) as residency:
        with residency.acquire(0, [0, 1, 2]) as lease:
            list(lease.arrivals())
            assert residency.prefetch(0, [5, 6, 7]) == 1
            assert residency.prefetch(0, [8]) == 0
            quiet(queue)
            assert residency.resident(0) == {0, 1, 2, 5}
            assert residency.prefetch(0, [8]) == 0, "5 is for the step to come and must not leave for another guess"
            assert all(store.holds(0, e, a) for e, a in zip([0, 1, 2], lease.addresses, strict=True))
        take_all(residency, store, 0, [9])
        assert residency.prefetch(0, [10]) == 1
        check_books(residency)


def test_cancelled_prefetches_free_their_slots_and_are_not_read(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="hot", slots=4) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        assert residency.prefetch(0, [1, 2, 3, 4]) == 4
        started(narrow)
        assert residency.cancel_prefetches(0) == 3
        check_books(residency)
        take_all(residency, store, 0, [1, 7])
        quiet(narrow)
        assert reads_of(narrow) == 2
        assert residency.tally.prefetch_cancelled == 3
        assert residency.resident(0) == {1, 7}


def test_demand_takes_the_slot_of_a_prefetch_that_has_not_started(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="hot", slots=3) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        residency.prefetch(0, [1, 2, 3])
        started(narrow)
        take_all(residency, store, 0, [7, 8])
        assert residency.tally.prefetch_cancelled == 2
        assert residency.resident(0) == {1, 7, 8}
        check_books(residency)


def test_a_prefetch_past_its_deadline_is_dropped_and_read_on_demand(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="hot", slots=8) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        residency.prefetch(1, [0])
        started(narrow)
        assert residency.prefetch(0, [1, 2], deadline_ns=time.monotonic_ns() + SLOW_NS // 6) == 2
        quiet(narrow)
        take_all(residency, store, 0, [1])
        assert residency.resident(0) == {1}
        c = residency.counters()
        assert c["prefetch_expired"] == 2 and c["misses"] == 1 and c["demand_bytes"] == 2 * BLOCK
        check_books(residency)


def test_a_prefetch_that_expires_while_a_step_waits_is_read_in_place(store: RecordFile, narrow: ReadQueue) -> None:
    """Promotion comes a moment too late: the queue has dropped the read already."""
    with Residency(store, narrow, path="hot", slots=8) as residency:
        residency.prefetch(0, [1, 2, 3, 4], deadline_ns=1)
        take_all(residency, store, 0, [1, 2, 3, 4])
        check_books(residency)


def test_an_unused_prefetch_is_counted_as_waste_when_it_leaves(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=3) as residency:
        residency.prefetch(0, [1, 2])
        quiet(queue)
        take_all(residency, store, 0, [3, 4, 5])
        c = residency.counters()
        assert c["prefetch_wasted"] == 2 and c["prefetch_wasted_bytes"] == 4 * BLOCK and c["waste_ratio"] == 1.0


def test_a_failed_prefetch_is_silent_until_somebody_needs_the_expert(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=8) as residency:
        queue.inject(1, "eio")
        residency.prefetch(0, [1])
        quiet(queue)
        take_all(residency, store, 0, [1])
        assert residency.tally.read_errors == 1
        check_books(residency)


def test_a_prefetch_that_fails_while_a_step_waits_is_an_error(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="hot", slots=8) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        narrow.inject(2, "eio")
        residency.prefetch(0, [1, 2])
        started(narrow)
        with pytest.raises(ReadError, match="pool 0 expert 2"):
            take_all(residency, store, 0, [2])
        take_all(residency, store, 0, [2, 1])
        check_books(residency)


# Staged.


def test_what_was_staged_is_there_and_a_missing_expert_falls_back(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="staged", slots=8) as residency:
        take_all(residency, store, 0, [0, 1, 2, 3])
        assert residency.tally.staged_fallbacks == 4
        assert residency.stage(0, [3, 4, 5, 6]) == 4
        quiet(queue)
        assert reads_of(queue) == 7, "an expert of the current step that is staged again is not read again"
        assert take_all(residency, store, 0, [3, 4, 5, 9])[0] == [3, 4, 5]
        c = residency.counters()
        assert c["staged_fallbacks"] == 5 and c["prefetch_on_time"] == 2
        check_books(residency)


def test_a_staged_read_in_flight_is_promoted_and_not_read_twice(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="staged", slots=8) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        residency.stage(0, [1, 2, 3, 4])
        take_all(residency, store, 0, [4, 3, 2, 1])
        assert reads_of(narrow) == 4 and narrow.stats()["promoted"] >= 3
        assert residency.tally.staged_fallbacks == 0 and residency.tally.prefetch_late == 4


def test_staging_ahead_does_not_disturb_the_step_that_runs(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="staged", slots=8) as residency:
        with residency.acquire(0, [0, 1, 2, 3]) as lease:
            list(lease.arrivals())
            assert residency.stage(0, [4, 5, 6, 7]) == 4
            quiet(queue)
            assert all(store.holds(0, e, a) for e, a in zip(range(4), lease.addresses, strict=True))
        assert take_all(residency, store, 0, [4, 5, 6, 7]) == [[4, 5, 6, 7]]
        assert residency.tally.staged_fallbacks == 4


def test_a_new_stage_replaces_one_that_was_not_used(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="staged", slots=8) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        residency.stage(0, [1, 2, 3, 4])
        started(narrow)
        assert residency.stage(0, [4, 5, 6, 7]) == 4
        assert residency.tally.prefetch_cancelled == 2
        take_all(residency, store, 0, [4, 5, 6, 7])
        assert residency.tally.staged_fallbacks == 0
        check_books(residency)


def test_more_than_a_buffer_is_staged_in_part_and_says_so(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="staged", slots=6) as residency:
        assert residency.stage(0, [1, 2, 3, 4, 5]) == 3
        take_all(residency, store, 0, [1, 2, 3, 4, 5])
        assert residency.tally.staged_fallbacks == 2


# Whole layer.


def test_a_stream_reads_each_expert_once_and_evicts_nothing(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=4, ring_records=3) as residency:
        take_all(residency, store, 2, [5, 9, 20])
        before = reads_of(queue)
        stream_all(residency, store, 2, [23, 5, 0, 9, 7, 20, 11])
        assert reads_of(queue) - before == 4
        assert residency.resident(2) == {5, 9, 20}
        assert residency.tally.evictions == 0 and residency.tally.hits == 3
        stream_all(residency, store, 2, range(24))
        assert residency.resident(2) == {5, 9, 20}
        check_books(residency)


def test_reads_are_kept_ahead_of_the_consumer(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="whole_layer", slots=1, ring_records=5, ring_depth=4) as residency:
        stream = residency.stream(2, range(24))
        next(stream)
        quiet(queue)
        assert reads_of(queue) == 4, "depth reads are under way or waiting, not more"
        next(stream)
        quiet(queue)
        assert reads_of(queue) == 5


def test_the_ring_reads_the_next_pool_ahead_and_uses_it(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=2, ring_records=6) as residency:
        stream_all(residency, store, 0, range(16), read_ahead=(1, range(12)))
        quiet(queue)
        assert reads_of(queue) == 16 + 6
        stall_ns = residency.tally.stall_ns
        stream = residency.stream(1, range(12))
        for expert in range(6):
            position, address = next(stream)
            assert position == expert and store.holds(1, expert, address)
        assert residency.tally.stall_ns == stall_ns, "what was read ahead needs no waiting"
        assert [position for position, _ in stream] == list(range(6, 12))
        c = residency.counters()
        assert reads_of(queue) == 16 + 12
        assert c["prefetch_used"] == c["prefetch_on_time"] == 6 and c["prefetch_wasted"] == 0
        check_books(residency)


def test_read_ahead_that_was_wrong_is_waste_and_costs_nothing_else(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=2, ring_records=4) as residency:
        stream_all(residency, store, 0, range(8), read_ahead=(1, [8, 9, 10, 11]))
        quiet(queue)
        stream_all(residency, store, 1, [0, 1, 9])
        c = residency.counters()
        assert c["prefetch_used"] == 1 and c["prefetch_wasted"] == 3
        assert c["waste_ratio"] == 0.75
        assert reads_of(queue) == 8 + 4 + 2
        check_books(residency)


def test_a_ring_full_of_later_experts_makes_room_for_an_earlier_one(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=2, ring_records=4) as residency:
        stream_all(residency, store, 0, [0], read_ahead=(2, [20, 21, 22, 23]))
        quiet(queue)
        stream_all(residency, store, 2, range(24))
        check_books(residency)


def test_read_ahead_skips_what_is_resident(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=4, ring_records=4) as residency:
        take_all(residency, store, 1, [0, 2])
        stream_all(residency, store, 0, [0, 1], read_ahead=(1, [0, 1, 2, 3]))
        quiet(queue)
        assert reads_of(queue) == 2 + 2 + 2
        stream_all(residency, store, 1, [0, 1, 2, 3])
        assert reads_of(queue) == 6


@pytest.mark.parametrize("nth", range(1, 20))
def test_a_stream_whose_nth_read_fails_names_the_expert_and_can_be_repeated(
    store: RecordFile, queue: ReadQueue, nth: int
) -> None:
    with Residency(store, queue, path="hot", slots=3, ring_records=4) as residency:
        take_all(residency, store, 0, [2, 8])
        queue.inject(nth, "eio")
        for pool, experts, ahead in ((0, range(10), (1, range(12))), (1, range(12), (0, range(10)))):
            try:
                stream_all(residency, store, pool, experts, read_ahead=ahead)
            except ReadError as error:
                assert error.where is not None and error.where.startswith(f"pool {pool} expert ")
                check_books(residency)
                stream_all(residency, store, pool, experts, read_ahead=ahead)
            assert residency.resident(0) == {2, 8}
        quiet(queue)
        check_books(residency)
        assert queue.stats()["failed"] == 1


def test_a_stream_that_was_left_is_taken_over_by_the_next(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=4, ring_records=4) as residency:
        take_all(residency, store, 0, [1, 3])
        left = residency.stream(0, range(16))
        next(left)
        next(left)
        stream_all(residency, store, 1, range(12))
        with pytest.raises(StokerError, match="another stream"):
            next(left)
        take_all(residency, store, 0, [4, 5, 6, 7])  # the pins of the stream that was left are gone
        check_books(residency)


def test_a_stream_pins_the_resident_experts_that_it_will_use(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=3, ring_records=4) as residency:
        take_all(residency, store, 2, [10, 11, 12])
        stream = residency.stream(2, [0, 10, 11, 12, 20])
        next(stream)
        assert residency.prefetch(2, [7, 8]) == 0
        for position, address in stream:
            assert store.holds(2, [0, 10, 11, 12, 20][position], address)
        assert residency.prefetch(2, [7, 8]) == 2


def test_a_stream_uses_a_hot_prefetch_that_is_under_way(store: RecordFile, narrow: ReadQueue) -> None:
    with Residency(store, narrow, path="hot", slots=3, ring_records=4) as residency:
        narrow.inject(1, "delay", delay_ns=SLOW_NS)
        residency.prefetch(2, [4, 5])
        stream_all(residency, store, 2, [3, 4, 5, 6])
        assert reads_of(narrow) == 4
        assert residency.tally.prefetch_late == 2


def test_a_stream_leaves_what_decoding_will_want_in_free_slots(store: RecordFile, queue: ReadQueue) -> None:
    """Pool 2 has the longest records, so its slots and the ring's can change places."""
    with Residency(store, queue, path="hot", slots=4, ring_records=4) as residency:
        take_all(residency, store, 2, [20])
        stream_all(residency, store, 1, [0], read_ahead=(2, [0, 1, 2]))
        stream_all(residency, store, 2, range(24), keep=[7, 20, 1, 9, 11])
        assert residency.resident(2) == {20, 7, 1, 9}
        before = reads_of(queue)
        assert take_all(residency, store, 2, [1, 7, 9, 20]) == [[1, 7, 9, 20]]
        stream_all(residency, store, 2, range(24), keep=range(24))
        assert residency.resident(2) == {20, 7, 1, 9}, "nothing leaves for what a stream would like to keep"
        assert reads_of(queue) - before == 20
        take_all(residency, store, 2, [2, 3, 5])
        check_books(residency)


def test_a_stream_of_more_answers_than_slots_keeps_what_is_asked_most(store: RecordFile, queue: ReadQueue) -> None:
    """Three experts that every step wants get the slots, however many others pass by, and are read once."""
    with Residency(store, queue, path="hot", slots=3, ring_records=4) as residency:
        take_all(residency, store, 2, [20, 21, 22])
        for step in range(6):
            passing = [9 + 2 * step, 10 + 2 * step]
            before = reads_of(queue)
            stream_all(residency, store, 2, [1, 5, *passing, 6], demand=[5, 1, 6, *passing])
            assert reads_of(queue) - before == (5 if step == 0 else 2)
            check_books(residency)
        assert residency.resident(2) == {1, 5, 6}
        stream_all(residency, store, 2, range(24), demand=[1])
        assert residency.resident(2) == {1, 5, 6}, "a prompt beside the answers changes nothing"
        with residency.acquire(2, [1, 5]) as lease:
            assert lease.all_present
            stream_all(residency, store, 2, list(range(7, 17)), demand=range(7, 17))
            assert {1, 5} <= residency.resident(2), "what a lease holds does not leave"
            assert [store.holds(2, e, a) for e, a in zip([1, 5], lease.addresses, strict=True)] == [True, True]
        check_books(residency)


def test_a_free_slot_that_was_taken_meanwhile_is_not_given_twice(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", slots=3, ring_records=4) as residency:
        stream = residency.stream(2, range(24), keep=[1, 2, 3])
        next(stream)
        assert residency.prefetch(2, [21, 22]) == 2
        for position, address in stream:
            assert store.holds(2, position, address)
        assert residency.resident(2) == {1, 21, 22}
        assert reads_of(queue) == 24, "what the decode set has begun to read is not read through the ring again"
        check_books(residency)


def test_an_error_in_a_wave_reaches_the_lease(queue: ReadQueue, tmp_path: Path) -> None:
    """A consumer that is busy while the read of another expert fails must not have it read again in silence."""
    cut = RecordFile.write(tmp_path / "cut.bin", (8,), (2,))
    with cut.path.open("r+b") as file:
        file.truncate(BLOCK + 7 * 2 * BLOCK + BLOCK)
    for path in ("hot", "staged", "exact"):
        failed = queue.stats()["failed"]
        with Residency(cut, queue, path=path, slots=3) as residency:
            queue.inject(1, "delay", delay_ns=5_000_000)
            with residency.acquire(0, [7, 0, 1, 2, 3, 4, 5, 6]) as lease, pytest.raises(ReadError, match="expert 7"):
                for _ in lease.arrivals():
                    time.sleep(0.02)
            assert queue.stats()["failed"] - failed == 1
            take_all(residency, cut, 0, [0, 1, 2, 3, 4, 5, 6])


# What is held.


def test_what_is_not_held_is_read_along(store: RecordFile, queue: ReadQueue) -> None:
    """As many experts as slots: all of them are there when the hold has settled, and demand finds room all the same."""
    with Residency(store, queue, path="hot", slots=6) as residency:
        assert residency.hold("me", 0, [1, 2, 3, 4, 5, 6], 2) == 4
        residency.settle_holds()
        assert residency.resident(0) == {1, 2, 3, 4, 5, 6}
        before = reads_of(queue)
        take_all(residency, store, 0, [5, 1, 6])
        assert reads_of(queue) == before
        take_all(residency, store, 0, [8, 9])
        assert {1, 2, 3, 4} <= residency.resident(0)
        check_books(residency)


def test_what_is_held_stays_and_leaves_room(store: RecordFile, queue: ReadQueue) -> None:
    """Held experts outlive a flood of demand; two slots stay for others; letting go lets them leave."""
    with Residency(store, queue, path="hot", slots=6) as residency:
        assert residency.hold("me", 0, [1, 2, 3, 4, 5], 2) == 4
        residency.settle_holds()
        assert residency.resident(0) == {1, 2, 3, 4, 5}
        for expert in range(6, 16):
            take_all(residency, store, 0, [expert])
        assert {1, 2, 3, 4} <= residency.resident(0)
        before = reads_of(queue)
        assert take_all(residency, store, 0, [4, 1, 3])[0] == [4, 1, 3] and reads_of(queue) == before
        assert residency.hold("you", 0, [3, 9], 2) == 1, "one that is held already needs no slot"
        assert residency.hold("me", 0, [], 2) == 0 and residency.hold("you", 0, [], 2) == 0
        for expert in range(6, 16):
            take_all(residency, store, 0, [expert])
        assert not {1, 2, 4} & residency.resident(0)
        check_books(residency)
