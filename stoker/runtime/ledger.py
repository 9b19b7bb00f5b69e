"""The account of every byte that the process may hold, drawn up before anything heavy is loaded. No torch, no I/O.

`plan_memory` divides a budget, or refuses it with the numbers and the smallest budget that would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from stoker.errors import BudgetError, OptionError
from stoker.residency.plan import PoolSize, split_evenly

MIB = 1 << 20
# What a running process takes beyond what is itemised: allocator slack, Python objects of a step, thread stacks.
RESERVE_BYTES = 96 * MIB
RING_RECORDS = 32
RING_FLOOR = 4


def show(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / MIB:.0f} MiB"


@dataclass(frozen=True)
class PoolNeed(PoolSize):
    """One pool, with how many of its experts a token needs at once."""

    top_k: int


@dataclass(frozen=True)
class Needs:
    """Everything with a fixed price, in bytes. kv_bytes: of kv_tokens over all sequences (0: of ctx_tokens), with
    states_bytes for what they keep whatever their length."""

    process_bytes: int  # interpreter and libraries with the skeleton and tokenizer, measured
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    pools: tuple[PoolNeed, ...]
    ctx_tokens: int
    kv_token_bytes: int
    prefix_bytes: int = 0  # kept prefixes of models without paged KV; the others use what is free of the KV
    kv_tokens: int = 0
    states_bytes: int = 0
    adapter_bytes: int = 0  # heads and LoRA
    grammar_bytes: int = 0  # the tokenizer's vocabulary for grammars, built at the first tools or JSON request

    @property
    def shared_tokens(self) -> int:
        return self.kv_tokens or self.ctx_tokens


@dataclass(frozen=True)
class Ledger:
    """The division of a budget, in bytes; `slots` per pool and `ring_records` are counts."""

    budget_bytes: int
    process_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    slots_bytes: int
    ring_bytes: int
    reserve_bytes: int
    free_bytes: int
    floor_bytes: int
    ctx_tokens: int
    slots: tuple[int, ...]
    ring_records: int
    expert_bytes: int  # all records of the model
    prefix_bytes: int = 0
    kv_tokens: int = 0  # over all sequences; 0: ctx_tokens
    grammar_bytes: int = 0
    adapter_bytes: int = 0

    @property
    def resident_share(self) -> float:
        """Share of the expert bytes that fit in the slots."""
        return self.slots_bytes / self.expert_bytes if self.expert_bytes else 1.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"resident_share": self.resident_share}

    def lines(self) -> list[str]:
        """The ledger for people, one entry a line."""
        least, most = min(self.slots), max(self.slots)
        per_pool = str(least) if least == most else f"{least} to {most}"
        tokens = f"{self.kv_tokens or self.ctx_tokens} tokens"
        if self.kv_tokens > self.ctx_tokens:
            tokens += f", at most {self.ctx_tokens} a sequence"
        rows = [
            ("interpreter and libraries", self.process_bytes, ""),
            ("dense weights", self.dense_bytes, ""),
            ("KV cache", self.kv_bytes, tokens),
            *([("kept prefixes", self.prefix_bytes, "")] if self.prefix_bytes else []),
            *([("grammars", self.grammar_bytes, "")] if self.grammar_bytes else []),
            *([("adapter", self.adapter_bytes, "")] if self.adapter_bytes else []),
            ("expert slots", self.slots_bytes, f"{per_pool} a layer, {self.resident_share:.0%} of all experts"),
            ("prefill ring", self.ring_bytes, f"{self.ring_records} records"),
            ("scratch", self.scratch_bytes, ""),
            ("reserve", self.reserve_bytes, ""),
            ("free", self.free_bytes, ""),
            ("budget", self.budget_bytes, f"floor {show(self.floor_bytes)}"),
        ]
        return [f"{name:<26}{show(nbytes):>10}  {note}".rstrip() for name, nbytes, note in rows]


def floor_bytes(needs: Needs) -> int:
    """The smallest budget that works: K slots a layer, a ring of four records, and everything with a fixed price."""
    ring = RING_FLOOR * max(pool.record_bytes for pool in needs.pools)
    slots = sum(min(pool.top_k, pool.experts) * pool.record_bytes for pool in needs.pools)
    return _fixed(needs) + ring + slots


def _fixed(needs: Needs) -> int:
    kept = needs.kv_bytes + needs.prefix_bytes + needs.grammar_bytes + needs.adapter_bytes
    return needs.process_bytes + needs.dense_bytes + kept + needs.scratch_bytes + RESERVE_BYTES


def plan_memory(budget: int, needs: Needs, *, scratch_bytes: int | None = None) -> Ledger:
    """Divide `budget` bytes; `scratch_bytes` may exceed the least where there is room for it.

    Raises BudgetError with the smallest budget that works and the context that would fit.
    """
    floor = floor_bytes(needs)
    if budget < floor:
        raise BudgetError(
            "the budget is too small for this model",
            where="--memory",
            expected=f"at least {show(_round_up(floor))}: "
            + ", ".join(
                f"{name} {show(nbytes)}"
                for name, nbytes in (
                    ("libraries", needs.process_bytes),
                    ("dense weights", needs.dense_bytes),
                    (f"KV of {needs.shared_tokens} tokens", needs.kv_bytes),
                    *([("kept prefixes", needs.prefix_bytes)] if needs.prefix_bytes else []),
                    *([("grammars", needs.grammar_bytes)] if needs.grammar_bytes else []),
                    *([("adapter", needs.adapter_bytes)] if needs.adapter_bytes else []),
                    ("scratch", needs.scratch_bytes),
                    ("reserve", RESERVE_BYTES),
                    ("fewest slots", floor - _fixed(needs)),
                )
            ),
            got=show(budget),
            remedy=_remedy(budget, floor, needs),
        )
    if scratch_bytes is not None:
        needs = replace(needs, scratch_bytes=scratch_bytes)
    record = max(pool.record_bytes for pool in needs.pools)
    spare = budget - floor_bytes(needs)
    assert spare >= 0, "more scratch than the budget has room for"
    ring = RING_FLOOR + min(RING_RECORDS - RING_FLOOR, spare // 4 // record)
    slots = split_evenly(budget - _fixed(needs) - ring * record, needs.pools)
    if all(count == pool.experts for count, pool in zip(slots, needs.pools, strict=True)):
        ring = RING_FLOOR
    slots_bytes = sum(count * pool.record_bytes for count, pool in zip(slots, needs.pools, strict=True))
    used = _fixed(needs) + ring * record + slots_bytes
    return Ledger(
        budget_bytes=budget,
        process_bytes=needs.process_bytes,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        scratch_bytes=needs.scratch_bytes,
        slots_bytes=slots_bytes,
        ring_bytes=ring * record,
        reserve_bytes=RESERVE_BYTES,
        free_bytes=budget - used,
        floor_bytes=floor,
        ctx_tokens=needs.ctx_tokens,
        kv_tokens=needs.shared_tokens,
        slots=slots,
        ring_records=ring,
        expert_bytes=sum(pool.experts * pool.record_bytes for pool in needs.pools),
        prefix_bytes=needs.prefix_bytes,
        grammar_bytes=needs.grammar_bytes,
        adapter_bytes=needs.adapter_bytes,
    )


def with_slots(ledger: Ledger, slots: Sequence[int], pools: Sequence[PoolNeed]) -> Ledger:
    """The same ledger with these slots per pool. Raises OptionError for what cannot be, BudgetError for too many."""
    if len(slots) != len(pools):
        raise OptionError("slots per pool", where="slots", expected=f"{len(pools)} numbers", got=len(slots))
    for index, (count, pool) in enumerate(zip(slots, pools, strict=True)):
        if not min(pool.top_k, pool.experts) <= count <= pool.experts:
            expected = f"{min(pool.top_k, pool.experts)} to {pool.experts}"
            raise OptionError("a pool cannot have so many slots", where=f"pool {index}", expected=expected, got=count)
    nbytes = sum(count * pool.record_bytes for count, pool in zip(slots, pools, strict=True))
    room = ledger.slots_bytes + ledger.free_bytes
    if nbytes > room:
        raise BudgetError(
            "the slots do not fit", where="slots", expected=f"at most {show(room)}", got=show(nbytes),
            remedy="name fewer slots, or a larger --memory",
        )  # fmt: skip
    return replace(ledger, slots=tuple(slots), slots_bytes=nbytes, free_bytes=room - nbytes)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // (16 * MIB)) * 16 * MIB


def _remedy(budget: int, floor: int, needs: Needs) -> str:
    advice = f"give --memory {_round_up(floor) // MIB}MiB or more"
    spare = budget - (floor - needs.kv_bytes + needs.states_bytes)
    tokens = spare // needs.kv_token_bytes // 64 * 64 if needs.kv_token_bytes else 0
    if tokens < 64:
        return advice
    if needs.shared_tokens > needs.ctx_tokens and tokens >= needs.ctx_tokens:
        return f"{advice}, or --kv-tokens {tokens} or less"
    return f"{advice}, or --ctx-size {tokens} or less"
