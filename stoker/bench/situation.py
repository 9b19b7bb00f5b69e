"""A store, a budget and a machine as the planner wants them. Opens the store's headers; loads nothing."""

from pathlib import Path

from stoker.bench.budgets import Divider
from stoker.bench.outlook import Assumptions, setting_of
from stoker.bench.shapes import shape_of
from stoker.plan.forecast import Machine
from stoker.plan.forecast_routing import Replayed, assumed, routing_for
from stoker.plan.planner import Situation
from stoker.plan.profile import Profile
from stoker.store.reader import open_store


def situation_of(model: Path, budget: int, profile: Profile, ctx_size: int, routes: str | None) -> Situation:
    """Raises StoreError for what is no store, BudgetError, with the floor, for too small a budget and OptionError for
    routes that are not this model's."""
    store = open_store(model)
    shape = shape_of(store.config, store.manifest, str(model))
    divider = Divider(store.config, store.manifest, shape, profile.costs.process_bytes, ctx_size)
    ledger = divider.divide(budget)
    routing = routing_for(routes, shape, "--routes") if routes else assumed(shape.experts)[0]
    setting = setting_of(ledger, divider.chunk(budget), Assumptions(routing, routing, routing))
    recorded = routing.routes if isinstance(routing, Replayed) and routes and Path(routes).exists() else None
    return Situation(shape, Machine(profile), setting, routing, ledger.slots, recorded)
