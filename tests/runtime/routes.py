"""Records the routes of a run and makes the oracle follow them, so that numbers can be compared where a tie was near.

A quantised hidden state may flip a choice between two experts whose scores are all but equal; both answers are right,
and the logits then differ by a whole expert. The comparison follows stoker's routes and checks apart that every flip
was a near tie.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.runtime.skeleton import moe_blocks


class RouteRecorder:
    """A Recorder that keeps what the layers routed, per layer in the order of the steps."""

    def __init__(self) -> None:
        self.routes: dict[int, list[Tensor]] = {}

    def layer(self, step, pool, layer, experts_TK, weights_TK, hits, misses, wait_ns) -> None:  # type: ignore[no-untyped-def]
        self.routes.setdefault(layer, []).append(experts_TK.clone())

    def read(self, *_: object) -> None: ...

    def evict(self, *_: object) -> None: ...

    def step(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def take(self) -> dict[int, Tensor]:
        """layer -> experts [T, K] of all tokens since the last take."""
        found = {layer: torch.cat(parts) for layer, parts in self.routes.items()}
        self.routes = {}
        return found


@contextmanager
def forced_routes(model: PreTrainedModel, routes: dict[int, Tensor]) -> Iterator[list[float]]:
    """Every router of `model` chooses `routes[layer]`; yields the score gaps of the choices that this changed."""
    gaps: list[float] = []
    current: list[Tensor] = []
    real = torch.topk

    def topk(scores: Tensor, k: int, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        found = real(scores, k, *args, **kwargs)
        if not current or scores.shape[-1] < int(current[-1].max()) + 1 or k != current[-1].shape[-1]:
            return found
        wanted = current[-1].view(*scores.shape[:-1], k)
        values = scores.gather(-1, wanted)
        theirs, ours = found.values.sort(-1).values, values.sort(-1).values
        spread = (scores.amax(-1) - scores.median(-1).values).clamp_min(1e-12)
        different = (found.indices.sort(-1).values != wanted.sort(-1).values).any(-1)
        gaps.extend(((theirs - ours).amax(-1) / spread)[different].tolist())
        return torch.return_types.topk((values, wanted))

    def leave(*_: object) -> None:
        current.pop()

    handles = []
    for block in moe_blocks(model):
        router = block.router
        assert router is not None
        handles.append(router.register_forward_pre_hook(lambda *_, layer=block.layer: current.append(routes[layer])))
        handles.append(router.register_forward_hook(leave))
    try:
        with mock.patch.object(torch, "topk", topk):
            yield gaps
    finally:
        for handle in handles:
            handle.remove()
