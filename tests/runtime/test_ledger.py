"""The ledger is arithmetic: what it grants adds up to the budget, and a refusal names numbers that work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BudgetError
from stoker.runtime.ledger import MIB, Needs, PoolNeed, floor_bytes, plan_memory


def needs(**changes: object) -> Needs:
    base: dict[str, object] = {
        "process_bytes": 400 * MIB,
        "dense_bytes": 875 * MIB,
        "kv_bytes": 384 * MIB,
        "scratch_bytes": 100 * MIB,
        "pools": tuple(PoolNeed(128, 2_654_208, 8) for _ in range(48)),
        "ctx_tokens": 4096,
        "kv_token_bytes": 98304,
    }
    return Needs(**(base | changes))  # type: ignore[arg-type]


@given(st.integers(0, 24 << 30), st.integers(1, 60), st.integers(1, 64), st.integers(1, 8), st.integers(1, 2000))
def test_whatever_is_granted_fits_the_budget(spare: int, pools: int, experts: int, top_k: int, blocks: int) -> None:
    wanted = needs(
        pools=tuple(PoolNeed(experts, 4096 * blocks, min(top_k, experts)) for _ in range(pools)),
        prefix_bytes=7 * MIB, grammar_bytes=31 * MIB,
    )  # fmt: skip
    budget = floor_bytes(wanted) + spare
    ledger = plan_memory(budget, wanted)
    entries = ("process", "dense", "kv", "prefix", "grammar", "scratch", "slots", "ring", "reserve", "free")
    assert sum(getattr(ledger, f"{entry}_bytes") for entry in entries) == budget
    assert ledger.free_bytes >= 0
    assert all(min(top_k, experts) <= count <= experts for count in ledger.slots)
    assert sum(count * 4096 * blocks for count in ledger.slots) == ledger.slots_bytes
    # Nothing is left over that one more slot in each pool could have used.
    if min(ledger.slots) < experts:
        assert ledger.free_bytes < 4096 * blocks * pools


def test_a_budget_below_the_floor_is_refused_with_one_that_works() -> None:
    wanted = needs()
    floor = floor_bytes(wanted)
    with pytest.raises(BudgetError) as refused:
        plan_memory(floor - 1, wanted)
    message = str(refused.value)
    assert "--memory" in message and "KV of 4096 tokens" in message
    advised = int(message.split("give --memory ")[1].split("MiB")[0]) * MIB
    assert min(plan_memory(advised, wanted).slots) == 8


def test_a_context_that_would_fit_is_named() -> None:
    wanted = needs(kv_bytes=98304 * 32768, ctx_tokens=32768)
    with pytest.raises(BudgetError) as refused:
        plan_memory(3 << 30, wanted)
    tokens = int(str(refused.value).split("--ctx-size ")[1].split(" ")[0])
    assert plan_memory(3 << 30, needs(kv_bytes=98304 * tokens, ctx_tokens=tokens))


def test_when_everything_fits_everything_is_resident() -> None:
    ledger = plan_memory(24 << 30, needs())
    assert ledger.slots == (128,) * 48 and ledger.resident_share == 1.0


def test_the_kv_of_all_sequences_is_paid_for_and_named_when_it_is_too_much() -> None:
    one = needs()
    many = needs(kv_bytes=98304 * 65536, kv_tokens=65536)
    assert floor_bytes(many) - floor_bytes(one) == 98304 * (65536 - 4096)
    assert "65536 tokens, at most 4096 a sequence" in "\n".join(plan_memory(12 << 30, many).lines())
    with pytest.raises(BudgetError, match="KV of 65536 tokens") as refused:
        plan_memory(4 << 30, many)
    assert refused.value.remedy is not None
    tokens = int(refused.value.remedy.split("--kv-tokens ")[1].split()[0])
    assert tokens >= 4096 and plan_memory(4 << 30, needs(kv_bytes=98304 * tokens, kv_tokens=tokens))
