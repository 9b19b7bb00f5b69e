"""Native attention against transformers' own modules with the same f32 weights: only the fp16 cache differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from isas import available
from paged import Layer, eager, relative
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen35
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from stoker.errors import OptionError, StokerError
from stoker.native import kernels
from stoker.native.attention import Attention

WIDTH = 96


def randomised(module: torch.nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # large gains make sharp softmaxes, where mistakes show
                parameter.copy_(1.5 + 0.5 * noise)
            else:
                parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0))
    return module.eval()


def sizes(heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attn_implementation": "eager",
        **more,
    }


def qwen3_layer(heads: int, kv_heads: int, head_dim: int, **layer: Any) -> tuple[Any, Any, Layer]:
    config = qwen3.Qwen3MoeConfig(**sizes(heads, kv_heads, head_dim))
    module, rotary = randomised(qwen3.Qwen3MoeAttention(config, 1)), qwen3.Qwen3MoeRotaryEmbedding(config)
    norms = {
        "q_norm": module.q_norm.weight.detach(),
        "k_norm": module.k_norm.weight.detach(),
        "eps": config.rms_norm_eps,
    }
    return module, rotary, Layer(module, rotary, **norms, **layer)


def inputs(n_tokens: int, seed: int = 1) -> Tensor:
    return torch.randn(n_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def in_chunks(layer: Layer, x: Tensor, chunks: list[int]) -> Tensor:
    layer.cache = layer.fresh_cache(seed=len(chunks))
    parts, at = [], 0
    for n in chunks:
        parts.append(layer(x[at : at + n], [0] * n, range(at, at + n)))
        at += n
    assert at == x.shape[0]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 64), (8, 2, 96), (8, 1, 128), (4, 2, 256), (3, 1, 20), (64, 1, 16), (6, 2, 72)],
)
def test_qwen3_block_equals_the_module(isa: str, heads: int, kv_heads: int, head_dim: int) -> None:
    module, rotary, layer = qwen3_layer(heads, kv_heads, head_dim)
    x = inputs(150)
    want = eager(module, rotary, x)
    got = layer(x, [0] * 150, range(150))
    assert relative(got, want) < 2e-3
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 4e-3  # no single token is off


def test_mixtral_block_without_norms(isa: str) -> None:
    config = mixtral.MixtralConfig(**sizes(8, 2, 64))
    module, rotary = randomised(mixtral.MixtralAttention(config, 1)), mixtral.MixtralRotaryEmbedding(config)
    x = inputs(100)
    assert relative(Layer(module, rotary)(x, [0] * 100, range(100)), eager(module, rotary, x)) < 2e-3


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2)])
def test_olmoe_norms_over_the_whole_projection(isa: str, heads: int, kv_heads: int) -> None:
    config = olmoe.OlmoeConfig(**{**sizes(heads, kv_heads, 16), "clip_qkv": None})
    module, rotary = randomised(olmoe.OlmoeAttention(config, 1)), olmoe.OlmoeRotaryEmbedding(config)
    norms = {"q_norm": module.q_norm.weight.detach(), "k_norm": module.k_norm.weight.detach()}
    x = inputs(100)
    got = Layer(module, rotary, **norms, eps=config.rms_norm_eps)(x, [0] * 100, range(100))
    assert relative(got, eager(module, rotary, x)) < 2e-3


def test_qwen35_output_gate_partial_rotation_and_unit_offset(isa: str) -> None:
    config = qwen35.Qwen3_5MoeTextConfig(**sizes(4, 2, 64))
    module, rotary = randomised(qwen35.Qwen3_5MoeAttention(config, 1)), qwen35.Qwen3_5MoeTextRotaryEmbedding(config)
    norms = {
        "q_norm": module.q_norm.weight.detach(),
        "k_norm": module.k_norm.weight.detach(),
        "eps": config.rms_norm_eps,
    }
    layer = Layer(module, rotary, **norms, unit_offset=True, output_gate=True)
    assert 0 < layer.block.rotary_dim < 64
    x = inputs(100)
    assert relative(layer(x, [0] * 100, range(100)), eager(module, rotary, x)) < 2e-3


@pytest.mark.parametrize("window", [None, 1, 33, 64, 100])
def test_gpt_oss_sinks_biases_and_window(isa: str, window: int | None) -> None:
    config = gpt_oss.GptOssConfig(**sizes(8, 2, 64, attention_bias=True))
    module, rotary = randomised(gpt_oss.GptOssAttention(config, 1)), gpt_oss.GptOssRotaryEmbedding(config)
    layer = Layer(module, rotary, sinks=module.sinks.detach(), window=window, half_tables=True)
    x = inputs(150)
    want = eager(module, rotary, x, window)
    assert relative(layer(x, [0] * 150, range(150)), want) < 2e-3
    assert torch.equal(in_chunks(layer, x, [1] * 150), in_chunks(layer, x, [70, 80]))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 1, 40), (16, 2, 128)])
def test_whole_prefill_chunks_and_single_tokens_agree_bit_for_bit(
    isa: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    _, _, layer = qwen3_layer(heads, kv_heads, head_dim)
    x = inputs(200)
    whole = in_chunks(layer, x, [200])
    assert not whole.isnan().any()
    assert torch.equal(in_chunks(layer, x, [1] * 200), whole)
    assert torch.equal(in_chunks(layer, x, [63, 2, 64, 7, 1, 63]), whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 4)])
def test_threads_leave_no_mark(heads: int, kv_heads: int) -> None:
    _, _, layer = qwen3_layer(heads, kv_heads, 64)
    x, before, answers = inputs(130), kernels.threads(), []
    try:
        for n in (1, 2, 3, 5):
            kernels.set_threads(n)
            answers += [in_chunks(layer, x, [130]), in_chunks(layer, x, [129, 1])]
    finally:
        kernels.set_threads(before)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_instruction_sets_agree() -> None:
    _, _, layer = qwen3_layer(8, 2, 96)
    x, before, answers = inputs(140), kernels.isa(), {}
    try:
        for name in available():
            kernels.force_isa(name)
            answers[name] = in_chunks(layer, x, [140])
    finally:
        kernels.force_isa(before)
    for answer in answers.values():  # a rounding of f32 may flip one of f16
        assert relative(answer, answers["portable"]) < 1e-4


def test_batch_of_sequences_with_lengths_and_starts_of_their_own(isa: str) -> None:
    module, rotary, layer = qwen3_layer(8, 2, 64, n_seqs=3, max_tokens=300)
    starts, lengths = [0, 70, 5], [130, 40, 1]
    rows = [inputs(n + 1, seed) for seed, n in enumerate(lengths)]
    prompt = torch.cat([x[:-1] for x in rows])
    seqs = [s for s, n in enumerate(lengths) for _ in range(n)]
    positions = [starts[s] + i for s, n in enumerate(lengths) for i in range(n)]
    prefill = layer(prompt, seqs, positions, starts).split(lengths)
    ends = [starts[s] + n for s, n in enumerate(lengths)]
    decode = layer(torch.stack([x[-1] for x in rows]), [0, 1, 2], ends, starts)
    for s, x in enumerate(rows):
        assert relative(torch.cat((prefill[s], decode[s : s + 1])), eager(module, rotary, x)) < 2e-3
    # Alone, from the same start, a sequence gets the same bits; in another order within the call too.
    alone = Layer(
        module, rotary, max_tokens=300, q_norm=module.q_norm.weight.detach(), k_norm=module.k_norm.weight.detach()
    )
    assert torch.equal(alone(rows[1][:-1], [0] * 40, range(70, 110), [70]), prefill[1])
    layer.cache = layer.fresh_cache(seed=9)
    order = torch.randperm(len(seqs), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = layer(prompt[order], [seqs[i] for i in order], [positions[i] for i in order], starts)
    assert torch.equal(mixed, torch.cat(prefill)[order])


def test_long_context() -> None:
    module, rotary, layer = qwen3_layer(4, 1, 64, max_tokens=3001)
    x = inputs(3001)
    got = torch.cat((layer(x[:3000], [0] * 3000, range(3000)), layer(x[3000:], [0], [3000])))
    assert relative(got, eager(module, rotary, x)) < 2e-3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_input_spoils_its_successors_and_nothing_before(isa: str, bad: float) -> None:
    _, _, layer = qwen3_layer(4, 2, 64)
    x = inputs(100)
    clean = in_chunks(layer, x, [100])
    x[70, 3] = bad
    got = in_chunks(layer, x, [100])
    assert torch.equal(got[:70], clean[:70])
    assert got[70:].isnan().all()


def test_half_overflow_is_an_error_and_large_halves_are_not(isa: str) -> None:
    config = mixtral.MixtralConfig(**sizes(4, 2, 64))
    module, rotary = randomised(mixtral.MixtralAttention(config, 1)), mixtral.MixtralRotaryEmbedding(config)
    x = inputs(3)
    with torch.no_grad():
        module.v_proj.weight *= 60000.0 / (x @ module.v_proj.weight.T).abs().max()
    assert relative(Layer(module, rotary)(x, [0] * 3, range(3)), eager(module, rotary, x)) < 2e-3
    with pytest.raises(StokerError, match="half"):
        Layer(module, rotary)(x * 1.2, [0] * 3, range(3))


def test_indices_out_of_range_are_refused_before_anything_is_written() -> None:
    _, _, layer = qwen3_layer(4, 2, 64, n_seqs=2, max_tokens=128)
    before = layer.cache.memory.clone()
    x = inputs(1)
    for seqs, positions, starts in [
        ([2], [0], None),
        ([-1], [0], None),
        ([0], [128], None),
        ([0], [3], [4, 0]),
        ([0], [0], [-1, 0]),
    ]:
        with pytest.raises(IndexError):
            layer(x, seqs, positions, starts)
    layer.cache.table[1, 0] = -1
    with pytest.raises(IndexError, match="block"):
        layer(x, [1], [70])
    assert torch.equal(layer.cache.memory, before)


def test_the_door_refuses_what_does_not_fit() -> None:
    _, _, layer = qwen3_layer(4, 2, 64)
    x, one = inputs(2), torch.zeros(2, dtype=torch.int32)
    cos, sin = layer.tables(torch.arange(2))
    start, pos, out = torch.zeros(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32), torch.empty(2, WIDTH)
    good = [x, cos, sin, layer.cache.address, layer.cache.table, one, pos, start, out]
    layer.block.forward(*good)
    wrong: list[tuple[int, Any]] = [
        (0, x.double()), (0, x[:, :-1]), (0, x[:1]), (0, inputs(4)[::2]), (1, cos[:1]), (1, cos[:, :-2].contiguous()),
        (2, sin.half()), (3, 0), (3, layer.cache.address + 2), (4, layer.cache.table.long()), (5, one.long()),
        (6, pos[:1]), (7, start.long()), (8, out[:1]), (8, torch.empty(WIDTH, 2).T), (8, out.double()),
    ]  # fmt: skip
    for at, value in wrong:
        with pytest.raises(ValueError):
            layer.block.forward(*good[:at], value, *good[at + 1 :])
    layer.block.forward(*good)


def test_a_block_whose_parts_do_not_fit_is_refused() -> None:
    _, _, layer = qwen3_layer(4, 2, 64)
    parts = layer.block._held[:4]
    fits: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "rotary_dim": 64, "layer": 0, "n_layers": 1}
    Attention(*parts, **fits)
    bad = [{"n_heads": 3}, {"n_kv_heads": 4}, {"head_dim": 32}, {"rotary_dim": 66}, {"rotary_dim": 3}, {"layer": 1},
           {"output_gate": True}, {"q_norm": torch.ones(64)}, {"q_norm": torch.ones(64), "k_norm": torch.ones(63)},
           {"sinks": torch.ones(3)}]  # fmt: skip
    for change in bad:
        with pytest.raises(ValueError):
            Attention(*parts, **{**fits, **change})
    with pytest.raises(OptionError):
        Attention(*parts, **fits, window=0)
