"""The tables of names: which tensors are experts, which stay plain, which are left out."""

import pytest

from stoker.checkpoint.layouts import ExpertTensor, expert_tensor, layer_of, left_out, stays_plain
from stoker.checkpoint.mlx import published_name
from stoker.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", ExpertTensor(3, 17, "gate", "weight")),
        ("model.language_model.layers.0.mlp.experts.2.down_proj.weight", ExpertTensor(0, 2, "down", "weight")),
        ("model.layers.9.block_sparse_moe.experts.7.w1.weight", ExpertTensor(9, 7, "gate", "weight")),
        ("model.layers.9.block_sparse_moe.experts.7.w2.weight", ExpertTensor(9, 7, "down", "weight")),
        ("model.layers.9.feed_forward.experts.7.w3.weight", ExpertTensor(9, 7, "up", "weight")),
        ("model.layers.1.mlp.experts.gate_up_proj", ExpertTensor(1, None, "gate_up", "weight")),
        ("model.layers.1.mlp.experts.gate_up_proj_bias", ExpertTensor(1, None, "gate_up", "row_bias")),
        ("model.layers.1.mlp.experts.down_proj_bias", ExpertTensor(1, None, "down", "row_bias")),
        ("model.layers.1.block_sparse_moe.input_linear.weight", ExpertTensor(1, None, "gate_up", "weight")),
        ("model.layers.1.block_sparse_moe.output_linear.weight", ExpertTensor(1, None, "down", "weight")),
        ("language_model.model.layers.5.mlp.switch_mlp.up_proj.scales", ExpertTensor(5, None, "up", "scales")),
        ("model.layers.5.mlp.experts.up_proj.biases", ExpertTensor(5, None, "up", "biases")),
        ("model.layers.5.mlp.experts.3.up_proj.scales", ExpertTensor(5, 3, "up", "scales")),
        ("model.layers.5.mlp.experts.up_proj.bias", ExpertTensor(5, None, "up", "row_bias")),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", None),
        ("model.layers.1.mlp.shared_expert.down_proj.weight", None),
        ("model.layers.1.shared_mlp.input_linear.weight", None),
        ("model.layers.0.mlp.gate_proj.weight", None),
        ("model.layers.0.feed_forward.w1.weight", None),
        ("model.layers.0.mlp.gate.weight", None),
        ("model.layers.0.self_attn.q_proj.weight", None),
    ],
)
def test_experts_are_told_by_their_names(name: str, meaning: ExpertTensor | None) -> None:
    assert expert_tensor(name) == meaning


@pytest.mark.parametrize(
    ("name", "shape", "plain"),
    [
        ("model.layers.0.mlp.gate.weight", (64, 2048), True),
        ("model.layers.0.mlp.router.weight", (64, 2048), True),
        ("model.layers.0.block_sparse_moe.router.layer.weight", (64, 2048), True),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 2048), True),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 1, 4), True),
        ("model.layers.0.conv.conv.weight", (64, 1, 3), True),
        ("model.layers.0.input_layernorm.weight", (2048,), True),
        ("model.layers.0.self_attn.q_proj.bias", (2048,), True),
        ("model.layers.0.some.narrow.weight", (2048, 16), True),
        ("model.layers.0.mlp.gate_proj.weight", (64, 2048), False),
        ("model.layers.0.conv.in_proj.weight", (64, 2048), False),
        ("model.embed_tokens.weight", (1000, 2048), False),
        ("lm_head.weight", (1000, 2048), False),
    ],
)
def test_what_is_quantised(name: str, shape: tuple[int, ...], plain: bool) -> None:
    assert stays_plain(name, shape) == plain


def test_extras_are_left_out_with_a_reason() -> None:
    assert left_out("model.visual.blocks.0.attn.qkv.weight") == left_out("vision_tower.x.weight") == "vision tower"
    assert left_out("mtp.layers.0.mlp.gate.weight") == left_out("model.mtp.fc.weight") == "multi-token prediction"
    assert left_out("model.layers.0.self_attn.rotary_emb.inv_freq") == "inverse frequencies"
    assert left_out("model.layers.0.mlp.gate.weight") is None


def test_layers() -> None:
    assert layer_of("model.language_model.layers.12.mlp.gate.weight") == 12
    assert layer_of("lm_head.weight") is None


def test_mlx_names_become_the_authors_own() -> None:
    name = "language_model.model.layers.0.mlp.gate.weight"
    assert published_name(name, "qwen3_5_moe") == "model.language_model.layers.0.mlp.gate.weight"
    assert published_name("language_model.lm_head.weight", "qwen3_5_moe") == "lm_head.weight"
    assert published_name("model.layers.0.mlp.gate.weight", "qwen3_moe") == "model.layers.0.mlp.gate.weight"
    dense = "model.layers.0.feed_forward.down_proj.weight"
    assert published_name(dense, "lfm2_moe") == "model.layers.0.feed_forward.w2.weight"
    with pytest.raises(CheckpointError, match="embed_q"):
        published_name("model.layers.0.self_attn.embed_q.weight", "deepseek_v3")
