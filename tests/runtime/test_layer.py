"""Decoder layers with one native call for their first part: which they are, and that nothing else changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.adapter.lora import LoraPair, write_lora
from stoker.runtime.fuse import FusedAttention
from stoker.runtime.layer import FusedLayer
from stoker.runtime.model import Options, Runtime, load
from tests.runtime.conftest import Packer

PROMPT = list(range(3, 40))
OPTIONS = Options(memory="8GiB", ctx_size=64, kv_tokens=128, threads=1)


def some_logits(runtime: Runtime, adapter: str | None = None) -> Tensor:
    """A prompt, single tokens, and two sequences in one step; the first one takes the adapter."""
    first, second = runtime.new_sequence(adapter), runtime.new_sequence()
    rows = [runtime.prefill(first, PROMPT), runtime.prefill(second, PROMPT[:5])]
    rows += [runtime.decode([first], [token])[0] for token in (9, 4, 30)]
    rows += list(runtime.decode([first, second], [7, 8]))
    first.close()
    second.close()
    return torch.stack(rows)


def by_parts(layer: FusedLayer, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
    added, _cache = layer.self_attn(layer.input_layernorm(hidden_states), position_embeddings)
    hidden_states = hidden_states + added
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "glm4_moe"])
def test_fused_layers_give_the_bits_of_their_parts(name: str, packed: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(packed(name, 4), OPTIONS) as runtime:
        assert runtime.fusion.layers == runtime.config.num_hidden_layers, runtime.fusion.left
        whole, uses = some_logits(runtime), runtime.expert_uses()
        monkeypatch.setattr(FusedLayer, "forward", by_parts)
        assert torch.equal(some_logits(runtime), whole)
        assert (runtime.expert_uses() == 2 * uses).all()


def test_a_layer_with_a_lora_is_one_call_with_the_bits_of_its_parts(
    packed: Packer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"q_proj": (64, 128), "v_proj": (64, 64), "o_proj": (128, 64)}
    pairs = {
        f"model.layers.{layer}.self_attn.{leaf}": LoraPair(torch.randn(6, inputs), torch.randn(outputs, 6) * 0.1, 1.0)
        for layer in (0, 2)
        for leaf, (inputs, outputs) in shapes.items()
    }
    write_lora(tmp_path, pairs)
    with load(packed("qwen3_moe", 4), replace(OPTIONS, loras=(("some", str(tmp_path)),))) as runtime:
        plain, whole = some_logits(runtime), some_logits(runtime, "some")
        assert not torch.equal(plain[0], whole[0]) and torch.equal(plain[1], whole[1])
        monkeypatch.setattr(FusedAttention, "forward", None)  # nobody calls it: the layer's own call does all
        assert torch.equal(some_logits(runtime, "some"), whole)
        monkeypatch.undo()
        monkeypatch.setattr(FusedLayer, "forward", by_parts)
        assert torch.equal(some_logits(runtime, "some"), whole)


@pytest.mark.parametrize("name", ["granitemoe", "gpt_oss", "qwen3_5_moe"])
def test_other_layers_stay_as_they_are(name: str, packed: Packer) -> None:
    with load(packed(name, 4), OPTIONS) as runtime:
        assert runtime.fusion.layers == 0
        assert runtime.stats()["fused"]["layers"] == 0


def test_a_layer_that_computes_something_else_is_left_and_named(
    packed: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    plain = Qwen3MoeDecoderLayer.forward

    def scaled(self: Any, hidden_states: Tensor, **more: Any) -> Any:
        return plain(self, hidden_states * 0.5, **more)

    monkeypatch.setattr(Qwen3MoeDecoderLayer, "forward", scaled)
    with load(packed("qwen3_moe", 4), OPTIONS) as runtime:
        assert runtime.fusion.layers == 0
        assert any("Qwen3MoeDecoderLayer" in name for name in runtime.fusion.left)


def test_a_listener_at_the_gate_hears_every_step(packed: Packer) -> None:
    with load(packed("qwen3_moe", 4), OPTIONS) as runtime:
        wanted = some_logits(runtime)
        gate = next(module for name, module in runtime.model.named_modules() if name.endswith("mlp.gate"))
        heard: list[int] = []
        hook = gate.register_forward_hook(lambda module, given, found: heard.append(len(given[0])))
        assert torch.equal(some_logits(runtime), wanted)
        assert heard == [len(PROMPT), 5, 1, 1, 1, 2]
        hook.remove()
        assert torch.equal(some_logits(runtime), wanted) and len(heard) == 6
