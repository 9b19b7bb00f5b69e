"""How slots are counted: the plan is the arena to the byte, splits evenly, and refuses what cannot work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BudgetError, OptionError
from stoker.native.io import ReadQueue
from stoker.residency import PATHS, PoolSize, Residency, plan_slots
from stoker.residency.plan import split_evenly
from tests.residency.records import RecordFile

BLOCK = 4096
pool_sizes = st.lists(st.builds(PoolSize, st.integers(1, 64), st.integers(1, 8).map(lambda n: n * BLOCK)), min_size=1)


@given(sizes=pool_sizes, blocks=st.integers(0, 4000))
def test_an_even_split_wastes_less_than_a_slot(sizes: list[PoolSize], blocks: int) -> None:
    counts = split_evenly(blocks * BLOCK, sizes)
    left = blocks * BLOCK - sum(count * size.record_bytes for count, size in zip(counts, sizes, strict=True))
    assert left >= 0
    unfilled = [(count, size) for count, size in zip(counts, sizes, strict=True) if count < size.experts]
    assert all(count <= size.experts for count, size in zip(counts, sizes, strict=True))
    if unfilled:
        assert left < max(size.record_bytes for _, size in unfilled) + sum(size.record_bytes for _, size in unfilled)
        assert max(count for count, _ in unfilled) - min(count for count, _ in unfilled) <= 1


@pytest.mark.parametrize("path", PATHS)
@given(sizes=pool_sizes, blocks=st.integers(0, 4000))
def test_a_plan_stays_inside_its_arena(path: str, sizes: list[PoolSize], blocks: int) -> None:
    try:
        plan = plan_slots(path, sizes, arena_bytes=blocks * BLOCK)
    except BudgetError as error:
        least = int(str(error.expected).split()[2])
        assert least > blocks * BLOCK
        plan = plan_slots(path, sizes, arena_bytes=least)
        blocks = least // BLOCK
    assert plan.total_bytes <= blocks * BLOCK
    assert plan.ring >= 2
    if path in ("auto", "hot", "staged"):
        assert min(plan.kept) >= 1 and plan.scratch == 0
    else:
        assert plan.kept_bytes == 0 and (plan.scratch >= 1) == (path == "exact")


def test_slots_are_taken_as_given_and_never_more_than_experts() -> None:
    sizes = [PoolSize(8, BLOCK), PoolSize(4, 2 * BLOCK)]
    assert plan_slots("hot", sizes, slots=[3, 9]).kept == (3, 4)
    assert plan_slots("hot", sizes, slots=5, ring_records=7).kept == (5, 4)
    plan = plan_slots("exact", sizes, slots=[6, 3], ring_records=4)
    assert (plan.scratch, plan.ring, plan.total_bytes) == (6, 4, 10 * 2 * BLOCK)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": [3]},
        {"slots": [3, 0]},
        {"slots": 0},
        {"slots": 3, "arena_bytes": 1 << 20},
        {},
        {"slots": 3, "ring_records": 1},
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict) -> None:
    with pytest.raises(OptionError):
        plan_slots("hot", [PoolSize(8, BLOCK), PoolSize(8, BLOCK)], **options)


def test_the_arena_is_as_large_as_the_plan_says(store: RecordFile, queue: ReadQueue) -> None:
    with Residency(store, queue, path="hot", arena_bytes=60 * BLOCK, ring_records=3) as residency:
        assert residency.arena.nbytes == residency.plan.total_bytes <= 60 * BLOCK
        assert residency.plan.kept == (6, 5, 5) or max(residency.plan.kept) - min(residency.plan.kept) <= 1
        assert [residency.slots(pool) for pool in range(3)] == list(residency.plan.kept)
