"""The cache policies by name, one file each. Keys only: the engine and the simulator run the same objects."""

from typing import Any

from stoker.errors import OptionError
from stoker.residency.policies.arc import ARC
from stoker.residency.policies.base import Policy
from stoker.residency.policies.decayed_lfu import DecayedLFU
from stoker.residency.policies.fifo import FIFO
from stoker.residency.policies.lfru import LFRU
from stoker.residency.policies.lfu import LFU
from stoker.residency.policies.lru import LRU
from stoker.residency.policies.s3_fifo import S3FIFO
from stoker.residency.policies.static import Static

POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (LRU, FIFO, LFU, DecayedLFU, LFRU, S3FIFO, ARC, Static)}

__all__ = ["ARC", "FIFO", "LFRU", "LFU", "LRU", "POLICIES", "S3FIFO", "DecayedLFU", "Policy", "Static", "make_policy"]


def make_policy(name: str, capacity: int, **options: Any) -> Policy:
    """A policy for one cache of `capacity` keys.

    `name`: one of POLICIES; `decayed-lfu:64` sets the half-life in events. Options are the class's own
    (`half_life` of decayed-lfu; `ranking` and `transient` of static). Raises OptionError for anything else.
    """
    base, _, argument = name.partition(":")
    if base not in POLICIES:
        raise OptionError("unknown cache policy", where="policy", expected=", ".join(POLICIES), got=name)
    if argument:
        options = {**options, **_argument(base, argument)}
    try:
        return POLICIES[base](capacity, **options)
    except TypeError as error:
        raise OptionError(f"policy {base} has no such option", where="policy", got=", ".join(options)) from error


def _argument(base: str, argument: str) -> dict[str, Any]:
    """`64` in `decayed-lfu:64`; no other policy takes an argument."""
    try:
        if base == DecayedLFU.name:
            return {"half_life": float(argument)}
    except ValueError:
        pass
    expected = "decayed-lfu:HALF_LIFE"
    raise OptionError("an argument that does not apply", where="policy", expected=expected, got=f"{base}:{argument}")
