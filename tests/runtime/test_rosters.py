"""Serving with rosters: against transformers under the plain rule, whatever the chunks, the batch and the path; and
what pinning promises about reads."""

from typing import Any

import pytest
import torch

from stoker.errors import OptionError
from stoker.routing.roster_options import Prefix, RosterOptions
from stoker.routing.rosters import RosterRule
from stoker.routing.shift import Shift
from stoker.runtime.model import Options, load
from stoker.runtime.skeleton import moe_blocks
from stoker.runtime.step import Part
from stoker.store.reader import open_store
from tests.routing.roster_oracle import PlainRoster
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of, relative_l2
from tests.runtime.rostered import routed_by
from tests.runtime.routes import RouteRecorder
from tests.runtime.test_architectures import some_ids

PROMPT, TOTAL = 24, 60
OPTIONS = RosterOptions((4,), Prefix(tokens=PROMPT), 0.1, shift=None)
LIMITS = {"memory": "8GiB", "ctx_size": 256}


def answers(store: Any, options: RosterOptions, ids: list[int], chunks: list[int], **more: Any) -> Any:
    """Logits [W, V] after each chunk of one sequence, prompt chunks before PROMPT, and the routes by layer."""
    recorder = RouteRecorder()
    with load(store, Options(**(LIMITS | more)), recorder) as model:
        rule = RosterRule(options)
        model.follow(rule)
        sequence = model.new_sequence()
        rows, done = [], 0
        for length in chunks:
            part = ids[done : done + length]
            rows.append(model.advance([Part(sequence, part, decode=done >= PROMPT)]))
            done += length
        sequence.close()
    return torch.cat(rows), recorder.take()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe"])
def test_is_the_rule_in_transformers(packed: Packer, architecture: str) -> None:
    store = packed(architecture, 16)
    ids = some_ids(1, TOTAL)[0].tolist()
    ours, routes = answers(store, OPTIONS, ids, [PROMPT] + [1] * (TOTAL - PROMPT))
    model = oracle_of(open_store(store))
    with torch.inference_mode(), routed_by(model, lambda _: PlainRoster(8, 2, 4, 0.1, PROMPT)) as taken:
        theirs = model(input_ids=torch.tensor([ids])).logits[0, PROMPT - 1 :]
    assert {layer: sorted(map(sorted, rows)) for layer, rows in taken.items()} == {
        layer: sorted(map(sorted, index_TK.tolist())) for layer, index_TK in routes.items()
    }
    assert relative_l2(ours, theirs) < 5e-3
    for index_TK in routes.values():
        assert len(index_TK[PROMPT:].unique()) <= 4


def test_chunks_paths_and_budgets_do_not_change_it(packed: Packer) -> None:
    store = packed("qwen3_moe", 4)
    ids = some_ids(1, TOTAL)[0].tolist()
    options = RosterOptions((4, 3, 5), Prefix(tokens=PROMPT), 0.05, Shift(settle_tokens=4, evidence=1.5))
    wanted, routes = answers(store, options, ids, [PROMPT] + [1] * (TOTAL - PROMPT))
    for chunks, more in (
        ([7, 9, 8] + [1] * (TOTAL - PROMPT), {}),
        ([PROMPT] + [1] * (TOTAL - PROMPT), {"path": "exact"}),
        ([PROMPT] + [1] * (TOTAL - PROMPT), {"path": "whole_layer"}),
        ([1] * TOTAL, {"path": "staged"}),
    ):
        got, other = answers(store, options, ids, chunks, **more)
        assert torch.equal(got[-(TOTAL - PROMPT) :], wanted[-(TOTAL - PROMPT) :])
        assert all(torch.equal(other[layer], routes[layer]) for layer in routes)


def test_sequences_in_one_step_do_not_see_each_other(packed: Packer) -> None:
    store = packed("qwen3_moe", 4)
    first, second = some_ids(2, 40).tolist()
    alone, _ = answers(store, OPTIONS, first, [PROMPT] + [1] * 16)
    with load(store, Options(**LIMITS, kv_tokens=1024)) as model:
        model.follow(RosterRule(OPTIONS))
        one, two = model.new_sequence(), model.new_sequence()
        rows = [model.advance([Part(two, second[:30], wants_logits=False), Part(one, first[:PROMPT])])]
        for token in range(PROMPT, 40):
            parts = [Part(one, [first[token]], decode=True)]
            if token % 2:
                parts.insert(0, Part(two, [second[token % 30]], decode=True, wants_logits=False))
            rows.append(model.advance(parts))
        assert torch.equal(torch.cat(rows), alone)
        one.close()
        two.close()


def test_decode_reads_nothing_once_pinned(packed: Packer) -> None:
    """With fewer slots than experts: LRU goes on missing, the pinned roster was read in one go and stays."""
    store = packed("qwen3_moe", 4)
    ids = some_ids(1, 120)[0].tolist()
    misses = {}
    for name in ("exact", "roster"):
        with load(store, Options(**LIMITS, slots=[6, 6, 6])) as model:
            rule = RosterRule(RosterOptions((4,), Prefix(tokens=PROMPT), 0.1, None))
            if name == "roster":
                model.follow(rule)
            sequence = model.new_sequence()
            model.prefill(sequence, ids[:PROMPT])
            model.decode([sequence], [ids[PROMPT]])
            before = model.counters()
            for token in ids[PROMPT + 1 :]:
                model.decode([sequence], [token])
            after = model.counters()
            misses[name] = after["misses"] - before["misses"], after["demand_bytes"] - before["demand_bytes"]
            reads = after["prefetch_bytes"] - before["prefetch_bytes"]
            if name == "roster":
                assert rule.counters()["roster_pins"] == 1 and sequence.routing.pinned
                assert misses["roster"] == (0, 0) and reads == 0
                assert all(
                    set(r.members()) <= model.residency.resident(i) for i, r in enumerate(sequence.routing.rosters)
                )
            sequence.close()
    assert misses["exact"][0] > 20


def test_pinned_steps_ask_nothing_of_residency_and_stay_in_the_layers_one_call(
    packed: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither guesses nor gives up reads; and a gate that somebody listens to, apart from the layer's call, says the
    same."""
    ids = some_ids(1, 60)[0].tolist()
    found = []
    for listened in (False, True):
        with load(packed("qwen3_moe", 4), Options(**LIMITS, slots=[6, 6, 6])) as model:
            model.follow(RosterRule(OPTIONS))
            sequence = model.new_sequence()
            model.prefill(sequence, ids[:PROMPT])
            gates: list[int] = []
            if listened:
                for block in moe_blocks(model.model):
                    assert block.router is not None
                    block.router.register_forward_hook(lambda *_, seen=gates: seen.append(1))
            model.decode([sequence], [ids[PROMPT]])
            for name in ("prefetch", "cancel_prefetches", "stage"):
                monkeypatch.setattr(model.residency, name, None)
            rows = [model.decode([sequence], [token]) for token in ids[PROMPT + 1 :]]
            assert len(gates) == (3 * len(ids[PROMPT:]) if listened else 0)
            found.append(torch.cat(rows))
            sequence.close()
    assert torch.equal(*found)


def test_a_failed_step_leaves_the_rosters_as_they_were(packed: Packer) -> None:
    with load(packed("qwen3_moe", 4), Options(**LIMITS)) as model:
        model.follow(RosterRule(OPTIONS))
        sequence = model.new_sequence()
        ids = some_ids(1, 40)[0].tolist()
        model.prefill(sequence, ids[:PROMPT])
        model.decode([sequence], [5])
        state = [roster.count_E.copy() for roster in sequence.routing.rosters]
        asked = iter((False, False, True))  # the last of three layers
        model.step.given_up = lambda: next(asked)
        with pytest.raises(Exception, match="given up"):
            model.decode([sequence], [5])
        model.step.given_up = None
        assert all((old == new.count_E).all() for old, new in zip(state, sequence.routing.rosters, strict=True))
        model.decode([sequence], [5])
        assert sequence.routing.tokens == PROMPT + 2
        sequence.close()


def test_what_does_not_fit_is_refused(packed: Packer) -> None:
    with load(packed("qwen3_moe", 4), Options(**LIMITS)) as model, pytest.raises(OptionError, match="do not fit"):
        model.follow(RosterRule(RosterOptions((9,))))
    with load(packed("deepseek_v3", 4), Options(**LIMITS)) as model, pytest.raises(OptionError, match="groups"):
        model.follow(RosterRule(RosterOptions((4,))))
