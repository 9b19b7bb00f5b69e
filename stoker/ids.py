"""Names for the things that every part of stoker speaks of. Owns no behaviour; imports nothing.

An expert is named by the pool that it lives in and its index there, never by a layer: layers may share a pool.
"""

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One expert: `pool` indexes the store's pools, `expert` runs from 0 to the pool's expert count."""

    pool: int
    expert: int


class Extent(NamedTuple):
    """A contiguous run of bytes in a file of the store: `file` is an absolute path, the rest are bytes."""

    file: str
    offset: int
    length: int
