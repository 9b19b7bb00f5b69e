"""A fixed set of hot keys that never leave, chosen beforehand by popularity: the baseline that LRU beats.

Other keys pass through `transient` slots, first in first out; with none, they are served and not kept (`admit` returns
the key itself, which only a caller with scratch slots of its own can use: the simulator).
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

from stoker.errors import OptionError
from stoker.residency.policies.base import Policy, all_protected


class Static(Policy):
    """`ranking`: keys, most popular first; the first `capacity - transient` of them stay once they have come in."""

    name = "static"

    def __init__(self, capacity: int, ranking: Sequence[Hashable] | None = None, transient: int = 0) -> None:
        super().__init__(capacity)
        if ranking is None:
            raise OptionError(
                "the static policy needs to know which experts are hot",
                where="policy static",
                expected="a ranking of the pool's experts, most popular first",
                remedy="pass a ranking counted from a trace, or choose another policy",
            )
        if not 0 <= transient <= capacity:
            raise OptionError("transient slots", where="policy static", expected=f"0 to {capacity}", got=transient)
        self._ranking = list(ranking)
        self._transient_slots = transient
        self.resident: dict[Hashable, bool] = {}  # key -> is it hot
        self._transient: OrderedDict[Hashable, None] = OrderedDict()
        self._choose_hot()

    def touch(self, keys: Sequence[Hashable]) -> None:
        """The set was fixed beforehand."""

    def admit(self, key: Hashable, protected: Collection[Hashable]) -> Hashable | None:
        if key not in self._hot and not self._transient_slots:
            return key
        return super().admit(key, protected)

    def remove(self, key: Hashable) -> None:
        del self.resident[key]
        self._transient.pop(key, None)

    def resize(self, capacity: int) -> list[Hashable]:
        self.capacity = capacity
        self._transient_slots = min(self._transient_slots, capacity)
        self._choose_hot()
        for key in self.resident:
            hot = key in self._hot
            self.resident[key] = hot
            if not hot:
                self._transient.setdefault(key)
        evicted: list[Hashable] = []
        while len(self._transient) > self._transient_slots and len(self.resident) > 0:
            key, _ = self._transient.popitem(last=False)
            del self.resident[key]
            evicted.append(key)
        return evicted

    def _choose_hot(self) -> None:
        self._hot = frozenset(self._ranking[: self.capacity - self._transient_slots])
        self.bypasses = self._transient_slots == 0

    def _evict(self, incoming: Hashable | None, protected: Collection[Hashable]) -> Hashable:
        for key in self._transient:
            if key not in protected:
                self.remove(key)
                return key
        raise all_protected(len(self._transient), protected)

    def _insert(self, key: Hashable) -> None:
        hot = key in self._hot
        self.resident[key] = hot
        if not hot:
            self._transient[key] = None
