"""From a command's options to the settings of the routing modes that have some: read, given defaults, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import OptionError
from stoker.routing.cache_aware import CacheAwareOptions
from stoker.routing.roster_options import DELTA, SHARE, Prefix, RosterOptions

RuleSettings = RosterOptions | CacheAwareOptions
OPTIONS = {
    "roster": {
        "roster_size": "--roster-size",
        "pin_after": "--pin-after",
        "delta": "--delta",
        "shift": "--shift/--no-shift",
    },
    "cache-aware": {"cache_lambda": "--lambda", "keep_best": "--keep-best", "own_slots": "--own-slots"},
}


def check_settings(routing: str, options: Any) -> None:
    """Raises OptionError for an option of another mode than `routing`."""
    for mode, names in OPTIONS.items():
        for name, flag in names.items():
            if mode != routing and getattr(options, name) is not None:
                raise OptionError(
                    f"has no effect without --routing {mode}",
                    where=flag,
                    got=getattr(options, name),
                    remedy=f"add --routing {mode}, or leave it out",
                )


def roster_settings(options: Any, experts: int, top_k: int, trained: Mapping[str, Any] | None = None) -> RosterOptions:
    """options: roster_size, pin_after, delta, shift, None where nobody said: then as an adapter was `trained`
    (RosterOptions.as_dict), or a quarter of the experts, at least 2 K; shifts are on, though training has none.
    Raises OptionError."""
    said = dict(trained or {})
    sizes = said.get("sizes", [min(experts, max(experts // 4, 2 * top_k))])
    size = options.roster_size or ",".join(map(str, sizes))
    pin_after = options.pin_after or said.get("pin_after", str(Prefix(share=SHARE)))
    delta = float(said.get("delta", DELTA)) if options.delta is None else options.delta
    return RosterOptions.parse(size, pin_after, delta, shift=options.shift is not False)


def cache_aware_settings(options: Any) -> CacheAwareOptions:
    """options: cache_lambda, keep_best, own_slots, None where nobody said. Raises OptionError."""
    default = CacheAwareOptions()
    return CacheAwareOptions(
        default.lead if options.cache_lambda is None else options.cache_lambda,
        default.always if options.keep_best is None else options.keep_best,
        default.slots if options.own_slots is None else options.own_slots,
    )
