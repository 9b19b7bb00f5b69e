"""The forecast as a table: for each budget the ledger, speeds with a band, and a verdict in words.

Puts together what the parts know: a shape, a profile, routing, the engine's division of memory. Prints nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.bench.budgets import Divider
from stoker.errors import BudgetError
from stoker.plan.forecast import Machine, PromptForecast, Setting, TokenForecast, decode, prefill, simple
from stoker.plan.forecast_routing import Routing
from stoker.plan.profile import Profile
from stoker.plan.sizes import ModelShape
from stoker.runtime.ledger import Ledger

FLUENT_TOKENS_S, READABLE_TOKENS_S, SLOW_TOKENS_S = 8.0, 3.0, 1.0


@dataclass(frozen=True)
class Assumptions:
    """Routing: the typical one, and the worst and best for the band."""

    routing: Routing
    worst: Routing
    best: Routing
    policy: str = "lru"
    path: str = "auto"
    context: int = 512
    prompt_tokens: int = 512
    depth: int | None = None
    direct: bool = True


@dataclass(frozen=True)
class Row:
    """One budget. low, high: tokens a second at the ends of the band. refused: below the floor, why."""

    budget_bytes: int
    ledger: Ledger | None
    token: TokenForecast | None
    prompt: PromptForecast | None
    low_tokens_s: float = 0.0
    high_tokens_s: float = 0.0
    low_prompt_s: float = 0.0
    high_prompt_s: float = 0.0
    verdict: str = ""
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        if self.ledger is None or self.token is None or self.prompt is None:
            return {"budget_bytes": self.budget_bytes, "refused": self.refused}
        return {
            "budget_bytes": self.budget_bytes,
            "ledger": self.ledger.as_dict(),
            "decode": self.token.figures() | {"band_tokens_s": [self.low_tokens_s, self.high_tokens_s]},
            "prefill": self.prompt.figures() | {"band_s": [self.low_prompt_s, self.high_prompt_s]},
            "verdict": self.verdict,
        }


def setting_of(ledger: Ledger, chunk: int, assumed: Assumptions) -> Setting:
    slots = sum(ledger.slots) / len(ledger.slots)
    return Setting(
        slots, ledger.ring_records, chunk, assumed.path, assumed.policy, assumed.depth, assumed.direct,
        scratch_bytes=ledger.scratch_bytes, kv_token_bytes=ledger.kv_bytes / (ledger.kv_tokens or ledger.ctx_tokens),
    )  # fmt: skip


def row(shape: ModelShape, profile: Profile, divider: Divider, budget: int, assumed: Assumptions) -> Row:
    """The forecast at one budget."""
    try:
        ledger = divider.divide(budget)
    except BudgetError as error:
        return Row(budget, None, None, None, refused=f"too small: {error.expected}")
    setting = setting_of(ledger, divider.chunk(budget), assumed)
    middle = Machine(profile, direct=assumed.direct)
    slow = Machine(profile, "high", direct=assumed.direct)
    fast = Machine(profile, "low", direct=assumed.direct)
    token = decode(shape, middle, setting, assumed.routing, assumed.context)
    prompt = prefill(shape, middle, setting, assumed.routing, assumed.prompt_tokens)
    worst = prefill(shape, slow, setting, assumed.worst, assumed.prompt_tokens)
    best = prefill(shape, fast, setting, assumed.best, assumed.prompt_tokens)
    return Row(
        budget,
        ledger,
        token,
        prompt,
        low_tokens_s=min(token.tokens_s, decode(shape, slow, setting, assumed.worst, assumed.context).tokens_s),
        high_tokens_s=max(token.tokens_s, decode(shape, fast, setting, assumed.best, assumed.context).tokens_s),
        low_prompt_s=min(prompt.total_s, best.total_s),
        high_prompt_s=max(prompt.total_s, worst.total_s),
        verdict=verdict(token, ledger),
    )


def rows(
    shape: ModelShape, profile: Profile, divider: Divider, budgets: Sequence[int], assumed: Assumptions
) -> list[Row]:
    return [row(shape, profile, divider, budget, assumed) for budget in budgets]


def verdict(token: TokenForecast, ledger: Ledger) -> str:
    """What to expect, in words: how it feels, and what holds it back."""
    speed = token.tokens_s
    feel = (
        "fluent, faster than reading" if speed >= FLUENT_TOKENS_S
        else "readable as it comes" if speed >= READABLE_TOKENS_S
        else "slow: for answers that one waits for" if speed >= SLOW_TOKENS_S
        else "too slow to talk with"
    )  # fmt: skip
    waiting = token.stall_ms / token.total_ms
    if ledger.resident_share >= 1:
        return f"{feel}; everything is in memory, arithmetic and memory bandwidth decide"
    if waiting > 0.5:
        return f"{feel}; {waiting:.0%} of the time is waiting for the disk"
    kept = f"with {ledger.resident_share:.0%} of the experts in memory"
    return f"{feel}; {waiting:.0%} of the time is waiting for the disk, {kept}"


def overall(found: Sequence[Row], memory_bytes: int) -> str:
    """One sentence about the model on this machine: the least budget that is readable, and the best that fits."""
    running = [one for one in found if one.token is not None]
    fitting = [one for one in running if one.budget_bytes <= memory_bytes]
    if not running:
        return "every budget named here is below the floor"
    if not fitting:
        return f"it does not run on this machine, which has {memory_bytes / 2**30:.1f} GiB"
    best = max(fitting, key=lambda one: one.token.tokens_s if one.token else 0.0)
    readable = next((one for one in fitting if one.token and one.token.tokens_s >= READABLE_TOKENS_S), None)
    assert best.token is not None
    told = f"at best {best.token.tokens_s:.1f} tok/s, with {best.budget_bytes / 2**30:.3g} GiB"
    if len(fitting) < len(running):
        told += f" of this machine's {memory_bytes / 2**30:.1f} GiB"
    if readable is None:
        return f"it runs, {told}: {verdict_word(best.token.tokens_s)}"
    if readable is best:
        return f"it runs, {told}"
    return f"it runs: readable from {readable.budget_bytes / 2**30:.3g} GiB on; {told}"


def verdict_word(speed: float) -> str:
    return "for answers that one waits for" if speed >= SLOW_TOKENS_S else "too slow to talk with"


def simple_figures(shape: ModelShape, profile: Profile, token: TokenForecast) -> dict[str, float]:
    """The naive calculator beside the trap: bandwidth at record size holds the latency already; adding it again is
    counting it twice. Bandwidth of the specification sheet (large reads) is too fast the other way."""
    compute_ms = token.total_ms - token.stall_ms
    at_record = profile.sustained_bytes_s(shape.record_bytes, 1)
    at_large = max(one.bytes_s for one in profile.sustained)
    latency_ms = min(one.latency_p50_ms for one in profile.sustained)
    return {
        "bytes_s": at_record,
        "tokens_s": simple(shape, at_record, compute_ms, token.hit_rate),
        "latency_ms": latency_ms,
        "tokens_s_counted_twice": simple(shape, at_record, compute_ms, token.hit_rate, latency_ms),
        "sheet_bytes_s": at_large,
        "tokens_s_sheet": simple(shape, at_large, compute_ms, token.hit_rate),
    }
