"""Which experts are in memory: slots, the one place that waits, the four paths, prefetch and cache policies.

Names are looked up when they are used, so that the policies alone (simulator, server) load neither the native core nor
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.residency.counters import Counters, ratios
    from stoker.residency.lease import Lease
    from stoker.residency.plan import PATHS, PoolSize, SlotPlan, plan_slots
    from stoker.residency.residency import Residency

__all__ = ["PATHS", "Counters", "Lease", "PoolSize", "Residency", "SlotPlan", "plan_slots", "ratios"]

_HOMES = {
    "counters": ("Counters", "ratios"),
    "lease": ("Lease",),
    "plan": ("PATHS", "PoolSize", "SlotPlan", "plan_slots"),
    "residency": ("Residency",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"stoker.residency.{module}"), name)
    raise AttributeError(f"module 'stoker.residency' has no attribute {name!r}")
