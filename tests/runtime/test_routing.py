"""The seam of the routing rules: what a rule is told, and that the experts do what it says, for every architecture."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.routing.rule import LayerInfo, RouteState, RoutingRule, Rows
from stoker.routing.select import LayerRule, select
from stoker.runtime.model import Options, Runtime, load
from stoker.runtime.routing import RuledRouter, layer_rule
from stoker.runtime.skeleton import moe_blocks
from stoker.runtime.step import Part
from tests.runtime.conftest import Packer
from tests.runtime.routes import RouteRecorder
from tests.runtime.test_architectures import some_ids
from tests.runtime.tiny import ARCHITECTURES


class Length(RouteState):
    """Counts the tokens that it was told of."""

    tokens = 0

    def truncate(self, length: int) -> None:
        self.tokens = min(self.tokens, length)


class Watching(RoutingRule):
    """Notes all it is told, checks that the logits are those of the route, and gives each token the experts after its
    gate's, with equal weights."""

    name = "watching"
    wants_logits = True

    def __init__(self, replace: bool = True) -> None:
        self.replace = replace
        self.layers: list[LayerInfo] = []
        self.seen: list[tuple[int, Rows]] = []
        self.done: list[Rows] = []

    def attach(self, layers: Any) -> None:
        self.layers = list(layers)

    def new_state(self) -> Length:
        return Length()

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE is not None and logits_TE.shape == (len(hidden_TD), self.layers[layer].experts)
        ours, weights = select(logits_TE.float(), self.layers[layer].rule)
        assert torch.equal(ours.sort(-1).values, index_TK.sort(-1).values), "the logits of another call"
        assert torch.allclose(weights.sort(-1).values, weights_TK.float().sort(-1).values, atol=1e-5)
        self.seen.append((layer, rows))
        if not self.replace:
            return index_TK, weights_TK
        return (index_TK + 1) % self.layers[layer].experts, torch.full_like(weights_TK, 0.5)

    def after_step(self, rows: Rows) -> None:
        self.done.append(rows)
        for span in rows.spans:
            assert span.state.tokens == span.position
            span.state.tokens += span.last - span.first


class Blind(Watching):
    """The same routes, without a look at the logits."""

    wants_logits = False

    def route(
        self, layer: int, rows: Rows, hidden_TD: Tensor, logits_TE: Tensor | None, index_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE is None
        self.seen.append((layer, rows))
        return (index_TK + 1) % self.layers[layer].experts, torch.tensor(0.5).expand_as(weights_TK)


@pytest.fixture(params=list(ARCHITECTURES))
def runtime(request: pytest.FixtureRequest, packed: Packer) -> Iterator[tuple[Runtime, RouteRecorder]]:
    recorder = RouteRecorder()
    with load(packed(request.param, 4), Options(memory="8GiB", ctx_size=256), recorder) as runtime:
        yield runtime, recorder


def test_a_rule_sees_the_gate_and_decides(runtime: tuple[Runtime, RouteRecorder]) -> None:
    model, recorder = runtime
    rule = Watching()
    model.follow(rule)
    sequence = model.new_sequence()
    model.prefill(sequence, some_ids(1, 9)[0].tolist())
    first = recorder.take()
    model.decode([sequence], [5])
    assert {layer: len(index_TK) for layer, index_TK in first.items()} == {info.layer: 9 for info in rule.layers}
    assert len(rule.done) == 2 and [layer for layer, _ in rule.seen] == 2 * list(range(len(rule.layers)))
    prompt, answer = rule.done[0].spans[0], rule.done[1].spans[0]
    assert (prompt.first, prompt.last, prompt.position, prompt.answer_row) == (0, 9, 0, 9)
    assert (answer.first, answer.last, answer.position, answer.answer_row) == (0, 1, 9, 0)
    assert answer.state is sequence.routing and sequence.routing.tokens == 10
    sequence.truncate(0)
    assert sequence.routing.tokens == 0
    sequence.close()


def test_other_routes_give_other_logits_and_the_same_routes_the_same(packed: Packer) -> None:
    ids = some_ids(1, 12)
    found = []
    for rule in (None, Watching(replace=False), Watching()):
        with load(packed("qwen3_moe", 4), Options(memory="8GiB", ctx_size=256)) as model:
            if rule is not None:
                model.follow(rule)
            found.append(model.logits(ids))
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-2)


def test_a_rule_that_reads_no_logits_leaves_the_gates_where_they_are(packed: Packer) -> None:
    ids, found = some_ids(1, 12), []
    for rule in (Watching(), Blind()):
        with load(packed("qwen3_moe", 4), Options(memory="8GiB", ctx_size=256)) as model:
            model.follow(rule)
            watched = [isinstance(block.router, RuledRouter) for block in moe_blocks(model.model)]
            assert all(watched) if rule.wants_logits else not any(watched)
            found.append(model.logits(ids))
            assert [layer for layer, _ in rule.seen] == list(range(len(rule.layers)))
            found.append(model.logits(ids[:, :1]))  # one token, whose experts are in memory by now
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]), "the same routes"


def test_parts_of_several_sequences_are_told_apart(packed: Packer) -> None:
    with load(packed("glm4_moe", 4), Options(memory="8GiB", ctx_size=256, kv_tokens=1024)) as model:
        rule = Watching()
        model.follow(rule)
        one, two = model.new_sequence(), model.new_sequence()
        model.prefill(one, [3, 4, 5])
        two.prompt_tokens = 2
        model.advance([Part(two, [7, 8, 9], wants_logits=False), Part(one, [6], decode=True)])
        spans = rule.done[-1].spans
        assert [(s.first, s.last, s.position, s.answer_row) for s in spans] == [(0, 1, 3, 0), (1, 4, 0, 3)]
        assert [s.state for s in spans] == [one.routing, two.routing]
        one.close()
        two.close()


def test_every_router_has_a_rule(runtime: tuple[Runtime, RouteRecorder]) -> None:
    model, _ = runtime
    width = model.config.hidden_size
    for block in moe_blocks(model.model):
        rule = layer_rule(block, width)
        assert rule.top_k == 2
        logits = torch.randn(5, 8)
        index, weights = select(logits, rule, top_k=1)
        assert index.shape == weights.shape == (5, 1)
        alone = [select(row[None], rule)[1] for row in logits]
        assert torch.equal(torch.cat(alone), select(logits, rule)[1]), "a token's route depends on its own row alone"


def test_select_is_the_rule_that_deepseek_publishes() -> None:
    """Against a plain loop: sigmoid, correction for the choice alone, best groups by their two best, scaled weights."""
    generator = torch.Generator().manual_seed(2)
    correction = torch.randn(16, generator=generator) * 0.2
    rule = LayerRule(3, "sigmoid", True, correction, groups=4, top_groups=2, scaling=2.5)
    logits = torch.randn(20, 16, generator=generator)
    index, weights = select(logits, rule)
    for row, chosen, mass in zip(logits, index.tolist(), weights.tolist(), strict=True):
        score = row.sigmoid()
        choice = (score + correction).tolist()
        groups = sorted(range(4), key=lambda g: -sum(sorted(choice[4 * g : 4 * g + 4])[-2:]))[:2]
        allowed = [e for e in range(16) if e // 4 in groups]
        best = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert chosen == best
        total = sum(float(score[e]) for e in best)
        assert mass == pytest.approx([2.5 * float(score[e]) / total for e in best], rel=1e-5)
