"""MLX checkpoints: codes, scales and biases arrive byte for byte; names and rewritten tensors become the authors'."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mlx_models import save_mlx
from safetensors.torch import load_file, save_file

from stoker.checkpoint.source import open_checkpoint
from stoker.errors import CheckpointError, OptionError
from stoker.quant.formats import PlacedMatrix
from stoker.quant.reference import Parts, unpack_tiles
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, plan_pack
from stoker.store.reader import Store, open_store


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def published(module: str) -> str:
    return module.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")


def packed(source: Path, target: Path) -> Store:
    pack(plan_pack(open_checkpoint(source), PackOptions()), target)
    return open_store(target)


def expert_parts(store: Store, pool: int, expert: int, placed: PlacedMatrix, scales: torch.dtype) -> Parts:
    extent = store.record(pool, expert)
    raw = torch.from_numpy(np.fromfile(extent.file, np.uint8, extent.length, offset=extent.offset))
    spec = placed.spec
    halves = [
        raw[at : at + spec.scales_bytes].view(scales).view(spec.scales_shape) for at in (placed.scales, placed.biases)
    ]
    codes = raw[placed.codes : placed.codes + spec.codes_bytes].view(torch.uint32).view(spec.codes_shape)
    return unpack_tiles(Parts(codes, *halves), spec)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_every_quantised_byte_of_the_source_comes_back(tmp_path: Path, scales: torch.dtype) -> None:
    made = save_mlx(tmp_path / "mlx", scales=scales)
    store = packed(made.path, tmp_path / "store")
    checked = 0
    for module, (parts, fmt) in made.parts.items():
        if "switch_mlp" in module:
            layer, matrix = int(module.split(".")[3]), module.rsplit(".", 1)[1].removesuffix("_proj")
            placed = getattr(store.pools[layer].layout, matrix)
            assert placed.spec.format == fmt
            for expert in range(store.pools[layer].experts):
                got = expert_parts(store, layer, expert, placed, scales)
                assert all(same(mine, theirs[expert]) for mine, theirs in zip(got, parts, strict=True)), module
                checked += 1
        else:
            tensor = store.dense[published(module) + ".weight"]
            assert tensor.spec is not None and tensor.spec.format == fmt
            got = unpack_tiles(Parts(**tensor.read()), tensor.spec)
            assert all(same(mine, theirs) for mine, theirs in zip(got, parts, strict=True)), module
            checked += 1
    assert checked == 2 * 3 * 4 + 2 + 2 * 2


def test_mixed_widths_share_a_record(tmp_path: Path) -> None:
    store = packed(save_mlx(tmp_path / "mlx").path, tmp_path / "store")
    layout = store.pools[1].layout
    assert (layout.gate.spec.format.bits, layout.down.spec.format.bits) == (4, 8)


def test_norms_and_convolutions_become_the_authors_own(tmp_path: Path) -> None:
    made = save_mlx(tmp_path / "mlx")
    store = packed(made.path, tmp_path / "store")
    for name, value in made.plain.items():
        got = store.dense[published(name)].read()["data"]
        if "conv1d" in name:
            assert torch.equal(got, value.transpose(1, 2)) and got.shape == (96, 1, 4)
        elif name.endswith(("input_layernorm.weight", "model.norm.weight")):
            assert got.dtype == torch.float32 and torch.equal(got + 1.0, value.float())
        else:
            assert torch.equal(got, value), name  # linear_attn.norm multiplies by w itself
    assert store.manifest.source["kind"] == "mlx"


def test_norms_of_a_checkpoint_that_was_not_rewritten_are_left_alone(tmp_path: Path) -> None:
    made = save_mlx(tmp_path / "mlx")
    tensors = load_file(made.path / "model.safetensors")
    for name in [n for n in tensors if "conv1d" in n]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, made.path / "model.safetensors")
    store = packed(made.path, tmp_path / "store")
    norm = store.dense["model.language_model.norm.weight"]
    assert same(norm.read()["data"], made.plain["language_model.model.norm.weight"])


def test_bits_do_not_apply(tmp_path: Path) -> None:
    made = save_mlx(tmp_path / "mlx")
    for options in (PackOptions(bits=4), PackOptions(group_size=64)):
        with pytest.raises(OptionError, match="byte for byte"):
            plan_pack(open_checkpoint(made.path), options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "mxfp4"}, "'mxfp4' mode is not supported"),
        ({"bits": 3}, "bits must be 4 or 8"),
        ({"bits": 8}, "disagree with the config"),
        ({"group_size": 32}, "disagree with the config"),
        ({"group_size": 16}, "group size must be"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    made = save_mlx(tmp_path / "mlx")
    config = json.loads((made.path / "config.json").read_text())
    config["quantization"].update(change)
    (made.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        plan_pack(open_checkpoint(made.path), PackOptions())


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    made = save_mlx(tmp_path / "mlx")
    tensors = load_file(made.path / "model.safetensors")
    name = "language_model.model.layers.1.mlp.switch_mlp.up_proj.scales"
    tensors[name][2, 5, 0] = float("nan")
    save_file(tensors, made.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"switch_mlp\.up_proj\.weight \(layer 1, expert 2, up\)"):
        packed(made.path, tmp_path / "store")
