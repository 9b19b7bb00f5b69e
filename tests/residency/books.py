"""Checks that every slot is accounted for; helpers that use a lease or a stream and compare all bytes with the file."""

from collections.abc import Sequence

from stoker.residency import Residency
from stoker.residency.exact import ExactSlots, Scratch
from stoker.residency.hot import HotSlots
from stoker.residency.kept import KeptSlots
from stoker.residency.slots import NO_TICKET
from tests.residency.records import RecordFile


def take_all(residency: Residency, store: RecordFile, pool: int, experts: Sequence[int]) -> list[list[int]]:
    """Acquire, compare every address as it comes, release; the groups of experts in the order of arrival."""
    groups = []
    with residency.acquire(pool, experts) as lease:
        for positions, addresses in lease.arrivals():
            assert len(positions) == len(addresses)
            for position, address in zip(positions, addresses, strict=True):
                assert store.holds(pool, experts[position], address)
            groups.append([experts[position] for position in positions])
    assert sorted(expert for group in groups for expert in group) == sorted(experts)
    return groups


def stream_all(
    residency: Residency,
    store: RecordFile,
    pool: int,
    experts: Sequence[int],
    read_ahead: tuple[int, Sequence[int]] | None = None,
    keep: Sequence[int] = (),
    demand: Sequence[int] = (),
) -> None:
    """With `demand` the residents come first."""
    seen = []
    for position, address in residency.stream(pool, experts, read_ahead=read_ahead, keep=keep, demand=demand):
        assert store.holds(pool, experts[position], address)
        seen.append(experts[position])
    assert sorted(seen) == sorted(experts)
    assert demand or seen == sorted(experts)


def check_books(residency: Residency) -> None:
    """No slot is lost, doubled, or handed out while it is not whole."""
    for home in residency._homes:
        if isinstance(home, KeptSlots):
            _check_kept(home)
        elif isinstance(home, ExactSlots):
            _check_scratch(home._scratch, 0)
    _check_scratch(residency._ring._scratch, len(residency._ring._held))
    addresses = [slot.address for slot in residency._slots]
    assert len(set(addresses)) == len(addresses)


def _check_kept(home: KeptSlots) -> None:
    in_use = [*home.held.values(), *home._free]
    assert len(in_use) == home.capacity
    assert len({id(slot) for slot in in_use}) == home.capacity
    for expert, slot in home.held.items():
        assert (slot.pool, slot.expert) == (home.pool, expert)
        assert (slot.ticket != NO_TICKET) == (expert in home.reading)
        assert home.table[expert] == (0 if expert in home.reading else slot.address)
    assert {expert for expert, address in enumerate(home.table) if address} == home.held.keys() - home.reading.keys()
    assert home.whole == len(home.held) - len(home.reading)
    assert all(slot.ticket == NO_TICKET and slot.expert < 0 for slot in home._free)
    if isinstance(home, HotSlots):
        assert set(home.policy) == set(home.held)


def _check_scratch(scratch: Scratch, held: int) -> None:
    """Only when no lease is open: everything is free, draining, or held by the ring."""
    assert len(scratch._free) + len(scratch._draining) + held == scratch.size
    assert len({id(slot) for slot in [*scratch._free, *scratch._draining]}) == scratch.size - held
