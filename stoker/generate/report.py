"""What a finished generation tells: usage, timings and the reads of its own steps, and the one closing line.

Pure data and arithmetic: takes clock readings and counter snapshots, reads neither clock nor counters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.generate.request import FinishReason
from stoker.generate.sampler import Sample

# The counters of the residency whose growth over a phase is reported.
COUNTERS = (
    "hits",
    "misses",
    "hit_bytes",
    "miss_bytes",
    "demand_bytes",
    "prefetch_bytes",
    "stall_ns",
    "dropped_experts",
    "routed_choices",
    "swapped_choices",
)


@dataclass(frozen=True)
class Usage:
    """Token counts. cached_tokens: the part of the prompt whose KV was there already. completion_tokens counts the
    end-of-text token when there was one."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Milliseconds and rates; 0 where a phase did not happen. Prefill and decode are never averaged together.

    ttft_ms runs from the request to the first token. decode_tok_s counts the tokens after the first.
    """

    ttft_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float
    prefill_tok_s: float
    decode_tok_s: float
    token_ms_p50: float
    token_ms_p95: float
    token_ms_p99: float

    @staticmethod
    def of(prefill_ns: int, ttft_ns: int, total_ns: int, step_ns: Sequence[int], prefilled_tokens: int) -> "Timings":
        """step_ns: what each token after the first took, without the time that the reader of the stream took;
        prefilled_tokens: prompt tokens that were computed; ttft_ns: 0 when no token was chosen."""
        steps_ms = sorted(ns / 1e6 for ns in step_ns)
        return Timings(
            ttft_ms=ttft_ns / 1e6,
            prefill_ms=prefill_ns / 1e6,
            decode_ms=sum(steps_ms),
            total_ms=total_ns / 1e6,
            prefill_tok_s=_rate(prefilled_tokens, prefill_ns / 1e6),
            decode_tok_s=_rate(len(steps_ms), sum(steps_ms)),
            token_ms_p50=_quantile(steps_ms, 0.50),
            token_ms_p95=_quantile(steps_ms, 0.95),
            token_ms_p99=_quantile(steps_ms, 0.99),
        )


def growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What the reported counters grew by between two snapshots."""
    return {name: int(after.get(name, 0)) - int(before.get(name, 0)) for name in COUNTERS}


def phase_stats(grown: Mapping[str, float], tokens: int, wall_ms: float) -> dict[str, float]:
    """The reads of one phase from what the counters grew by: totals, and the ratios per demand, token and wall time.

    read_bytes counts demand reads and prefetches alike: what the device was asked for.
    """
    assert grown["dropped_experts"] == 0, "an expert was left out of a step"
    read_bytes = grown["demand_bytes"] + grown["prefetch_bytes"]
    stall_ms = grown["stall_ns"] / 1e6
    return {
        **{name: value for name, value in grown.items() if name != "stall_ns"},
        "read_bytes": read_bytes,
        "hit_rate": _share(grown["hits"], grown["hits"] + grown["misses"]),
        "byte_hit_rate": _share(grown["hit_bytes"], grown["hit_bytes"] + grown["miss_bytes"]),
        "read_bytes_per_token": _share(read_bytes, tokens),
        "stall_ms": stall_ms,
        "stall_ms_per_token": _share(stall_ms, tokens),
        "stall_share": _share(stall_ms, wall_ms),
    }


@dataclass(frozen=True)
class Result:
    """A finished generation.

    token_ids holds every token that was chosen, the end-of-text token included; text is what they say, without special
    tokens and without a stop string. stats has one dict per phase, `prefill` and `decode`. logprobs has one Sample for
    each token when asked for. stop_string: the one that ended the output. routing: what chose the experts, and the
    adapter.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    stats: dict[str, dict[str, float]]
    seed: int
    logprobs: list[Sample] | None = None
    stop_string: str | None = None
    routing: dict[str, Any] = field(default_factory=lambda: {"mode": "exact", "lossless": True})

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self)
        plain["usage"]["total_tokens"] = self.usage.total_tokens
        return plain

    def closing_line(self) -> str:
        """One line for people: what it cost. Hit rate, bytes and stall are those of decode, or `-` without decode."""
        usage, timings, decode = self.usage, self.timings, self.stats["decode"]
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        parts = [f"prompt {usage.prompt_tokens} tokens{cached}", f"TTFT {timings.ttft_ms / 1e3:.2f} s"]
        if timings.prefill_tok_s:
            parts[-1] += f" ({timings.prefill_tok_s:.1f} tok/s)"
        if timings.decode_ms:
            parts += [
                f"{usage.completion_tokens} tokens at {timings.decode_tok_s:.2f} tok/s",
                f"hits {decode['hit_rate']:.1%}",
                f"{decode['read_bytes_per_token'] / 1e6:.2f} MB/token read",
                f"stall {decode['stall_share']:.0%}",
            ]
        else:
            parts += [f"{usage.completion_tokens} tokens", "hits -", "- MB/token read", "stall -"]
        if not self.routing["lossless"]:
            parts.append(described(self.routing))
        if decode.get("routed_choices"):
            parts.append(f"{decode['swapped_choices'] / decode['routed_choices']:.1%} of choices swapped")
        return " | ".join([*parts, self.finish_reason])


def described(routing: Mapping[str, Any]) -> str:
    """A mode that changes the output, in a few words: routing prerouter, K 4, adapter NAME."""
    words = [f"routing {routing['mode']}"]
    settings = routing.get("settings", {})
    words += [f"{name.replace('_', ' ')} {_shown(value)}" for name, value in settings.items() if name != "shift"]
    words += ["no shift"] if settings.get("shift", True) is None else []
    if "top_k" in routing:
        words.append(f"K {routing['top_k']}")
    if "adapter" in routing:
        words.append(f"adapter {routing['adapter']['name']}")
    return ", ".join(words)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _rate(tokens: int, ms: float) -> float:
    return 1e3 * tokens / ms if ms > 0 else 0.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of ascending values; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
