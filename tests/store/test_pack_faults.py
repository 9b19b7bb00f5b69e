"""Bad input and full disks: one clear error each, and nothing that could be taken for a store."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from stoker.checkpoint.source import open_checkpoint
from stoker.errors import CheckpointError, DiskSpaceError, OptionError, StoreError
from stoker.store.pack import needed_bytes, pack
from stoker.store.packplan import PackOptions, plan_pack
from stoker.store.reader import open_store
from stoker.store.writer import StoreWriter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "single"
    save_tiny("qwen3_moe", path)
    save_tiny("qwen3_moe", path.with_name("sharded"), shard="20KB")
    return path


@pytest.fixture
def single(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "single"))


@pytest.fixture
def sharded(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model.with_name("sharded"), tmp_path / "sharded"))


def packs(source: Path, target: Path, options: PackOptions | None = None) -> None:
    pack(plan_pack(open_checkpoint(source), options or PackOptions(4, 32)), target)


def assert_no_store(target: Path) -> None:
    with pytest.raises(StoreError):
        open_store(target)


def edit_config(source: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((source / "config.json").read_text())
    change(config)
    (source / "config.json").write_text(json.dumps(config))


def edit_tensors(source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match="names a file that is not here") as refused:
        packs(sharded, tmp_path / "store")
    assert shard.name in str(refused.value)
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="a shard is missing"):
        packs(sharded, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_truncated_shard(sharded: Path, tmp_path: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    for size in (shard.stat().st_size - 1, 100, 4, 0):
        with shard.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CheckpointError) as refused:
            packs(sharded, tmp_path / "store")
        assert shard.name in str(refused.value)
    assert not (tmp_path / "store").exists()


def test_swapped_shards(sharded: Path, tmp_path: Path) -> None:
    a, b = sorted(sharded.glob("model-*.safetensors"))[:2]
    a.rename(sharded / "spare")
    b.rename(a)
    (sharded / "spare").rename(b)
    with pytest.raises(CheckpointError, match="may have been swapped"):
        packs(sharded, tmp_path / "store")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "nowhere.safetensors"}}'])
def test_a_damaged_index(sharded: Path, tmp_path: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        packs(sharded, tmp_path / "store")


def test_a_header_of_nonsense(single: Path, tmp_path: Path) -> None:
    file = single / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="header is damaged"):
        packs(single, tmp_path / "store")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.2.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", [4, 16])
def test_weights_that_are_not_finite(single: Path, tmp_path: Path, name: str, value: float, bits: int) -> None:
    edit_tensors(single, lambda tensors: tensors[name].view(-1)[-3].fill_(value))
    with pytest.raises(CheckpointError, match="not finite") as refused:
        packs(single, tmp_path / "store", PackOptions(bits, 32 if bits == 4 else None))
    assert name in str(refused.value)
    assert_no_store(tmp_path / "store")


def test_a_missing_expert(single: Path, tmp_path: Path) -> None:
    edit_tensors(single, lambda t: [t.pop(n) for n in list(t) if ".layers.1.mlp.experts.3." in n])
    with pytest.raises(CheckpointError, match="layer 1 does not have the experts"):
        packs(single, tmp_path / "store")


def test_a_missing_matrix(single: Path, tmp_path: Path) -> None:
    edit_tensors(single, lambda t: t.pop("model.layers.1.mlp.experts.1.up_proj.weight"))
    with pytest.raises(CheckpointError, match="layer 1, expert 1: no up matrix"):
        packs(single, tmp_path / "store")


def test_a_missing_layer(single: Path, tmp_path: Path) -> None:
    edit_tensors(single, lambda t: [t.pop(n) for n in list(t) if ".layers.0." in n])
    with pytest.raises(CheckpointError, match="no tensor of layer 0"):
        packs(single, tmp_path / "store")


def test_experts_of_another_width(single: Path, tmp_path: Path) -> None:
    edit_config(single, lambda config: config.update(hidden_size=128))
    with pytest.raises(CheckpointError, match="does not fit the model's width"):
        packs(single, tmp_path / "store")


def test_a_dense_model(single: Path, tmp_path: Path) -> None:
    edit_tensors(single, lambda t: [t.pop(n) for n in list(t) if ".experts." in n])
    edit_config(single, lambda config: config.update(model_type="qwen3"))
    with pytest.raises(CheckpointError, match="no routed experts here: model type 'qwen3'"):
        packs(single, tmp_path / "store")


def test_stacked_experts_of_an_unknown_type(tmp_path: Path) -> None:
    """Rows and columns of stacked tensors cannot be told apart for a type that nobody described."""
    save_tiny("gpt_oss", tmp_path / "src")
    edit_config(tmp_path / "src", lambda config: config.update(model_type="gpt_next"))
    with pytest.raises(CheckpointError, match="'gpt_next' are not known"):
        packs(tmp_path / "src", tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "kind"), [("weight_scale_inv", "FP8"), ("qweight", "GPTQ"), ("weight_packed", "comp")]
)
def test_foreign_quantisation(single: Path, tmp_path: Path, name: str, kind: str) -> None:
    edit_tensors(single, lambda t: t.update({f"model.layers.0.self_attn.q_proj.{name}": torch.ones(4)}))
    with pytest.raises(CheckpointError, match=kind):
        packs(single, tmp_path / "store")


def test_a_config_that_says_fp8(single: Path, tmp_path: Path) -> None:
    edit_config(single, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(CheckpointError, match="fp8"):
        packs(single, tmp_path / "store")


@pytest.mark.parametrize("text", [None, "", "[1]", "{}", '{"model_type": "qwen3_moe"}'])
def test_a_useless_config(single: Path, tmp_path: Path, text: str | None) -> None:
    if text is None:
        (single / "config.json").unlink()
    else:
        (single / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        packs(single, tmp_path / "store")


@pytest.mark.parametrize("options", [(3, None), (4, 48), (16, 64), (0, None)])
def test_options_that_do_not_apply(options: tuple[int | None, int | None]) -> None:
    with pytest.raises(OptionError):
        PackOptions(*options)


def test_no_read_permission(single: Path, tmp_path: Path) -> None:
    file = single / "model.safetensors"
    file.chmod(0)
    if os.access(file, os.R_OK):  # root reads everything: try it as nobody
        for folder in (tmp_path, *tmp_path.parents):
            if folder == Path(tempfile.gettempdir()):
                break
            folder.chmod(0o755)
        child = os.fork()
        if child == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                open_checkpoint(single)
            except CheckpointError as error:
                os._exit(7 if "Permission denied" in str(error) else 8)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return
    with pytest.raises(CheckpointError, match="Permission denied"):
        packs(single, tmp_path / "store")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(CheckpointError, match="save the model as safetensors first"):
        open_checkpoint(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB; the store needs more."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(path)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
def test_no_room_is_refused_before_anything_is_written(single: Path, small_disk: Path) -> None:
    plan = plan_pack(open_checkpoint(single), PackOptions(16))
    assert needed_bytes(plan, small_disk / "store") > 96 << 10
    with pytest.raises(DiskSpaceError, match="no room") as refused:
        pack(plan, small_disk / "store")
    assert "GB free" in str(refused.value)
    assert not list(small_disk.rglob("*.safetensors*"))


@pytest.mark.root
def test_a_disk_that_fills_up(single: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may take the room after the check: one clear error, no store; with room again, it finishes."""
    monkeypatch.setattr(StoreWriter, "check_room", lambda self: None)
    target = small_disk / "store"
    with pytest.raises(DiskSpaceError, match="the disk is full"):
        packs(single, target, PackOptions(16))
    assert_no_store(target)
    assert not list(target.glob("stoker.json*"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    packs(single, target, PackOptions(16))
    open_store(target).verify()


def test_weights_beyond_the_scales(single: Path, tmp_path: Path) -> None:
    """Finite, but their range is not: no format holds them."""
    name = "model.layers.0.self_attn.q_proj.weight"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, :2] = torch.tensor([3e38, -3e38])

    edit_tensors(single, widen)
    with pytest.raises(CheckpointError, match="too large for the format") as refused:
        packs(single, tmp_path / "store")
    assert name in str(refused.value)
