"""Streamed logits against transformers' eager model, for every promised architecture and every weight format."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.runtime.model import Options, Runtime, load
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of, relative_l2
from tests.runtime.routes import RouteRecorder, forced_routes
from tests.runtime.tiny import ARCHITECTURES, VOCABULARY

BITS = (16, 8, 4)
LIMIT = 1e-3  # what the half-precision cache and 16-bit activations cost
# A choice may flip only between experts whose scores differ by this share of the scores' spread.
NEAR_TIE = 0.05


def some_ids(batch: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[(name, bits) for name in ARCHITECTURES for bits in BITS], ids=lambda p: f"{p[0]}-{p[1]}")
def case(request: pytest.FixtureRequest, packed: Packer) -> Iterator[tuple[Runtime, RouteRecorder, str, int]]:
    name, bits = request.param
    recorder = RouteRecorder()
    with load(packed(name, bits), Options(memory="8GiB", ctx_size=256), recorder) as runtime:
        yield runtime, recorder, name, bits


def test_logits_match_the_eager_model_on_the_dequantised_weights(case: tuple[Runtime, RouteRecorder, str, int]) -> None:
    runtime, recorder, _, _ = case
    oracle, ids = oracle_of(open_store(runtime.store.path)), some_ids(2, 33)
    ours = runtime.logits(ids)
    with torch.inference_mode(), forced_routes(oracle, recorder.take()) as gaps:
        theirs = oracle(input_ids=ids).logits
    worst = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert relative_l2(ours, theirs) < LIMIT, f"worst element {worst:.2e}"
    assert worst < 5 * LIMIT
    assert all(gap < NEAR_TIE for gap in gaps), gaps
    assert runtime.stats()["dropped_experts"] == 0


def test_decode_and_prefill_agree(case: tuple[Runtime, RouteRecorder, str, int]) -> None:
    """Token by token, chunk by chunk and at once: the same numbers."""
    runtime, _, _, _ = case
    ids = some_ids(1, 40)[0].tolist()
    whole = runtime.new_sequence()
    at_once = runtime.prefill(whole, ids)
    parts = runtime.new_sequence()
    runtime.prefill(parts, ids[:17])
    for token in ids[17:]:
        last = runtime.decode([parts], [token])[0]
    assert relative_l2(last, at_once) < LIMIT
    if runtime.kv is not None:
        assert torch.equal(last, at_once), "the paged path is the same function whatever the batch"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_bf16_store_is_the_published_model(name: str, packed: Packer) -> None:
    """Against the float32 eager model that transformers loads from the checkpoint itself."""
    store, recorder = packed(name, 16), RouteRecorder()
    published = AutoModelForCausalLM.from_pretrained(store.parent / "source", dtype=torch.float32).eval()
    ids = some_ids(1, 24, seed=5)
    with load(store, Options(memory="8GiB", ctx_size=256), recorder) as runtime:
        ours = runtime.logits(ids)
    with torch.inference_mode(), forced_routes(published, recorder.take()) as gaps:
        theirs = published(input_ids=ids).logits
    assert relative_l2(ours, theirs) < LIMIT
    assert all(gap < NEAR_TIE for gap in gaps), gaps


def _with_padding(experts_TK: Tensor, mask: Tensor) -> Tensor:
    """Routes of the real tokens alone -> of all tokens; what padding routes to changes nothing."""
    if len(experts_TK) == mask.numel():
        return experts_TK
    full = torch.arange(experts_TK.shape[1]).repeat(mask.numel(), 1)
    full[mask.flatten().bool()] = experts_TK
    return full


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_padding_changes_nothing(name: str, side: str, packed: Packer) -> None:
    """A padded batch equals the eager model's, and a row alone equals the row in a batch."""
    recorder = RouteRecorder()
    ids = some_ids(3, 20, seed=7)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 9)):
        mask[row, slice(0, padding) if side == "left" else slice(20 - padding, 20)] = 0
    with load(packed(name, 16), Options(memory="8GiB", ctx_size=256), recorder) as runtime:
        ours = runtime.logits(ids, mask)
        routes = {layer: _with_padding(experts, mask) for layer, experts in recorder.take().items()}
        alone = runtime.logits(ids[1:2], mask[1:2])
    oracle = oracle_of(open_store(packed(name, 16)))
    with torch.inference_mode(), forced_routes(oracle, routes):
        theirs = oracle(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    assert relative_l2(ours[real], theirs[real]) < LIMIT
    assert relative_l2(alone[0][real[1]], ours[1][real[1]]) < 1e-3


def test_coarser_activations_are_a_choice_with_a_price(packed: Packer) -> None:
    """activation_bits=8 is near, not equal; it is never what one gets without asking."""
    store, ids = packed("qwen3_moe", 4), some_ids(1, 24)
    found = {}
    for bits in (16, 8):
        with load(store, Options(memory="8GiB", ctx_size=256, activation_bits=bits)) as runtime:
            found[bits] = runtime.logits(ids)
    assert 1e-3 < relative_l2(found[8], found[16]) < 0.3
