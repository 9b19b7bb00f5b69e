"""What a cache policy is: it decides which resident key leaves when another must come in.

Knows keys only: no clock, no I/O, no torch, no model. The engine and the simulator run the same objects. One event is
one (step, pool) with the set of keys that it needs: hits are taken against the residents before the event, then
`touch(all keys)`, then `admit` for each miss with `protected` = the event's keys (event-atomic replay).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, ClassVar

from stoker.errors import BudgetError, OptionError


class Policy(ABC):
    """Residents of one cache of `capacity` keys. `resident` holds exactly the resident keys, for fast membership
    tests."""

    name: ClassVar[str]
    bypasses: bool = False
    """True where `admit(key)` may return `key` itself: it was served but not kept."""

    resident: Any  # a dict (ordered or not) whose keys are the resident keys

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise OptionError("a cache needs at least one slot", where="capacity", expected=">= 1", got=capacity)
        self.capacity = capacity
        self.resident = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self.resident

    def __len__(self) -> int:
        return len(self.resident)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.resident)

    def access(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """One whole event: touch all, admit the misses. Returns the misses, in the order of `keys`. Keys are unique."""
        resident = self.resident
        misses = [key for key in keys if key not in resident]
        self.touch(keys)
        self._admit_all(misses, keys)
        return misses

    def admit(self, key: Hashable, protected: Collection[Hashable]) -> Hashable | None:
        """Make `key` resident. Returns the evicted key, never one of `protected`; None if there was room.

        A key that was not touched (a prefetch) comes in with the history that it has; protect it until its use.
        Raises BudgetError when every resident key is protected.
        """
        assert key not in self.resident, f"{key!r} is resident already"
        victim = self._evict(key, protected) if len(self.resident) >= self.capacity else None
        self._insert(key)
        return victim

    def resize(self, capacity: int) -> list[Hashable]:
        """Change the capacity. Returns the evicted keys, worst first."""
        if capacity < 1:
            raise OptionError("a cache needs at least one slot", where="capacity", expected=">= 1", got=capacity)
        self.capacity = capacity
        evicted = []
        while len(self.resident) > capacity:
            evicted.append(self._evict(None, ()))
        return evicted

    def _admit_all(self, keys: Sequence[Hashable], protected: Collection[Hashable]) -> None:
        """The misses of one event, as if each were admitted after the other. For policies that rank once an event."""
        for key in keys:
            self.admit(key, protected)

    @abstractmethod
    def touch(self, keys: Sequence[Hashable]) -> None:
        """Note one event: every key that it needs, resident or not."""

    @abstractmethod
    def remove(self, key: Hashable) -> None:
        """Drop a resident key that the caller gives up (a failed read, a cancelled prefetch)."""

    @abstractmethod
    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        """Choose a resident key outside `protected`, remove it and return it. `incoming` is what it makes room for."""

    @abstractmethod
    def _insert(self, key: Hashable) -> None:
        """Add `key`; there is room."""


def first_unprotected(keys: Collection[Hashable], protected: Collection[Hashable]) -> Hashable:
    """The first of `keys` (worst first) that is not protected. Raises BudgetError when there is none."""
    for key in keys:
        if key not in protected:
            return key
    raise all_protected(len(keys), protected)


def all_protected(slots: int, protected: Collection[Hashable]) -> BudgetError:
    return BudgetError(
        "every resident expert is in use, so none can make room",
        where="cache",
        expected="more slots than one step needs",
        got=f"{slots} residents considered, {len(protected)} protected",
        remedy="give the pool more slots (a larger memory budget) or run smaller steps",
    )
