"""Training's forward and backward pass against autograd on transformers' eager model of the dequantised weights."""

import pytest
import torch
from torch import Tensor, nn

from stoker.store.reader import open_store
from stoker.train.model import BaseOptions, TrainingModel, load
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of, relative_l2
from tests.runtime.tiny import ARCHITECTURES, VOCABULARY

# Float32 sums in another order, and what streaming's kernels round: activations to 16 bits in blocks of 32.
LIMITS = {"memory": 2e-6, "stream": 3e-3}


def some_ids(batch: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum")


def loss_and_gradient(model: TrainingModel, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Of the input embeddings, so that the gradient has gone through every layer."""
    embeds = model.model.get_input_embeddings()(ids_BT).detach().requires_grad_()
    hidden = model.model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state
    targets_N = ids_BT[:, 1:].flatten()
    loss = model.head_loss(hidden[:, :-1].flatten(0, 1), lambda logits, rows: cross_entropy(logits, targets_N[rows]))
    loss.backward()
    assert embeds.grad is not None
    return loss.detach(), embeds.grad


def oracle_loss_and_gradient(model: nn.Module, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    embeds = model.get_input_embeddings()(ids_BT).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    loss.backward()
    assert embeds.grad is not None
    return loss.detach(), embeds.grad


@pytest.mark.parametrize("hold", ["memory", "stream"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_gradient_is_that_of_autograd(architecture: str, hold: str, packed: Packer) -> None:
    store, ids = packed(architecture, 4), some_ids(2, 24)
    wanted_loss, wanted = oracle_loss_and_gradient(oracle_of(open_store(store)), ids)
    with load(store, BaseOptions(memory="6GiB", hold=hold, step_tokens=64, threads=1)) as model:
        loss, found = loss_and_gradient(model, ids)
    assert abs(loss - wanted_loss) / wanted_loss < LIMITS[hold]
    assert relative_l2(found, wanted) < LIMITS[hold]


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_a_step_reads_each_expert_twice_whatever_the_tokens(tokens: int, packed: Packer) -> None:
    store = packed("qwen3_moe", 4)
    with load(store, BaseOptions(memory="6GiB", hold="stream", step_tokens=tokens, threads=1)) as model:
        loss_and_gradient(model, some_ids(tokens // 16, 16))
        assert model.device_bytes <= 2.1 * model.store.expert_bytes
        if tokens == 256:
            assert model.device_bytes == 2 * model.store.expert_bytes
