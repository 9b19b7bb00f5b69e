"""First in, first out: the key that was admitted earliest leaves, whatever its uses. All operations O(1)."""

from collections.abc import Hashable, Sequence

from stoker.residency.policies.lru import LRU


class FIFO(LRU):
    """LRU that does not look at uses: only the order of admission remains."""

    name = "fifo"

    def touch(self, keys: Sequence[Hashable]) -> None:
        pass
