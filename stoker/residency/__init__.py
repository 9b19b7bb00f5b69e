"""Which experts are in memory: slots, the one place that waits, the four paths, prefetch and cache policies."""

from stoker.residency.counters import Counters, ratios
from stoker.residency.lease import Lease
from stoker.residency.plan import PATHS, PoolSize, SlotPlan, plan_slots
from stoker.residency.residency import Residency

__all__ = ["PATHS", "Counters", "Lease", "PoolSize", "Residency", "SlotPlan", "plan_slots", "ratios"]
