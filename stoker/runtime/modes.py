"""From `--routing` and `--adapter` to what runs: the adapter, checked against the store, and the rule between gates
and experts.

Everything here is decided before a weight is read. `gate` without an adapter is the default and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.adapter.adapter import Adapter, model_top_k, open_adapter
from stoker.errors import OptionError
from stoker.routing.gate import GateRule
from stoker.routing.prerouter import Prerouter
from stoker.routing.rule import RoutingRule
from stoker.runtime.heads import NativeHeads, heads_bytes

if TYPE_CHECKING:
    from stoker.runtime.plan import Options
    from stoker.store.reader import Store

MODES = ("gate", "prerouter")


@dataclass(frozen=True)
class Mode:
    """`routing`: the mode's name; adapter: None where there is none."""

    routing: str
    adapter: Adapter | None = None

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
        if self.adapter is not None:
            told |= {"top_k": self.adapter.manifest.top_k, "adapter": self.adapter.about()}
        return told


def resolve_mode(store: Store, options: Options) -> Mode:
    """Raises OptionError for a mode that is unknown or lacks its adapter, AdapterError for an adapter of another store.

    No mode named: an adapter with heads means the prerouter, anything else the gate.
    """
    adapter = None if options.adapter is None else open_adapter(options.adapter, store)
    has_heads = adapter is not None and bool(adapter.heads)
    routing = options.routing or ("prerouter" if has_heads else "gate")
    if routing not in MODES:
        raise OptionError("unknown routing mode", where="--routing", expected=", ".join(MODES), got=routing)
    if routing == "prerouter" and not has_heads:
        raise OptionError(
            "the prerouter needs an adapter with heads", where="--routing prerouter",
            expected="--adapter DIR", got="none" if adapter is None else f"{options.adapter}, which has no heads",
            remedy="train heads, or make untrained ones with `stoker adapter init` (docs/adapters.md)",
        )  # fmt: skip
    return Mode(routing, adapter)


def rule_of(mode: Mode, store: Store) -> RoutingRule | None:
    """The rule that a mode puts between gates and experts; None where the gates' routes stay."""
    if mode.routing == "prerouter":
        assert mode.adapter is not None
        return Prerouter(NativeHeads(mode.adapter.heads), top_k=mode.adapter.manifest.top_k)
    if mode.adapter is not None and mode.adapter.manifest.top_k != model_top_k(store):
        return GateRule(mode.adapter.manifest.top_k)
    return None
