"""What training a store needs in memory, and how the budget is divided: decided before a weight is read.

Two ways to hold the base: dequantised as float32 (fast, for small models), or quantised with its experts in the store,
read again in every pass. Loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import psutil

from stoker.errors import BudgetError, OptionError
from stoker.runtime import budget, dense
from stoker.runtime.plan import top_k
from stoker.store.reader import Store
from stoker.train.records import RING_RECORDS

Hold = Literal["auto", "memory", "stream"]
HOLDS = ("auto", "memory", "stream")
RESERVE_BYTES = 192 << 20  # allocator slack, Python objects, thread stacks, optimiser's temporaries
LOSS_ROWS = 256  # rows of logits at once


@dataclass(frozen=True)
class TrainPlan:
    """The account in bytes. stream: experts are read in every pass; else the base is kept as float32.

    checkpoint: layers are computed again in the backward pass instead of keeping what they computed.
    """

    budget_bytes: int
    process_bytes: int
    weights_bytes: int
    trained_bytes: int
    activation_bytes: int
    loss_bytes: int
    step_tokens: int
    stream: bool
    checkpoint: bool

    @property
    def used_bytes(self) -> int:
        parts = self.process_bytes + self.weights_bytes + self.trained_bytes + self.activation_bytes + self.loss_bytes
        return parts + RESERVE_BYTES

    def lines(self) -> list[str]:
        """The account for people."""
        held = "quantised, experts stay in the store" if self.stream else "dequantised, all in memory"
        kept = "layers are computed again" if self.checkpoint else "kept for the backward pass"
        rows = [
            ("interpreter and libraries", self.process_bytes, ""),
            ("base weights", self.weights_bytes, held),
            ("trained weights", self.trained_bytes, "with gradients and optimiser"),
            ("activations", self.activation_bytes, f"{self.step_tokens} tokens a step, {kept}"),
            ("logits", self.loss_bytes, f"{LOSS_ROWS} rows at a time"),
            ("reserve", RESERVE_BYTES, ""),
            ("budget", self.budget_bytes, ""),
        ]
        return [f"{name:<26}{budget.format_bytes(nbytes):>10}  {note}".rstrip() for name, nbytes, note in rows]


def plan_training(
    store: Store,
    config: Any,
    *,
    memory: str | int,
    hold: Hold,
    step_tokens: int,
    sequence_tokens: int,
    trained_parameters: int = 0,
) -> TrainPlan:
    """Divide the budget for steps of `step_tokens` in sequences of `sequence_tokens`.

    The fastest way that fits is chosen: all kept, then layers computed again, then streamed. Raises OptionError for an
    unknown `hold`, BudgetError with the tokens that would fit.
    """
    if hold not in HOLDS:
        raise OptionError("unknown way to hold the base", where="--hold", expected=", ".join(HOLDS), got=hold)
    limit = budget.resolve(memory)
    ways = [(False, False), (False, True), (True, True)]
    ways = [way for way in ways if hold == "auto" or way[0] == (hold == "stream")]
    plans = [
        _plan(store, config, limit, stream, checkpoint, step_tokens, sequence_tokens, trained_parameters)
        for stream, checkpoint in ways
    ]
    for plan in plans:
        if plan.used_bytes <= limit:
            return plan
    raise _too_small(plans[-1], limit)


def _plan(
    store: Store, config: Any, limit: int, stream: bool, checkpoint: bool, tokens: int, sequence: int, trained: int
) -> TrainPlan:
    width, layers = config.hidden_size, config.num_hidden_layers
    if stream:
        largest = max(pool.layout.record_bytes for pool in store.pools)
        weights = dense.quantised_bytes(store) + dense.plain_bytes(store) + RING_RECORDS * largest
        weights += 4 * sum(_elements(store.pools[0].layout, part) for part in ("gate", "up", "down")) + (192 << 20)
    else:
        weights = dense.quantised_bytes(store) + dense.plain_bytes(store) + 4 * _parameters(store)
    layer = tokens * _layer_token_bytes(store, config, sequence)
    activations = tokens * width * 4 * layers + 2 * layer if checkpoint else layers * layer
    return TrainPlan(
        budget_bytes=limit,
        process_bytes=psutil.Process().memory_info().rss,
        weights_bytes=weights,
        trained_bytes=16 * trained,
        activation_bytes=activations,
        loss_bytes=LOSS_ROWS * config.vocab_size * 4 * 5,
        step_tokens=tokens,
        stream=stream,
        checkpoint=checkpoint,
    )


def _layer_token_bytes(store: Store, config: Any, sequence: int) -> int:
    """What a token keeps of one layer between its passes, all in float32, with the (token, expert) pairs."""
    width, chosen = config.hidden_size, top_k(config)
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    projected = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    expert_width = max(pool.layout.down.spec.cols for pool in store.pools)
    experts = max(pool.experts for pool in store.pools)
    return 4 * (12 * width + 6 * projected + 2 * chosen * width + 6 * expert_width + 4 * experts)


def _parameters(store: Store) -> int:
    matrices = [t.spec.rows * t.spec.cols for t in store.dense.values() if t.spec is not None]
    pools = [p.experts * sum(_elements(p.layout, part) for part in ("gate", "up", "down")) for p in store.pools]
    return sum(matrices) + sum(pools)


def _elements(layout: Any, part: str) -> int:
    spec = getattr(layout, part).spec
    return int(spec.rows * spec.cols)


def _too_small(plan: TrainPlan, limit: int) -> BudgetError:
    fixed = plan.used_bytes - plan.activation_bytes
    fitting = max(0, limit - fixed) * plan.step_tokens // max(1, plan.activation_bytes)
    remedy = f"give --memory {-(-plan.used_bytes // (16 << 20)) * 16}MiB or more"
    if fitting >= 64:
        remedy += f", or steps of {fitting // 64 * 64} tokens or fewer"
    return BudgetError(
        "the budget is too small to train this model",
        where="--memory",
        expected=f"at least {budget.format_bytes(plan.used_bytes)}: " + "; ".join(plan.lines()[:-1]),
        got=budget.format_bytes(limit),
        remedy=remedy,
    )
