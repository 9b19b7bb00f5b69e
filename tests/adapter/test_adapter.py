"""The adapter format: written, read, refused; PEFT's and Edge0's files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from stoker.adapter.adapter import HEADS_FILE, add_quality, open_adapter, save_adapter
from stoker.adapter.heads import Head, features, random_head
from stoker.adapter.init import gate_of, init_adapter
from stoker.adapter.lora import LoraPair, read_lora, write_lora
from stoker.cli.main import build_app
from stoker.errors import AdapterError
from stoker.store.reader import Store, open_store
from tests.runtime.conftest import Packer


@pytest.fixture
def store(packed: Packer) -> Store:
    return open_store(packed("qwen3_moe", 4))


def some_lora(rank: int = 4) -> dict[str, LoraPair]:
    return {
        f"model.layers.{layer}.self_attn.{name}": LoraPair(torch.randn(rank, 64), torch.randn(rows, rank), 2.0)
        for layer in (0, 2)
        for name, rows in (("q_proj", 128), ("v_proj", 64))
    }


def test_what_is_saved_is_read(store: Store, tmp_path: Path) -> None:
    heads, lora = {0: random_head(8, 64, 24, 1), 1: random_head(8, 64, 24, 2)}, some_lora()
    saved = save_adapter(
        tmp_path / "a", store=store, top_k=1, heads_by_owner=heads, pairs=lora, recipe={"stage": "sft", "seed": 3},
        data={"train.jsonl": "00ff"}, quality={"perplexity": 7.5},
    )  # fmt: skip
    again = open_adapter(tmp_path / "a", store)
    assert again.manifest == saved.manifest and again.manifest.top_k == 1 and again.manifest.recipe["seed"] == 3
    assert again.fingerprint == saved.fingerprint and again.about()["heads"] == 2
    for owner, head in heads.items():
        for part in ("fc1", "fc2", "linear_init"):
            assert torch.equal(getattr(again.heads[owner], part), getattr(head, part).bfloat16())
    assert set(again.lora) == set(lora)
    for path, pair in lora.items():
        assert torch.equal(again.lora[path].b, pair.b.bfloat16()) and again.lora[path].scale == 2.0
    add_quality(tmp_path / "a", {"kl": 0.1})
    assert open_adapter(tmp_path / "a", store).manifest.quality == {"perplexity": 7.5, "kl": 0.1}
    assert open_adapter(tmp_path / "a", store).fingerprint == saved.fingerprint


def test_another_store_is_refused_with_both_fingerprints(store: Store, packed: Packer, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", store=store, heads_by_owner={0: random_head(8, 64, 24)})
    other = open_store(packed("qwen3_moe", 8))
    with pytest.raises(AdapterError) as caught:
        open_adapter(tmp_path / "a", other)
    assert store.fingerprint in str(caught.value) and other.fingerprint in str(caught.value)


def test_what_is_damaged_is_named(store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "a"
    save_adapter(directory, store=store, heads_by_owner={0: random_head(8, 64, 24)})
    manifest = json.loads((directory / "manifest.json").read_text())
    whole = (directory / HEADS_FILE).read_bytes()
    (directory / HEADS_FILE).write_bytes(whole[:-1] + b"\0")
    with pytest.raises(AdapterError, match=r"heads\.safetensors: a file is not the one"):
        open_adapter(directory, store)
    (directory / HEADS_FILE).write_bytes(whole)
    for change, message in (
        ({"version": 2}, "another version"), ({"format": "x"}, "not a stoker adapter"), ({"more": 1}, "unknown fields"),
        ({"top_k": 9}, "K is out of range"),
    ):  # fmt: skip
        (directory / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(AdapterError, match=message):
            open_adapter(directory, store)
    (directory / "manifest.json").write_text("{")
    with pytest.raises(AdapterError, match="not valid JSON"):
        open_adapter(directory, store)
    with pytest.raises(AdapterError, match="no such adapter"):
        open_adapter(tmp_path / "gone", store)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterError, match="holds no adapter"):
        open_adapter(tmp_path / "empty", store)


@pytest.mark.parametrize(
    ("heads", "message"),
    [({2: random_head(8, 64, 24)}, "no MoE layer follows"), ({0: random_head(8, 32, 24)}, "another shape")],
)
def test_heads_of_another_model_are_refused(heads: dict[int, Head], message: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=message):
        save_adapter(tmp_path / "a", store=store, heads_by_owner=heads)


def test_a_warm_start_is_the_next_gate(store: Store, tmp_path: Path) -> None:
    adapter = init_adapter(store, tmp_path / "a", hidden=24)
    assert sorted(adapter.heads) == [0, 1] and adapter.manifest.top_k == 2
    hidden, used = torch.randn(7, 64), torch.randint(0, 8, (7, 2))
    for owner, head in adapter.heads.items():
        logits = Head(head.fc1.float(), head.fc2.float(), head.linear_init.float()).logits(
            features(hidden, used, used, 8)
        )
        assert torch.allclose(logits, hidden @ gate_of(store, owner + 1).T, atol=1e-2)
    random = init_adapter(store, tmp_path / "b", hidden=24, random=True, owners=[1], top_k=1)
    assert sorted(random.heads) == [1] and random.manifest.top_k == 1 and random.heads[1].fc2.abs().sum() > 0
    with pytest.raises(AdapterError, match="no MoE layer follows"):
        init_adapter(store, tmp_path / "c", owners=[2])


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "glm4_moe", "lfm2_moe", "granitemoe", "qwen3_5_moe"])
def test_every_architecture_has_gates_to_begin_with(architecture: str, packed: Packer, tmp_path: Path) -> None:
    store = open_store(packed(architecture, 4))
    adapter = init_adapter(store, tmp_path / "a", hidden=24)
    assert sorted(adapter.heads) == sorted(layer for pool in store.pools for layer in pool.layers)[:-1]


# ---- PEFT ------------------------------------------------------------------------------------------------------------


def test_peft_files_are_read_and_written(store: Store, tmp_path: Path) -> None:
    lora = some_lora()
    write_lora(tmp_path, lora, base="x")
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    again = read_lora(tmp_path)
    assert {path: (pair.rank, pair.scale) for path, pair in again.items()} == dict.fromkeys(lora, (4, 2.0))
    adapter = open_adapter(tmp_path, store)
    assert adapter.manifest.base == "" and adapter.manifest.top_k == 2 and not adapter.heads


@pytest.mark.parametrize(
    ("change", "message"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"peft_type": "LOHA"}, "peft_type"),
     ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"r": 8}, "rank")],
)  # fmt: skip
def test_what_peft_can_and_this_cannot_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    write_lora(tmp_path, some_lora())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(AdapterError, match=message):
        read_lora(tmp_path)


def test_experts_and_gates_take_no_lora(tmp_path: Path) -> None:
    for path in ("model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.gate"):
        write_lora(tmp_path, {path: LoraPair(torch.randn(2, 64), torch.randn(32, 2), 1.0)})
        with pytest.raises(AdapterError, match="take no LoRA"):
            read_lora(tmp_path)


def test_scales_follow_peft_s_options(tmp_path: Path) -> None:
    write_lora(tmp_path, some_lora())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"lora_alpha": 6, "use_rslora": True, "alpha_pattern": {"layers.2.self_attn.v_proj": 10}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = read_lora(tmp_path)
    assert again["model.layers.0.self_attn.v_proj"].scale == 6 / 4**0.5
    assert again["model.layers.2.self_attn.v_proj"].scale == 10 / 4**0.5


# ---- Edge0 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", ["", "mlp.prerouter."])
def test_edge0_files_are_read(nested: str, store: Store, tmp_path: Path) -> None:
    heads = {owner: random_head(8, 64, 24, owner) for owner in (0, 1)}
    tensors = {
        f"layers.{owner}.{nested}{part}.weight": getattr(head, part).half()
        for owner, head in heads.items()
        for part in ("fc1", "fc2", "linear_init")
    }
    about = json.dumps({"kind": "prerouter", "K": 1, "owners": [0, 1], "format_version": 1})
    save_file(tensors, tmp_path / "prerouter_edge0_35b.safetensors", metadata={"edge0": about})
    prefix = "language_model.model.layers.0.self_attn.q_proj"
    pair = {f"{prefix}.lora_A": torch.randn(16, 64).half(), f"{prefix}.lora_B": torch.randn(128, 16).half()}
    save_file(pair, tmp_path / "lora_edge0_35b.safetensors", metadata={"edge0": json.dumps({"r": 16, "alpha": 32})})
    adapter = open_adapter(tmp_path, store)
    assert adapter.manifest.top_k == 1 and sorted(adapter.heads) == [0, 1] and adapter.manifest.base == ""
    assert torch.equal(adapter.heads[1].fc1, heads[1].fc1.half())
    assert adapter.lora["model.layers.0.self_attn.q_proj"].scale == 2.0


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command() -> Iterator[CliRunner]:
    yield CliRunner()


def test_the_command_makes_and_shows_adapters(store: Store, command: CliRunner, tmp_path: Path) -> None:
    directory = tmp_path / "a"
    made = command.invoke(
        build_app(), ["adapter", "init", str(store.path), str(directory), "--k", "1", "--owners", "1"]
    )
    assert made.exit_code == 0, made.output
    shown = command.invoke(build_app(), ["adapter", "inspect", str(directory), "--json"])
    assert shown.exit_code == 0, shown.output
    plain = json.loads(shown.stdout)
    assert plain["top_k"] == 1 and plain["heads"]["owners"] == [1] and plain["base"] == store.fingerprint
    assert "untrained" in command.invoke(build_app(), ["adapter", "inspect", str(directory)]).output
