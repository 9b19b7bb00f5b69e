"""Every path hands out the file's own bytes, whatever the order of calls, delays, failures and pressure."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import BudgetError, ReadError
from stoker.native.io import ReadQueue
from stoker.residency import Residency
from tests.residency.books import check_books, stream_all, take_all
from tests.residency.records import RecordFile

EXPERTS = (16, 12, 24)
PATHS = ("exact", "hot", "staged", "whole_layer", "auto")
POLICIES = ("lru", "decayed-lfu:8", "lfru", "s3-fifo", "arc", "fifo")

pools = st.integers(0, 2)


def ids(pool: int, most: int = 24) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, EXPERTS[pool] - 1), unique=True, max_size=most)


with_ids = pools.flatmap(lambda pool: st.tuples(st.just(pool), ids(pool)))
step = st.one_of(
    st.tuples(st.just("acquire"), with_ids),
    st.tuples(st.just("hold"), pools.flatmap(lambda pool: st.tuples(st.just(pool), ids(pool, 3)))),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("leave"), with_ids, st.integers(0, 3)),
    st.tuples(st.just("stream"), with_ids, with_ids),
    st.tuples(st.just("leave stream"), with_ids, with_ids, st.integers(0, 3)),
    st.tuples(st.just("disturb stream"), with_ids, with_ids, st.integers(0, 3)),
    st.tuples(st.just("ahead"), with_ids, st.sampled_from([0, 1, 10**18])),
    st.tuples(st.just("cancel"), pools),
    st.tuples(st.just("fault"), st.integers(1, 5), st.sampled_from(["eio", "short", "eof", "eintr", "delay"])),
)


class Driver:
    """Plays steps on one residency and compares what is handed out, and what open leases hold, with the file."""

    def __init__(self, residency: Residency, store: RecordFile, queue: ReadQueue) -> None:
        self.residency, self.store, self.queue = residency, store, queue
        self.faults = False
        self.open: list = []

    def play(self, step: tuple) -> None:
        kind, *details = step
        try:
            getattr(self, kind.replace(" ", "_"))(*details)
        except ReadError as error:
            assert self.faults, "no fault was injected"
            assert error.where is not None and error.where.startswith("pool ") and " expert " in error.where
        except BudgetError:
            assert self.open, "only open leases can take every slot"
        for pool, experts, lease in self.open:
            for expert, address in zip(experts, lease.addresses, strict=True):
                assert self.store.holds(pool, expert, address), "a pinned slot changed"
        if not self.open:
            check_books(self.residency)

    def acquire(self, what: tuple[int, list[int]]) -> None:
        take_all(self.residency, self.store, *what)

    def hold(self, what: tuple[int, list[int]]) -> None:
        if self.residency.path == "whole_layer":
            return
        lease = self.residency.acquire(*what)
        if lease.in_waves:
            lease.release()
            return
        for _ in lease.arrivals():
            pass
        self.open.append((*what, lease))

    def drop(self, index: int) -> None:
        if index < len(self.open):
            self.open.pop(index)[2].release()

    def leave(self, what: tuple[int, list[int]], after: int) -> None:
        with self.residency.acquire(*what) as lease:
            for count, _ in enumerate(lease.arrivals()):
                if count >= after:
                    break

    def stream(self, what: tuple[int, list[int]], ahead: tuple[int, list[int]]) -> None:
        stream_all(self.residency, self.store, *what, read_ahead=ahead, keep=what[1][::2])
        stream_all(self.residency, self.store, *what, read_ahead=ahead, demand=what[1][1::2])

    def leave_stream(self, what: tuple[int, list[int]], ahead: tuple[int, list[int]], after: int) -> None:
        for count, (position, address) in enumerate(self.residency.stream(*what, read_ahead=ahead)):
            assert self.store.holds(what[0], what[1][position], address)
            if count >= after:
                break

    def disturb_stream(self, what: tuple[int, list[int]], other: tuple[int, list[int]], after: int) -> None:
        """Calls of every other kind while a stream is under way, on any pool."""
        asked = {"demand": what[1][::2]} if after % 2 else {"keep": what[1]}
        for count, (position, address) in enumerate(self.residency.stream(*what, **asked)):
            assert self.store.holds(what[0], what[1][position], address)
            if count == after:
                self.ahead(what, 0)
                self.ahead(other, 0)
                if self.residency.path != "whole_layer":  # there, an acquire is a stream itself
                    with suppress(BudgetError):  # a stream pins what it will use
                        self.acquire(other)
                assert self.store.holds(what[0], what[1][position], address)

    def ahead(self, what: tuple[int, list[int]], deadline_ns: int) -> None:
        if self.residency.path == "staged":
            self.residency.stage(*what)
        elif self.residency.path in ("hot", "auto"):
            self.residency.prefetch(*what, deadline_ns=deadline_ns)

    def cancel(self, pool: int) -> None:
        if self.residency.path in ("hot", "auto", "staged"):
            self.residency.cancel_prefetches(pool)

    def fault(self, nth: int, kind: str) -> None:
        self.faults = self.faults or kind not in ("delay", "eintr")
        self.queue.inject(nth, kind, delay_ns=2_000_000)

    def settle_down(self) -> None:
        """Whatever happened before, everything can be had afterwards."""
        for *_, lease in self.open:
            lease.release()
        self.open.clear()
        for _ in range(40):  # faults that are still planned hit reads of these attempts
            with suppress(ReadError):
                for pool, count in enumerate(EXPERTS):
                    take_all(self.residency, self.store, pool, range(count))
                    stream_all(self.residency, self.store, pool, range(count))
                break
        else:
            raise AssertionError("reads go on failing without faults")
        check_books(self.residency)


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(step, max_size=14),
    slots=st.tuples(st.integers(1, 16), st.integers(1, 12), st.integers(1, 24)),
    ring=st.integers(2, 6),
    policy=st.sampled_from(POLICIES),
)
def test_any_sequence_hands_out_the_files_bytes(
    store: RecordFile, path: str, backend: str, steps: list, slots: tuple, ring: int, policy: str
) -> None:
    with (
        ReadQueue(depth=3, backend=backend) as queue,
        Residency(store, queue, path=path, slots=slots, ring_records=ring, policy=policy) as residency,
    ):
        driver = Driver(residency, store, queue)
        for one in steps:
            driver.play(one)
        driver.settle_down()
        assert residency.tally.dropped_experts == 0
        residency.close()
        assert queue.stats()["outstanding"] == 0, "a ticket was never freed"
