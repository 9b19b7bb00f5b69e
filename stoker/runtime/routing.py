"""Puts a routing rule between a model's gates and its experts: finds each layer's own rule, takes the gates' logits.

Knows modules; what a rule does with a route is `stoker/routing`. A layer's rule is found by its router's attributes and
accepted only when it gives the router's own answer on random input.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stoker.errors import OptionError
from stoker.routing.rule import LayerInfo, RoutingRule, Rows, Span
from stoker.routing.select import LayerRule, select
from stoker.runtime.plan import top_k
from stoker.runtime.skeleton import MoeBlock, moe_blocks
from stoker.runtime.step import ALL_ROWS, LoraRows, Part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stoker.residency import Residency

TOLERANCE = 1e-4
CHECKED_TOKENS = 16


def attach_rule(model: PreTrainedModel, residency: Residency, rule: RoutingRule) -> None:
    """Make every MoE layer of a loaded model ask `rule`. Raises OptionError where a router or the rule does not fit."""
    blocks = moe_blocks(model)
    rule.attach([_info(index, block, model, residency) for index, block in enumerate(blocks)])
    for index, block in enumerate(blocks):
        streamed = block.experts.streamed
        streamed.index, streamed.rule = index, rule
        streamed.foresees = type(rule).coming is not RoutingRule.coming
        if not _watches_gate(rule):
            continue
        if block.router is not None and block.router_path is not None:
            ruled = RuledRouter(block.router, streamed, rule)
            model.set_submodule(block.router_path, ruled, strict=True)
        elif rule.wants_logits:
            raise _unknown(block, "the block has no router of its own")


def _watches_gate(rule: RoutingRule) -> bool:
    """Whether somebody must stand at the gates for the rule: it reads their logits, or can do without them. Where not,
    they stay part of the native call."""
    return rule.wants_logits or type(rule).needs_gate is not RoutingRule.needs_gate


def detach_rule(model: PreTrainedModel) -> None:
    """Undo `attach_rule`: from the next step on every gate's route is used."""
    for block in moe_blocks(model):
        block.experts.streamed.rule = block.experts.streamed.logits = None
        block.experts.streamed.foresees = block.experts.streamed.waits = False
        if isinstance(block.router, RuledRouter) and block.router_path is not None:
            model.set_submodule(block.router_path, block.router.gate, strict=True)


def rows_of(parts: Sequence[Part], step: int) -> Rows:
    """The rows of parts that lie one after the other in a step."""
    spans, first = [], 0
    for part in parts:
        sequence, last = part.sequence, first + len(part.ids)
        answer_from = sequence.prompt_tokens
        if answer_from is None:
            answer_from = sequence.length if part.decode else sequence.length + len(part.ids)
        spans.append(Span(first, last, sequence.length, answer_from, sequence.routing))
        first = last
    return Rows(step, tuple(spans))


def lora_rows(parts: Sequence[Part]) -> tuple[LoraRows, ...]:
    """Which rows of parts that lie one after the other take whose LoRA; neighbours with the same one are together."""
    found: list[LoraRows] = []
    first = 0
    if len(parts) == 1 and parts[0].sequence.adapter is not None:
        return ((0, ALL_ROWS, parts[0].sequence.adapter),)
    for part in parts:
        last, name = first + len(part.ids), part.sequence.adapter
        if name is not None and found and found[-1][1:] == (first, name):
            found[-1] = (found[-1][0], last, name)
        elif name is not None:
            found.append((first, last, name))
        first = last
    return tuple(found)


class RuledRouter(nn.Module):
    """Stands where a gate stood: leaves its logits for the rule, and asks it only where the rule needs it.

    listens: it does nothing else, so whoever computes the gate's route elsewhere may leave the logits in its place.
    """

    def __init__(self, gate: nn.Module, streamed: Any, rule: RoutingRule) -> None:
        super().__init__()
        self.gate, self._streamed, self._rule = gate, streamed, rule
        self._wants_logits = rule.wants_logits
        self.listens = rule.wants_logits and type(rule).needs_gate is RoutingRule.needs_gate

    def forward(self, hidden: Tensor, *more: Any) -> tuple[Any, ...]:
        streamed = self._streamed
        if not self._rule.needs_gate(streamed.index, streamed.step.rows):
            tokens = hidden.numel() // hidden.shape[-1]
            return None, torch.empty(tokens, 0), torch.empty(tokens, 0, dtype=torch.int64)
        found: tuple[Any, ...] = self.gate(hidden, *more)
        if self._wants_logits:
            streamed.logits = found[0]
        return found


def _info(index: int, block: MoeBlock, model: PreTrainedModel, residency: Residency) -> LayerInfo:
    streamed = block.experts.streamed
    width = model.config.get_text_config().hidden_size
    spare = top_k(model.config.get_text_config())  # what a token of a sequence without a roster needs
    return LayerInfo(
        index=index,
        layer=block.layer,
        experts=streamed.pool_experts,
        width=width,
        top_k=top_k(model.config.get_text_config()),
        record_bytes=residency.plan.sizes[streamed.pool].record_bytes,
        resident=lambda: residency.resident(streamed.pool),
        find_rule=lambda: layer_rule(block, width),
        slots=residency.slots(streamed.pool),
        hold=lambda experts: residency.hold(index, streamed.pool, experts, spare),
        settle=residency.settle_holds,
    )


def layer_rule(block: MoeBlock, width: int) -> LayerRule:
    """The rule by which a layer's router makes a route of its logits. Raises OptionError for a router of another kind.

    Routers that take a correction from their block (LFM2's expert_bias) are handed it here as there.
    """
    router = block.router
    if router is None:
        raise _unknown(block, "the block has no router of its own")
    if isinstance(router, RuledRouter):
        router = router.gate
    extra = [getattr(block.parent, name, None) for name in list(inspect.signature(router.forward).parameters)[1:]]
    x_TD = torch.randn(CHECKED_TOKENS, width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = router(x_TD, *extra)
        if not isinstance(found, tuple) or len(found) != 3:
            raise _unknown(block, "it does not return logits, weights and experts")
        logits_TE, weights_TK, index_TK = found
        for rule in _candidates(router, extra, index_TK.shape[-1]):
            if _same(select(logits_TE.float(), rule), (index_TK, weights_TK), logits_TE.shape[-1]):
                return rule
    raise _unknown(block, "it follows none of the rules that are known")


def _candidates(router: Any, extra: list[Any], chosen: int) -> list[LayerRule]:
    if isinstance(getattr(router, "rule", None), LayerRule):  # a native one says it
        return [router.rule]
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is None:
        correction = next((tensor for tensor in extra if isinstance(tensor, Tensor)), None)
    if correction is not None:
        correction = correction.detach().float().reshape(-1)
    groups, top_groups = _first(router, "num_group", "n_group"), _first(router, "topk_group")
    scaling = float(_first(router, "routed_scaling_factor") or 1.0)
    shared: dict[str, Any] = {"groups": int(groups or 1), "top_groups": int(top_groups or 1), "scaling": scaling}
    return [
        LayerRule(chosen, score, renormalise, correction, **shared)
        for score in ("softmax", "sigmoid")
        for renormalise in (True, False)
    ]


def _same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], experts: int) -> bool:
    """Whether two routes [T, K] give each expert of each token the same weight, in whatever order."""
    one_TE, other_TE = (
        torch.zeros(len(index_TK), experts).scatter_(1, index_TK.long(), weights_TK.float())
        for index_TK, weights_TK in (ours, theirs)
    )
    return torch.allclose(one_TE, other_TE, atol=TOLERANCE, rtol=TOLERANCE)


def _first(module: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def _unknown(block: MoeBlock, reason: str) -> OptionError:
    return OptionError(
        "the routes of this model cannot be changed",
        where=f"--routing: {block.path} ({type(block.router).__name__})",
        expected="softmax or sigmoid, groups or none, top-k",
        got=reason,
        remedy="leave out --routing",
    )
