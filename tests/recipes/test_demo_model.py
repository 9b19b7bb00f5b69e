"""The demo MoE equals its dense source, its routers follow the text, its experts differ. transformers alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from recipes.demo.make import CHOSEN, EXPERTS, SEED
from recipes.demo.routers import mlp_inputs
from recipes.demo.source import Source
from recipes.demo.upcycle import NEURON_BLOCK, neuron_order
from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.quant.reference import Parts, dequantize_rows

pytestmark = pytest.mark.slow

PROMPT = "What is the capital of France?"
ANSWER = "The capital of France is Paris.<|im_end|>"
UNSEEN = [
    "Why is the sky blue?",
    "Write a short poem about the sea and the moon.",
    "Explain how a bill becomes a law, step by step.",
    "import os\nfor root, dirs, files in os.walk('.'):\n    print(root, len(files))",
    "A farmer has 17 sheep. All but 9 run away. How many are left?",
    "The patient complained of a sore throat and a mild fever that began two days earlier.",
    "Quelle est la capitale de l'Espagne ? Je voudrais visiter le musée demain matin.",
    "Dear Sir or Madam, I am writing to complain about the service in your hotel on 3 May 2021.",
]


class Checkpoint:
    """Random access to the checkpoint's tensors, dequantised, one layer in memory at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        self.quantisation = json.loads((directory / "config.json").read_text())["quantization"]

    def raw(self, name: str) -> Tensor:
        with safe_open(self.directory / self.index[name], "pt") as shard:
            return shard.get_tensor(name)

    def __getitem__(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in self.index:
            return self.raw(name)
        parts = Parts(self.raw(name), self.raw(f"{module}.scales"), self.raw(f"{module}.biases"))
        settings = {**self.quantisation, **self.quantisation.get(module, {})}
        fmt = WeightFormat("affine", settings["bits"], settings["group_size"], "f16")
        return dequantize_rows(parts, MatrixSpec(len(parts.codes), parts.codes.shape[1] * 32 // fmt.bits, fmt))

    def experts(self, layer: int, part: str) -> list[Tensor]:
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        return [self[f"{prefix}.{expert}.{part}.weight"] for expert in range(EXPERTS)]

    def router(self, layer: int) -> Tensor:
        return self[f"model.layers.{layer}.block_sparse_moe.gate.weight"]


@pytest.fixture(scope="module")
def dense(source: Source) -> LlamaForCausalLM:
    return source.model()


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> Checkpoint:
    return Checkpoint(checkpoint)


def conversation(checkpoint: Path) -> tuple[Tensor, int]:
    """Ids [1, T] of the question with its answer, and where the answer starts."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    turn = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer(prompt)["input_ids"])
    return tokenizer(prompt + ANSWER, return_tensors="pt")["input_ids"], start


def layer_by_layer(checkpoint: Path, tensors: Checkpoint, ids: Tensor) -> Tensor:
    """Logits [1, T, V] of transformers' Mixtral at full depth; one module serves all layers, so memory stays small."""
    config = MixtralConfig.from_pretrained(checkpoint)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    model = MixtralForCausalLM(config).float().eval()
    trunk, block = model.model, model.model.layers[0]
    trunk.embed_tokens.weight.data = tensors["model.embed_tokens.weight"]
    trunk.norm.weight.data = tensors["model.norm.weight"]
    model.tie_weights()
    hidden = trunk.embed_tokens(ids)
    rotary = trunk.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    for layer in range(layers):
        block.load_state_dict(layer_state(tensors, layer, list(block.state_dict())))
        hidden = block(hidden, position_embeddings=rotary, attention_mask=None)
    return model.lm_head(trunk.norm(hidden))


def layer_state(tensors: Checkpoint, layer: int, names: list[str]) -> dict[str, Tensor]:
    """The layer under transformers' names: it keeps w1 and w3 of all experts in one tensor, w2 in another."""
    w1, w2, w3 = (tensors.experts(layer, part) for part in ("w1", "w2", "w3"))
    fused = {
        "mlp.experts.gate_up_proj": torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)]),
        "mlp.experts.down_proj": torch.stack(w2),
        "mlp.gate.weight": tensors.router(layer),
    }
    return {name: fused[name] if name in fused else tensors[f"model.layers.{layer}.{name}"] for name in names}


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@torch.inference_mode()
def test_full_depth_equals_dense_and_answers_paris(
    checkpoint: Path, tensors: Checkpoint, dense: LlamaForCausalLM
) -> None:
    ids, start = conversation(checkpoint)
    expected = dense(ids).logits
    got = layer_by_layer(checkpoint, tensors, ids)
    assert relative_l2(got, expected) < 1e-5
    # Greedy decoding gives exactly the answer: at each of its positions the best next token is the one that is there
    assert torch.equal(got[0, start - 1 : -1].argmax(-1), ids[0, start:])


def test_dense_tensors_are_the_source(tensors: Checkpoint, source: Source) -> None:
    names = [name for name in source.names if ".mlp." not in name]
    assert len(names) == 2 + 30 * 6
    for name in names:
        assert torch.equal(tensors[name], source.tensor(name)), name
    assert tensors.quantisation["model.embed_tokens"]["bits"] == 8


def test_routing_follows_the_text_and_uses_every_expert(
    checkpoint: Path, tensors: Checkpoint, dense: LlamaForCausalLM
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    repeats = []
    for layer, inputs_TD in enumerate(mlp_inputs(dense, tokenizer, UNSEEN)):
        probabilities_TE = (inputs_TD @ tensors.router(layer).T).softmax(-1)
        weights_TK, experts_TK = probabilities_TE.topk(CHOSEN)
        share_E = torch.bincount(experts_TK.flatten(), minlength=EXPERTS) / experts_TK.numel()
        assert share_E.min() > 0.01, f"layer {layer}: an expert is idle on text that the routers were not fitted to"
        assert share_E.max() < 0.45, f"layer {layer}: routing has collapsed"
        assert len({tuple(sorted(pair)) for pair in experts_TK.tolist()}) >= 14, layer
        second_T = weights_TK[:, 1] / weights_TK.sum(-1)
        assert 0.1 < second_T.mean() < 0.45, f"layer {layer}: weights do not mix"
        repeats.append((experts_TK[1:, :, None] == experts_TK[:-1, None, :]).float().sum((1, 2)).mean() / CHOSEN)
    assert torch.stack(repeats).mean() > 1.4 * CHOSEN / EXPERTS, "neighbouring tokens share no more than chance gives"


def shuffled_parts(tensors: Checkpoint, source: Source, layer: int) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    for part, name, axis in (("w1", "gate", 0), ("w3", "up", 0), ("w2", "down", 1)):
        whole = source.tensor(f"model.layers.{layer}.mlp.{name}_proj.weight")
        for expert, tensor in enumerate(tensors.experts(layer, part)):
            yield part, expert, tensor, whole.index_select(axis, neuron_order(whole.shape[axis], SEED, layer, expert))


@pytest.mark.parametrize("layer", [0, 17, 29])
def test_experts_are_the_dense_mlp_in_other_orders(tensors: Checkpoint, source: Source, layer: int) -> None:
    for part, expert, got, expected in shuffled_parts(tensors, source, layer):
        assert torch.equal(got, expected), (part, expert)
    for part in ("w1", "w2", "w3"):
        names = [f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}.weight" for e in range(EXPERTS)]
        records = torch.stack([tensors.raw(name).view(torch.uint8).flatten() for name in names])
        for one in range(EXPERTS):
            for other in range(one):
                assert (records[one] == records[other]).float().mean() < 0.1, (part, one, other)


def test_orders_move_whole_groups() -> None:
    order = neuron_order(1536, SEED, 4, 5).reshape(-1, NEURON_BLOCK)
    assert torch.equal(order.flatten().sort().values, torch.arange(1536))
    assert (order // NEURON_BLOCK == order[:, :1] // NEURON_BLOCK).all()
    assert not torch.equal(order, order.sort(1).values)


def test_a_record_of_two_experts_is_garbage(tensors: Checkpoint) -> None:
    w1, w2, w3 = (tensors.experts(11, part) for part in ("w1", "w2", "w3"))
    x_TD = torch.randn(16, 576, generator=torch.Generator().manual_seed(0))

    def mlp(gate: int, up: int, down: int) -> Tensor:
        return (torch.nn.functional.silu(x_TD @ w1[gate].T) * (x_TD @ w3[up].T)) @ w2[down].T

    whole = mlp(3, 3, 3)
    assert relative_l2(mlp(6, 6, 6), whole) < 1e-5
    for mixed in ((3, 3, 6), (3, 6, 3), (6, 3, 3)):
        assert relative_l2(mlp(*mixed), whole) > 0.5, mixed
