"""From `--routing` and `--adapter` to what runs: the adapter, checked against the store, and the rule between gates
and experts.

Everything here is decided before a weight is read. `gate` without an adapter is the default and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stoker.adapter.adapter import Adapter, model_top_k, open_adapter
from stoker.adapter.lora import Lora
from stoker.errors import OptionError
from stoker.routing.cache_aware import CacheAwareOptions, CacheAwareRule
from stoker.routing.gate import GateRule
from stoker.routing.prerouter import Prerouter
from stoker.routing.roster_options import RosterOptions
from stoker.routing.rosters import RosterRule
from stoker.routing.rule import RoutingRule
from stoker.routing.settings import RuleSettings, cache_aware_settings, check_settings, roster_settings
from stoker.runtime.heads import NativeHeads, heads_bytes
from stoker.runtime.lora import lora_bytes

if TYPE_CHECKING:
    from stoker.runtime.plan import Options
    from stoker.store.reader import Store

MODES = ("gate", "prerouter", "roster", "cache-aware")
DEFAULT_LORA = ""  # the name by which sequences take the LoRA of `--adapter`


@dataclass(frozen=True)
class Mode:
    """`routing`: the mode's name; adapter: None where there is none; settings: of the modes that have some; named:
    further adapters, of which the LoRA counts; fell_back_from: the mode that broke its bound."""

    routing: str
    adapter: Adapter | None = None
    settings: RuleSettings | None = None
    named: Mapping[str, Adapter] = field(default_factory=dict)
    fell_back_from: str | None = None

    @property
    def changes_output(self) -> bool:
        return self.routing != "gate" or self.adapter is not None

    def fall_back(self) -> Mode:
        """The gates' own routes from now on; what an adapter adds to the weights stays."""
        keeps = self.adapter is not None and self.adapter.manifest.lora is not None
        adapter = self.adapter if keeps else None
        return replace(self, routing="gate", adapter=adapter, settings=None, fell_back_from=self.routing)

    @property
    def heads(self) -> bool:
        return self.routing == "prerouter"

    @property
    def nbytes(self) -> int:
        """What it holds in memory, for the ledger."""
        heads = heads_bytes(self.adapter.heads) if self.adapter is not None and self.heads else 0
        return heads + sum(lora_bytes(lora) for lora in self.loras.values())

    @cached_property
    def loras(self) -> dict[str, Lora]:
        """By the name that a sequence gives."""
        found = {name: adapter.lora for name, adapter in self.named.items()}
        if self.adapter is not None and self.adapter.lora:
            found[DEFAULT_LORA] = self.adapter.lora
        return found

    def about(self, name: str | None = None) -> dict[str, Any]:
        """What is told in results, /v1/models and traces; name: of a sequence's own adapter."""
        adapter = self.adapter if name is None else self.named[name]
        changes = self.changes_output or adapter is not None
        told: dict[str, Any] = {"mode": self.routing if changes else "exact", "lossless": not changes}
        if self.settings is not None:
            told["settings"] = self.settings.as_dict()
        if self.adapter is not None:
            told["top_k"] = self.adapter.manifest.top_k
        if adapter is not None:
            told["adapter"] = adapter.about() | ({} if name is None else {"name": name})
        if self.fell_back_from is not None:
            told["fell_back_from"] = self.fell_back_from
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
    named = {name: _named(name, path, store) for name, path in options.loras}
    if routing not in ("roster", "cache-aware"):
        return Mode(routing, adapter, named=named)
    if adapter is not None and adapter.manifest.top_k != model_top_k(store):
        raise OptionError(
            f"{routing} and an adapter with another number of experts a token do not go together",
            where=f"--routing {routing}",
            expected=f"K {model_top_k(store)}",
            got=f"K {adapter.manifest.top_k}",
        )
    experts = min(pool.experts for pool in store.pools)
    if routing == "roster":
        return Mode(routing, adapter, roster_settings(options, experts, model_top_k(store), trained), named)
    return Mode(routing, adapter, cache_aware_settings(options), named)


def _named(name: str, path: str, store: Store) -> Adapter:
    """An adapter of which sequences take the LoRA: what is the whole model's cannot be one sequence's."""
    adapter = open_adapter(path, store)
    if not name or not adapter.lora or adapter.heads or adapter.manifest.top_k != model_top_k(store):
        raise OptionError(
            "only a LoRA can be asked for by name", where=f"--lora {name}={path}", expected="NAME=DIR, a LoRA alone",
            got=f"{len(adapter.heads)} heads, {len(adapter.lora)} linears, K {adapter.manifest.top_k}",
            remedy="give heads and K by --adapter",
        )  # fmt: skip
    return adapter


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
