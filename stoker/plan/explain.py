"""What bounds a run's speed, and the one change that would help most: a verdict from a run's evidence.

A token's time has three parts: waiting for reads (stall), arithmetic (the weights it touches at the memory's rate), and
the rest (overhead). The largest part bounds it; for stall the kind is told apart. Pure: no files, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from stoker.plan.evidence import Evidence

Bound = Literal[
    "prefill",
    "page cache starved",
    "cache below demand",
    "prefetch waste",
    "device bytes",
    "latency",
    "compute",
    "overhead",
    "compute and overhead",
    "nothing measured",
]
PREFILL_SHARE = 0.6  # of a request's time
NEVER_HITS = 0.02
NEAR_THE_DEVICE = 0.7  # of its rate: more parallel reads would gain little
FEW_LANES = 1.5
REREADS = 1.5
FAULTED = 0.2  # of a token's time, were its bytes read at the device's rate
WASTE = 0.3  # of the bytes read
HELD_UP = 2.0  # times the overhead that the machine's profile expects: then it is not the engine's
POLICY_GAIN = 0.015  # hit rate: less is not worth a change


@dataclass(frozen=True)
class Change:
    """What to do, and what a token (or the prompt) would then take, ms; None where it cannot be said."""

    what: str
    then_ms: float | None = None


@dataclass(frozen=True)
class Explanation:
    """The verdict on one run. parts_ms: the token's time by part; figures: (name, value in words)."""

    source: str
    bound: Bound
    because: str
    change: Change
    parts_ms: dict[str, float] = field(default_factory=dict)
    figures: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        gain = self.gain()
        return [
            f"{self.source}: bound by {self.bound}",
            f"  {self.because}",
            *(f"  {name:<26} {value}" for name, value in self.figures),
            f"  what would help most: {self.change.what}{f' ({gain})' if gain else ''}",
        ]

    def gain(self) -> str:
        """`about 120 instead of 200 ms a token`, or nothing."""
        now = sum(self.parts_ms.values())
        if self.change.then_ms is None or not now:
            return ""
        unit = "ms of prefill" if self.bound == "prefill" else "ms a token"
        return f"about {self.change.then_ms:,.0f} instead of {now:,.0f} {unit}"

    def as_dict(self) -> dict[str, object]:
        return {
            "source": self.source,
            "bound": self.bound,
            "because": self.because,
            "parts_ms": self.parts_ms,
            "figures": dict(self.figures),
            "change": self.change.what,
            "then_ms": self.change.then_ms,
        }


def explain(e: Evidence) -> Explanation:
    """The verdict. What the evidence lacks is not guessed: a part that cannot be told apart is named so."""
    if not e.tokens and not e.prefill_tokens:
        return Explanation(
            e.source, "nothing measured", "there is no step in it", Change("record a run that generates")
        )
    if e.prefill_s > PREFILL_SHARE * (e.prefill_s + e.decode_s) and not (e.chosen_lengths and e.tokens):
        return _prefill(e)
    parts = parts_of(e)
    if (starved := _starved(e)) is not None:
        because, change = starved
        return _say(e, "page cache starved", because, change, parts)
    bound = max(parts, key=lambda name: parts[name])
    if len(parts) == 2 and parts["stall"] > e.token_ms / 3:  # two parts share the rest: neither need be larger
        bound = "stall"
    verdict = _stalled(e, parts) if bound == "stall" else _busy(e, bound, parts)
    if e.keeps_nothing and parts.get("stall"):  # before anything else is worth a thought
        leave = f"leave --path {e.path}: it reads every expert again for each token, --path auto keeps some in memory"
        return replace(verdict, change=Change(leave))
    return verdict


def parts_of(e: Evidence) -> dict[str, float]:
    """Milliseconds of a token by part; what the source or the machine's profile does not tell apart is one part."""
    if e.stall_ms is None:
        return {"waiting, compute and overhead": e.token_ms}
    stall = e.stall_ms
    rest = max(e.token_ms - stall, 0.0)
    if e.memory_bytes_s is None or e.touched_bytes is None:
        return {"stall": stall, "compute and overhead": rest}
    compute = min(rest, e.touched_bytes / e.memory_bytes_s * 1e3)
    return {"stall": stall, "compute": compute, "overhead": rest - compute}


def _prefill(e: Evidence) -> Explanation:
    stall_s = e.prefill_stall_s or 0.0
    parts = {"stall": stall_s * 1e3, "compute and overhead": (e.prefill_s - stall_s) * 1e3}
    because = (
        f"reading {e.prefill_tokens:,} prompt tokens took {e.prefill_s:.2f} s, "
        f"generating {e.tokens:,} took {e.decode_s:.2f} s"
    )
    if stall_s > 0.5 * e.prefill_s:
        least = e.prefill_bytes / e.device_bytes_s * 1e3 if e.device_bytes_s else None
        change = Change(
            "longer prefill chunks (--memory buys them): each chunk reads every expert once, whatever its length",
            None if least is None else max(parts["compute and overhead"], least / 2),
        )
    else:
        change = Change("keep the conversation's KV (a session, `stoker chat`), so that only new tokens are computed")
    return _say(e, "prefill", because, change, parts)


def _starved(e: Evidence) -> tuple[str, Change] | None:
    """Reads through the page cache that deliver more than was asked for, or the same again and again."""
    if not e.through_page_cache:
        return None
    if e.rereads is not None and e.rereads > REREADS:
        because = f"the device delivered {e.rereads:.1f} bytes for each byte that was asked for"
        return because, Change("read past the page cache (drop --buffered), so that memory goes to slots alone")
    experts = (e.needed or 0.0) * (e.record_bytes or 0.0)
    if e.stall_ms is None and experts and e.read_bytes > 0.05 * experts:
        because = (
            f"the model is mapped, and a token brings in {_mb(e.read_bytes)} by page faults, "
            f"{e.read_bytes / experts:.0%} of all that its experts hold"
        )
        least = None if not e.device_bytes_s else e.read_bytes / e.device_bytes_s * 1e3
        return because, Change(
            "more memory, or explicit reads of whole experts instead of page faults",
            None if least is None else min(least, e.token_ms),
        )
    faulted_ms = e.read_bytes / e.device_bytes_s * 1e3 if e.device_bytes_s else 0.0
    if e.stall_ms is None and not experts and faulted_ms > FAULTED * e.token_ms:
        because = (
            f"the model is mapped, and a token of {e.token_ms:.0f} ms brings in {_mb(e.read_bytes)} by page faults"
        )
        return because, Change("more memory, or explicit reads of whole experts instead of page faults", faulted_ms)
    return None


def _stalled(e: Evidence, parts: dict[str, float]) -> Explanation:
    rest, stall = e.token_ms - parts["stall"], parts["stall"]
    share = f"a token waits {stall:.1f} of {e.token_ms:.1f} ms for reads"
    if _below_demand(e):
        held = "no slots" if not e.slots else f"{e.slots:.0f} slots"
        demand = f"{e.needed_per_event:.0f} experts" if e.needed_per_event else "its experts"
        return _say(
            e,
            "cache below demand",
            f"{share}; a layer needs {demand} a step and has {held} that keep them: hits {e.hit_rate:.1%}",
            _more_slots(e, rest, stall),
            parts,
        )
    if e.read_bytes and e.wasted_bytes > WASTE * e.read_bytes:
        saved = stall * e.wasted_bytes / e.read_bytes
        because = f"{share}; {e.wasted_bytes / e.read_bytes:.0%} of the bytes read were prefetched and never used"
        return _say(e, "prefetch waste", because, Change("prefetch less, or not at all", rest + stall - saved), parts)
    rate, near = _delivered(e)
    if near:
        because = f"{share}, and the device is busy: {_mb(e.read_bytes)} a token at {_mb(rate)}/s"
        return _say(e, "device bytes", because, _fewer_bytes(e, rest, stall), parts)
    least = e.read_bytes / e.device_bytes_s * 1e3 if e.device_bytes_s else stall / 2
    slow = f"{_mb(rate)}/s while reading" + (f" of {_mb(e.device_bytes_s)}/s possible" if e.device_bytes_s else "")
    lanes = f", {e.lanes:.1f} reads at once" if e.lanes is not None else ""
    change = Change(
        "more reads in flight: prefetch of the next layer, or a deeper queue (try `stoker bench --depth`)", rest + least
    )
    return _say(e, "latency", f"{share}, yet the device could give more: {slow}{lanes}", change, parts)


def _below_demand(e: Evidence) -> bool:
    if e.slots is not None and e.needed_per_event is not None and e.slots < e.needed_per_event - 0.5:
        return True
    return e.hit_rate is not None and e.hit_rate < NEVER_HITS


def _delivered(e: Evidence) -> tuple[float, bool]:
    """Bytes per second while reading (while waiting, where no more is known); whether the device gives no more."""
    rate = e.read_bytes / ((e.busy_ms or e.stall_ms or e.token_ms) / 1e3)
    if e.device_bytes_s is not None:
        return rate, rate >= NEAR_THE_DEVICE * e.device_bytes_s
    return rate, e.lanes is None or e.lanes >= FEW_LANES


def _fewer_bytes(e: Evidence, rest: float, stall: float) -> Change:
    """Memory, policy or bits: what saves most."""
    changes = [_more_slots(e, rest, stall), Change("fewer bits a weight (3 instead of 4)", rest + stall * 0.78)]
    if e.best_policy is not None and e.best_policy[1] >= POLICY_GAIN and e.hit_rate is not None:
        name, gain = e.best_policy
        better = stall * max(0.0, 1 - gain / max(1 - e.hit_rate, 1e-9))
        changes.append(
            Change(f"--policy {name}: {gain * 100:.1f} points more hits on this run's routes", rest + better)
        )
    return min(changes, key=lambda c: c.then_ms if c.then_ms is not None else rest + stall)


def _more_slots(e: Evidence, rest: float, stall: float) -> Change:
    """Twice the slots (at least two steps' demand), at most all experts; by the run's own miss curve if known."""
    if e.experts is None or e.layers is None or e.record_bytes is None or e.misses is None or not e.needed:
        return Change("more memory for experts (a larger --memory)")
    now = e.slots or 0.0
    wanted = min(float(e.experts), max(2 * now, 2 * (e.needed_per_event or 1.0)))
    missing = 1 - (e.hit_rate or 0.0)
    if e.hit_rate_with is not None:
        before = 1 - e.hit_rate_with(now) if now >= 1 else 1.0
        ratio = min(1.0, (1 - e.hit_rate_with(wanted)) / max(before, 1e-9))
    else:  # misses fall in proportion to what is not in memory
        ratio = min(1.0, (1 - wanted / e.experts) / max(min(missing, 1.0), 1e-9))
    more_bytes = (wanted - now) * e.layers * e.record_bytes
    what = f"{more_bytes / 2**30:.2f} GiB more memory: {wanted:.0f} slots a layer instead of {now:.0f}"
    return Change(what, rest + stall * ratio)


def _busy(e: Evidence, bound: str, parts: dict[str, float]) -> Explanation:
    if e.stall_ms is None:
        because = f"a token takes {e.token_ms:.1f} ms and reads {_mb(e.read_bytes)}; the engine does not tell its waits"
        return _say(e, "compute and overhead", because, Change("look inside that engine"), parts)
    because = f"a token takes {e.token_ms:.1f} ms, of which {parts['stall']:.1f} ms wait for reads"
    if bound == "compute":
        touched = e.touched_bytes or 0.0
        because += f"; it touches {_mb(touched)} of weights, {parts['compute']:.1f} ms at the memory's rate"
        then = e.token_ms - parts["compute"] * 0.22
        return _say(e, "compute", because, Change("fewer bits a weight, or a machine with faster memory", then), parts)
    if bound == "overhead":
        because += f", {parts['compute']:.1f} ms are arithmetic; {parts['overhead']:.1f} ms are neither"
        if e.overhead_ms is not None:
            because += f" (the profile of this machine expects {e.overhead_ms:.1f})"
        return _say(e, "overhead", because, _less_overhead(e, parts), parts)
    change = Change("run `stoker probe` once: with the memory's rate this tells compute from overhead")
    return _say(e, "compute and overhead", because, change, parts)


def _less_overhead(e: Evidence, parts: dict[str, float]) -> Change:
    """Overhead is the engine's own or taken by others; only a server can share it."""
    if e.overhead_ms is not None and parts["overhead"] > HELD_UP * e.overhead_ms:
        alone_ms = e.token_ms - parts["overhead"] + e.overhead_ms
        return Change("a quiet machine: other programs took the processor", alone_ms)
    if e.several:
        return Change("more requests at a time: they share a step's overhead")
    return Change("nothing in its options: one sequence alone pays a step's whole overhead")


def _say(e: Evidence, bound: Bound, because: str, change: Change, parts: dict[str, float]) -> Explanation:
    figures = [
        ("time by part", ", ".join(f"{name} {ms:,.1f} ms" for name, ms in parts.items())),
        ("read", f"{_mb(e.read_bytes)} a token" if e.tokens else f"{_mb(e.prefill_bytes)} for the prompt"),
    ]
    if bound != "prefill" and e.prefill_s:
        waited = f", {e.prefill_stall_s / e.prefill_s:.0%} of it waiting for reads" if e.prefill_stall_s else ""
        figures.append(("prefill beside it", f"{e.prefill_tokens:,} tokens in {e.prefill_s:.2f} s{waited}"))
    if e.hit_rate is not None:
        figures.append(("hit rate", f"{e.hit_rate:.1%} of {e.needed:.0f} experts a token"))
    if e.keeps_nothing:
        figures.append(("in memory", f"nothing: --path {e.path} keeps no expert between tokens"))
    elif e.slots is not None and e.experts:
        figures.append(("in memory", f"{e.slots:.0f} of {e.experts} experts a layer"))
    if e.device_bytes_s:
        figures.append(("the device gives", f"{_mb(e.device_bytes_s)}/s"))
    if e.memory_bytes_s:
        figures.append(("memory gives", f"{_mb(e.memory_bytes_s)}/s"))
    return Explanation(e.source, bound, because, change, parts, tuple(figures))


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
