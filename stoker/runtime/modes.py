"""From `--routing` and `--adapter` to what runs: the adapter, checked against the store, and the rule between gates
and experts.

Everything here is decided before a weight is read. `gate` without an adapter is the default and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.adapter.adapter import Adapter, model_top_k, open_adapter
from stoker.errors import OptionError
from stoker.routing.cache_aware import CacheAwareOptions, CacheAwareRule
from stoker.routing.gate import GateRule
from stoker.routing.prerouter import Prerouter
from stoker.routing.roster_options import RosterOptions
from stoker.routing.rosters import RosterRule
from stoker.routing.rule import RoutingRule
from stoker.routing.settings import RuleSettings, cache_aware_settings, check_settings, roster_settings
from stoker.runtime.heads import NativeHeads, heads_bytes

if TYPE_CHECKING:
    from stoker.runtime.plan import Options
    from stoker.store.reader import Store

MODES = ("gate", "prerouter", "roster", "cache-aware")


@dataclass(frozen=True)
class Mode:
    """`routing`: the mode's name; adapter: None where there is none; settings: of the modes that have some."""

    routing: str
    adapter: Adapter | None = None
    settings: RuleSettings | None = None

    @property
    def changes_output(self) -> bool:
        return self.routing != "gate" or self.adapter is not None

    @property
    def heads(self) -> bool:
        return self.routing == "prerouter"

    @property
    def nbytes(self) -> int:
        """What it holds in memory, for the ledger."""
        return heads_bytes(self.adapter.heads) if self.adapter is not None and self.heads else 0

    def about(self) -> dict[str, Any]:
        """What is told in results, /v1/models and traces."""
        told: dict[str, Any] = {"mode": self.routing if self.changes_output else "exact"}
        told["lossless"] = not self.changes_output
        if self.settings is not None:
            told["settings"] = self.settings.as_dict()
        if self.adapter is not None:
            told |= {"top_k": self.adapter.manifest.top_k, "adapter": self.adapter.about()}
        return told


def resolve_mode(store: Store, options: Options) -> Mode:
    """Raises OptionError for a mode that is unknown or lacks its adapter, AdapterError for an adapter of another store.

    No mode named: an adapter with heads means the prerouter, one with rosters rosters, anything else the gate.
    """
    adapter = None if options.adapter is None else open_adapter(options.adapter, store)
    has_heads = adapter is not None and bool(adapter.heads)
    trained = adapter.manifest.roster if adapter is not None else None
    routing = options.routing or ("prerouter" if has_heads else "roster" if trained else "gate")
    if routing not in MODES:
        raise OptionError("unknown routing mode", where="--routing", expected=", ".join(MODES), got=routing)
    if routing == "prerouter" and not has_heads:
        raise OptionError(
            "the prerouter needs an adapter with heads", where="--routing prerouter",
            expected="--adapter DIR", got="none" if adapter is None else f"{options.adapter}, which has no heads",
            remedy="train heads, or make untrained ones with `stoker adapter init` (docs/adapters.md)",
        )  # fmt: skip
    check_settings(routing, options)
    if routing not in ("roster", "cache-aware"):
        return Mode(routing, adapter)
    if adapter is not None and adapter.manifest.top_k != model_top_k(store):
        raise OptionError(
            f"{routing} and an adapter with another number of experts a token do not go together",
            where=f"--routing {routing}",
            expected=f"K {model_top_k(store)}",
            got=f"K {adapter.manifest.top_k}",
        )
    experts = min(pool.experts for pool in store.pools)
    if routing == "roster":
        return Mode(routing, adapter, roster_settings(options, experts, model_top_k(store), trained))
    return Mode(routing, adapter, cache_aware_settings(options))


def rule_of(mode: Mode, store: Store) -> RoutingRule | None:
    """The rule that a mode puts between gates and experts; None where the gates' routes stay."""
    if mode.routing == "prerouter":
        assert mode.adapter is not None
        return Prerouter(NativeHeads(mode.adapter.heads), top_k=mode.adapter.manifest.top_k)
    if isinstance(mode.settings, RosterOptions):
        return RosterRule(mode.settings)
    if isinstance(mode.settings, CacheAwareOptions):
        return CacheAwareRule(mode.settings)
    if mode.adapter is not None and mode.adapter.manifest.top_k != model_top_k(store):
        return GateRule(mode.adapter.manifest.top_k)
    return None
