"""Synthetic models: true shapes, the same bytes for the same seed, sane numbers, routing that follows the tokens."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf

from stoker.errors import OptionError, StoreError
from stoker.quant.formats import ExpertLayout, MatrixSpec, WeightFormat
from stoker.quant.reference import Parts, dequantize
from stoker.store.reader import Store, open_store
from stoker.store.synth import RandomWeights, parts_of, store_bytes, write_store
from stoker.store.synth_gguf import FORMAT, check_gguf_options, gguf_name, write_gguf
from stoker.store.synth_shapes import SHAPES, SynthShape, shape

MINIS = [name for name in SHAPES if name.endswith("-mini")]
FOUR = WeightFormat("affine", 4, 64)


@pytest.fixture(scope="module", params=MINIS)
def mini(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SynthShape, Store]:
    model = shape(request.param)
    path = tmp_path_factory.mktemp("synth") / request.param
    write_store(path, model, FOUR, seed=0)
    return model, open_store(path)


def state_dict(store: Store) -> dict[str, torch.Tensor]:
    """The whole model in float32, under the names that transformers gives its text model."""
    state = {}
    for name, tensor in store.dense.items():
        parts = tensor.read()
        plain = tensor.spec is None
        value = parts["data"].float() if plain else dequantize(Parts(**parts), tensor.spec)
        state[name.replace("model.language_model", "model")] = value
    for pool in store.pools:
        fused, down = [], []
        for expert in range(pool.experts):
            extent = store.record(pool.id, expert)
            record = np.fromfile(extent.file, np.uint8, extent.length, offset=extent.offset)
            matrices = [dequantize(parts_of(record, m), m.spec) for m in (pool.layout.gate, pool.layout.up)]
            fused.append(torch.cat(matrices))
            down.append(dequantize(parts_of(record, pool.layout.down), pool.layout.down.spec))
        prefix = f"model.layers.{pool.layers[0]}.mlp.experts"
        state[f"{prefix}.gate_up_proj"], state[f"{prefix}.down_proj"] = torch.stack(fused), torch.stack(down)
    return state


def test_transformers_runs_it_and_routing_follows_the_tokens(mini: tuple[SynthShape, Store]) -> None:
    description, store = mini
    config = hf.AutoConfig.from_pretrained(store.path).get_text_config()
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(state_dict(store))
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: chosen.append(output[-1]))
    ids = torch.randint(0, description.vocabulary, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    for hidden in output.hidden_states:
        assert 0.5 < hidden.pow(2).mean().sqrt() < 3.0
    assert 1.0 < output.logits.std() < 4.0
    assert output.logits.argmax(-1).unique().numel() > 20
    assert len(chosen) == description.layers
    for experts in chosen:
        counts = torch.bincount(experts.flatten(), minlength=description.experts)
        assert counts.min() > 0, "every expert is used"
        assert counts.max() < 4 * counts.float().mean(), "no expert takes all"
        assert len({tuple(sorted(row.tolist())) for row in experts}) > 48, "tokens route apart"


def test_records_differ_and_the_seed_decides(tmp_path: Path) -> None:
    model = shape("qwen3-30b-a3b-mini")
    weights = [RandomWeights(model, FOUR, seed) for seed in (0, 0, 1)]
    records = [weights[0].record(pool, expert).tobytes() for pool in range(4) for expert in range(16)]
    assert len(set(records)) == 64
    assert weights[1].record(2, 3).tobytes() == weights[0].record(2, 3).tobytes() != weights[2].record(2, 3).tobytes()


def test_codes_are_uniform_and_scales_have_both_signs() -> None:
    weights = RandomWeights(shape("qwen3-30b-a3b"), FOUR, 0)
    parts = parts_of(weights.record(7, 9), weights.layout.gate)
    codes = parts.codes.view(torch.uint8)
    counts = torch.bincount(torch.cat((codes & 15, codes >> 4)).flatten().long(), minlength=16).float()
    assert (counts / counts.mean() - 1).abs().max() < 0.02
    assert 0.48 < (parts.scales > 0).float().mean() < 0.52
    dense = dequantize(parts, weights.layout.gate.spec)
    assert abs(dense.std().item() * 2048**0.5 - 1) < 0.1
    assert dense.mean(0).abs().max() < 0.15 * dense.std()


@pytest.mark.parametrize(
    ("name", "layers", "experts", "record"),
    [("qwen3-30b-a3b", 48, 128, 2_654_208), ("qwen3.5-35b-a3b", 40, 256, 1_769_472)],
)
def test_full_shapes_are_the_published_ones(name: str, layers: int, experts: int, record: int) -> None:
    model = shape(name)
    assert (model.layers, model.experts, model.hidden) == (layers, experts, 2048)
    wide = MatrixSpec(model.width, 2048, FOUR)
    assert ExpertLayout.plan(wide, wide, MatrixSpec(2048, model.width, FOUR)).record_bytes == record
    with torch.device("meta"):
        config = hf.AutoConfig.for_model(**model.text).get_text_config()
        wanted = hf.AutoModelForCausalLM.from_config(config).state_dict()
    named = {tensor.name.replace("model.language_model", "model"): tensor.shape for tensor in model.dense}
    dense = {key: tuple(value.shape) for key, value in wanted.items() if ".mlp.experts." not in key}
    assert named == dense


def test_fewer_layers(tmp_path: Path) -> None:
    model = shape("qwen3.5-35b-a3b-mini", layers=2)
    write_store(tmp_path / "two", model, FOUR, 0)
    store = open_store(tmp_path / "two")
    assert len(store.pools) == 2 and store.config["text_config"]["num_hidden_layers"] == 2
    assert store.config["text_config"]["layer_types"] == ["linear_attention"] * 2
    assert store.expert_bytes + store.dense_bytes == store_bytes(model, RandomWeights(model, FOUR, 0))


def test_writing_again_changes_nothing_and_another_seed_is_refused(tmp_path: Path) -> None:
    model = shape("qwen3-30b-a3b-mini")
    first = write_store(tmp_path / "mini", model, FOUR, 0)
    assert write_store(tmp_path / "mini", model, FOUR, 0) == first
    with pytest.raises(StoreError, match="a store here already"):
        write_store(tmp_path / "mini", model, FOUR, 1)


def test_the_gguf_holds_the_very_same_weights(tmp_path: Path) -> None:
    model = shape("qwen3-30b-a3b-mini")
    write_store(tmp_path / "mini", model, FORMAT, 4)
    size = write_gguf(tmp_path / "mini.gguf", model, 4)
    assert size == (tmp_path / "mini.gguf").stat().st_size
    reader = gguf.GGUFReader(tmp_path / "mini.gguf")
    tensors = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    store = open_store(tmp_path / "mini")
    state = state_dict(store)
    for name in store.dense:
        assert torch.equal(tensors.pop(gguf_name(name)).view(state[name].shape), state[name]), name
    for layer in range(4):
        fused = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        block = f"blk.{layer}.ffn"
        assert torch.equal(tensors.pop(f"{block}_gate_exps.weight"), fused[:, :64])
        assert torch.equal(tensors.pop(f"{block}_up_exps.weight"), fused[:, 64:])
        down = state[f"model.layers.{layer}.mlp.experts.down_proj"]
        assert torch.equal(tensors.pop(f"{block}_down_exps.weight"), down)
    assert not tensors
    assert reader.get_field("general.architecture").contents() == "qwen3moe"
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == model.vocabulary


def test_ggufs_that_cannot_be_the_same_are_refused() -> None:
    with pytest.raises(OptionError, match="groups of 32"):
        check_gguf_options(shape("qwen3-30b-a3b-mini"), FOUR)
    with pytest.raises(OptionError, match="qwen3 shapes alone"):
        check_gguf_options(shape("qwen3.5-35b-a3b-mini"), FORMAT)


def test_unknown_shapes_and_layer_counts_are_refused() -> None:
    with pytest.raises(OptionError, match=r"qwen3\.5-35b-a3b-mini"):
        shape("qwen9")
    with pytest.raises(OptionError):
        shape("qwen3-30b-a3b", layers=0)


def test_the_tokenizer_takes_any_text(mini: tuple[SynthShape, Store]) -> None:
    _, store = mini
    tokenizer = hf.AutoTokenizer.from_pretrained(store.path)
    for text in ("Hello", "naïve café\n\t✓ 漢字", "  two  spaces"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == 511 == dataclasses.asdict(mini[0])["vocabulary"] - 1
