"""A store as a differentiable model: transformers' own code, frozen weights, experts from memory or from the store.

`load` draws up the budget, then builds. `TrainingModel` gives hidden states with a gradient and losses over chunks of
logits; a route of another kind than the gate's comes by `follow`. It owns what it loaded and trains nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stoker.errors import StokerError
from stoker.native import kernels
from stoker.runtime import budget
from stoker.runtime.dense import load_dense
from stoker.runtime.experts import activation_of
from stoker.runtime.linear import QuantLinear
from stoker.runtime.skeleton import MoeBlock, build_skeleton, moe_blocks
from stoker.store.reader import Store, open_store
from stoker.train.experts import Bank, Gating, LayerExperts, MemoryBank, Passes, Route, StreamBank
from stoker.train.frozen import FrozenLinear
from stoker.train.plan import LOSS_ROWS, Hold, TrainPlan, plan_training
from stoker.train.records import Records

LossOf = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class BaseOptions:
    """How the base is held while training; `memory` as everywhere, `step_tokens` of all sequences of a step."""

    memory: str | int = "auto"
    hold: Hold = "auto"
    step_tokens: int = 2048
    sequence_tokens: int = 512
    trained_parameters: int = 0
    threads: int | None = None
    direct: bool = True


def load(directory: str | Path, options: BaseOptions | None = None) -> TrainingModel:
    """Open a store for training. Raises StoreError, OptionError or BudgetError before a weight is read."""
    options = options or BaseOptions()
    store = open_store(directory)
    model = build_skeleton(store.path)
    plan = plan_training(
        store,
        model.config.get_text_config(),
        memory=options.memory,
        hold=options.hold,
        step_tokens=options.step_tokens,
        sequence_tokens=options.sequence_tokens,
        trained_parameters=options.trained_parameters,
    )
    return TrainingModel(store, model, plan, options)


class TrainingModel:
    """The base of a training run. Not thread-safe: one step at a time."""

    def __init__(self, store: Store, model: PreTrainedModel, plan: TrainPlan, options: BaseOptions) -> None:
        self.store, self.model, self.plan = store, model, plan
        self.config = model.config.get_text_config()
        threads = options.threads or budget.default_threads()
        kernels.set_threads(threads)
        torch.set_num_threads(threads)
        self.passes = Passes()
        self.records = Records(store, direct=options.direct)
        self.blocks = moe_blocks(model)
        self.layers = self._attach_experts()
        load_dense(model, store)
        _freeze(model, keep=not plan.stream)
        self._attach_gates()
        if plan.checkpoint:
            checkpoint_layers(model, self.blocks, self.passes)

    def _attach_experts(self) -> list[LayerExperts]:
        pool_of_layer = {layer: pool for pool in self.store.pools for layer in pool.layers}
        banks: dict[int, Bank] = {}
        layers = []
        for index, block in enumerate(self.blocks):
            pool = pool_of_layer.get(block.layer)
            if pool is None:
                raise StokerError("the store has no experts for this layer", where=f"{self.store.path}: {block.path}")
            if pool.id not in banks:
                banks[pool.id] = (StreamBank if self.plan.stream else MemoryBank)(pool, self.records)
            gating = Gating(*activation_of(block.experts, block.path))
            for parameter in list(block.experts._parameters):
                block.experts._parameters[parameter] = None
            layers.append(LayerExperts(index, banks[pool.id], gating, self.passes))
            block.experts.streamed = layers[-1]
        return layers

    def _attach_gates(self) -> None:
        for layer, block in zip(self.layers, self.blocks, strict=True):
            if block.router is not None:
                block.router.register_forward_hook(_keeper(layer))

    @contextmanager
    def follow(self, route: Route | None) -> Iterator[None]:
        """Within, `route` may replace every layer's route. It is asked again when a layer of such a pass is computed
        again (`passes.recomputing`), also after this ends, and must answer the same."""
        before, self.passes.route = self.passes.route, route
        try:
            yield
        finally:
            self.passes.route = before

    def use_top_k(self, chosen: int | None) -> None:
        """Let every gate choose so many experts; None: as many as the configuration says."""
        for block in self.blocks:
            router: Any = block.router
            if not hasattr(router, "_own_top_k"):
                router._own_top_k = router.top_k
            router.top_k = chosen or router._own_top_k

    def hidden_states(self, ids_BT: Tensor, **kwargs: Any) -> Tensor:
        """Final normed hidden states float32 [B, T, D]: causal, every row a sequence from its start; padding goes to
        the right."""
        decoder = self.model.get_decoder()
        kwargs.setdefault("use_cache", False)
        return decoder(input_ids=ids_BT, **kwargs).last_hidden_state

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, V] of hidden states that are normed."""
        logits_NV = self.model.get_output_embeddings()(hidden_ND)
        scaling = getattr(self.config, "logits_scaling", None)
        return logits_NV if scaling is None else logits_NV / scaling

    def head_loss(self, hidden_ND: Tensor, loss_of: LossOf) -> Tensor:
        """The sum of `loss_of(logits [n, V], rows)` over chunks of rows: no more logits than one chunk's are held."""
        return _HeadLoss.apply(hidden_ND, self, loss_of, torch.is_grad_enabled())

    @property
    def device_bytes(self) -> int:
        """Bytes of expert records asked of the device since loading."""
        return self.records.bytes_read

    def close(self) -> None:
        self.records.close()

    def __enter__(self) -> TrainingModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _HeadLoss(torch.autograd.Function):
    """Loss and its gradient to the hidden states in one pass over chunks, as Liger's fused cross-entropy does it."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, model: TrainingModel, loss_of: LossOf, with_grad: bool) -> Tensor:
        total, grads = hidden_ND.new_zeros(()), []
        for first in range(0, len(hidden_ND), LOSS_ROWS):
            rows = slice(first, min(first + LOSS_ROWS, len(hidden_ND)))
            chunk = hidden_ND[rows].detach()
            with torch.set_grad_enabled(with_grad):
                loss = loss_of(model.logits(chunk.requires_grad_(with_grad)), rows)
            if with_grad:
                grads.append(torch.autograd.grad(loss, chunk)[0])
            total += loss.detach()
        ctx.grad_ND = torch.cat(grads) if with_grad else None
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.grad_ND * grads[0], None, None, None


def _keeper(layer: LayerExperts) -> Any:
    """A hook that hands a gate's logits to the experts that are asked next."""

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        layer.gate_logits = output[0] if isinstance(output, tuple) else output

    return keep


def _freeze(model: PreTrainedModel, keep: bool) -> None:
    """Linears that pass a gradient on, in the place of the serving ones; a tied head shares its matrix's copy."""
    made: dict[int, FrozenLinear] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, QuantLinear):
            frozen = made.setdefault(id(module.matrix), FrozenLinear(module.matrix, keep))
            model.set_submodule(path, frozen, strict=True)


def checkpoint_layers(model: PreTrainedModel, blocks: Sequence[MoeBlock], passes: Passes) -> None:
    """Keep each decoder layer's input alone, and compute the layer again in the backward pass, without its experts."""
    parts = blocks[0].path.split(".")
    at = next(place for place, part in enumerate(parts) if part.isdigit())
    layers = model.get_submodule(".".join(parts[:at]))
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, passes)


def _checkpointed(inner: Callable[..., Any], passes: Passes) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden, *args, **kwargs)
        route = passes.route
        return checkpoint(
            inner,
            hidden,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _again(passes, route)),
            **kwargs,
        )

    return forward


@contextmanager
def _again(passes: Passes, route: Route | None) -> Iterator[None]:
    """The second computation of a layer follows the route function of the first."""
    before, passes.route, passes.recomputing = passes.route, route, True
    try:
        yield
    finally:
        passes.route, passes.recomputing = before, False
