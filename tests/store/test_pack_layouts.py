"""Every published layout packs into what the loaded model computes with: experts, routers, dense weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, expert_matrices, save_tiny

from stoker.checkpoint.source import open_checkpoint
from stoker.quant.formats import MatrixSpec, PlacedMatrix, WeightFormat
from stoker.quant.reference import Parts, dequantize, quantize
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, plan_pack
from stoker.store.reader import DenseTensor, Store, open_store


def read_record(store: Store, pool: int, expert: int) -> np.ndarray:
    extent = store.record(pool, expert)
    return np.fromfile(extent.file, np.uint8, extent.length, offset=extent.offset)


def matrix_of(record: np.ndarray, placed: PlacedMatrix) -> torch.Tensor:
    """float32 [rows, cols], cut out of a record by the layout alone."""
    spec = placed.spec
    raw = torch.from_numpy(record)
    codes = raw[placed.codes : placed.codes + spec.codes_bytes].view(torch.uint32).view(spec.codes_shape)
    if spec.format.kind != "affine":
        return dequantize(Parts(codes, None, None), spec)
    dtype = torch.float16 if spec.format.scale_dtype == "f16" else torch.bfloat16
    scales, biases = (
        raw[at : at + spec.scales_bytes].view(dtype).view(spec.scales_shape) for at in (placed.scales, placed.biases)
    )
    return dequantize(Parts(codes, scales, biases), spec)


def dense_value(tensor: DenseTensor) -> torch.Tensor:
    parts = tensor.read()
    if tensor.spec is None:
        return parts["data"].float()
    return dequantize(Parts(parts["codes"], parts.get("scales"), parts.get("biases")), tensor.spec)


def expected(w: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    return dequantize(quantize(w.float(), fmt), MatrixSpec(*w.shape, fmt))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_those_of_the_loaded_model(name: str, bits: int, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "src")
    options = PackOptions(bits, None if bits == 16 else 32)
    pack(plan_pack(open_checkpoint(tmp_path / "src"), options), tmp_path / "store")
    store = open_store(tmp_path / "store")
    wanted = expert_matrices(model, name)
    assert {(pool.layers[0], e) for pool in store.pools for e in range(pool.experts)} == wanted.keys()
    fmt = options.wanted("BF16")
    for pool in store.pools:
        assert store.record(pool.id, 0).length == pool.layout.record_bytes
        for expert in range(pool.experts):
            record = read_record(store, pool.id, expert)
            matrices = wanted[pool.layers[0], expert]
            for part in ("gate", "up", "down"):
                placed = getattr(pool.layout, part)
                assert torch.equal(matrix_of(record, placed), expected(matrices[part], fmt)), (name, part, expert)
                assert (placed.row_bias is not None) == (f"{part}_bias" in matrices)
                if placed.row_bias is not None:
                    raw = record[placed.row_bias : placed.row_bias + 4 * placed.spec.rows].view(np.float32)
                    assert np.array_equal(raw, matrices[f"{part}_bias"].float().numpy())


@pytest.mark.parametrize("name", CONFIGS)
def test_dense_tensors_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "src")
    checkpoint = open_checkpoint(tmp_path / "src")
    pack(plan_pack(checkpoint, PackOptions(8, 32)), tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert store.dense, name
    for tensor in store.dense.values():
        source = checkpoint.tensors[tensor.name].read()
        if tensor.spec is None:
            assert tensor.shape == tuple(source.shape)
            assert torch.equal(tensor.read()["data"], source), tensor.name
        else:
            assert torch.equal(dense_value(tensor), expected(source, tensor.spec.format)), tensor.name
    packed = store.dense.keys()
    forgotten = [n for n in checkpoint.tensors if n not in packed and ".experts." not in n and "visual" not in n]
    assert all("block_sparse_moe" in n for n in forgotten), forgotten


@pytest.mark.parametrize("name", CONFIGS)
def test_routers_norms_and_convolutions_stay_plain_and_linears_do_not(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "src")
    plan = plan_pack(open_checkpoint(tmp_path / "src"), PackOptions(4, 32))
    plain = {source.entry.name for source in plan.dense if source.entry.spec is None}
    coded = {source.entry.name for source in plan.dense if source.entry.spec is not None}
    routers = [n for n in plain | coded if n.endswith((".mlp.gate.weight", "router.weight", "router.layer.weight"))]
    assert routers or name in ("mixtral", "lfm2_moe")
    kept = ("norm.weight", "gate.weight", "conv1d.weight", "conv.conv.weight", "router.weight", "router.layer.weight")
    assert all(name in plain for name in plain | coded if name.endswith(kept))
    assert any(n.endswith(("o_proj.weight", "out_proj.weight")) for n in coded)
    assert any(n.endswith("embed_tokens.weight") for n in coded)
    assert all(source.entry.spec.format.label() == "affine-4 g32 bf16" for source in plan.dense if source.entry.spec)


def test_vision_towers_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    save_tiny("qwen3_5_moe", tmp_path / "src")
    manifest = pack(plan_pack(open_checkpoint(tmp_path / "src"), PackOptions(4, 32)), tmp_path / "store")
    assert not any("visual" in entry.name for entry in manifest.dense)
    assert manifest.notes["left_out"][0].startswith("vision tower: 21 tensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_source_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """fp16 gets fp16 scales; plain tensors keep their dtype."""
    model = save_tiny("qwen3_moe", tmp_path / "src", dtype)
    pack(plan_pack(open_checkpoint(tmp_path / "src"), PackOptions(4, 32)), tmp_path / "store")
    store = open_store(tmp_path / "store")
    fmt = WeightFormat("affine", 4, 32, "f16" if dtype == torch.float16 else "bf16")
    assert store.pools[0].layout.gate.spec.format == fmt
    norm = store.dense["model.norm.weight"]
    assert norm.read()["data"].dtype == dtype and norm.dtype == ("f16" if dtype == torch.float16 else "f32")
    w = expert_matrices(model, "qwen3_moe")[1, 3]["down"]
    assert torch.equal(matrix_of(read_record(store, 1, 3), store.pools[1].layout.down), expected(w, fmt))


def test_sharded_and_single_sources_give_the_same_model(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "one")
    save_tiny("qwen3_moe", tmp_path / "many", shard="20KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    stores = []
    for name in ("one", "many"):
        plan = plan_pack(open_checkpoint(tmp_path / name), PackOptions(4, 32))
        stores.append(pack(plan, tmp_path / f"{name}-store"))
    assert stores[0].fingerprint() == stores[1].fingerprint()
    assert stores[0].source["fingerprint"] != stores[1].source["fingerprint"]


def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix converted a tile at a time is the matrix converted at once."""
    save_tiny("gpt_oss", tmp_path / "src")
    plan = plan_pack(open_checkpoint(tmp_path / "src"), PackOptions(8, 32))
    whole = pack(plan, tmp_path / "whole")
    monkeypatch.setattr("stoker.store.pack.CHUNK_ELEMENTS", 16)
    assert pack(plan, tmp_path / "chunks").fingerprint() == whole.fingerprint()


def test_matrices_that_do_not_fit_the_group_stay_bf16_and_are_listed(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path / "src")  # kv_b_proj and q_b_proj have 32 columns
    with pytest.raises(Exception, match="columns, no multiple of the group size 64") as refused:
        plan_pack(open_checkpoint(tmp_path / "src"), PackOptions(4, 64))
    assert "use --group-size 32" in str(refused.value) and "experts.0.down_proj" in str(refused.value)


def test_dense_misfits(tmp_path: Path) -> None:
    from stoker.checkpoint.safetensors_file import TensorEntry
    from stoker.store.packplan import _float_entry

    entry = TensorEntry("model.layers.0.self_attn.o_proj.weight", "BF16", (64, 96), tmp_path, 0, 64 * 96 * 2)
    assert _float_entry(entry, PackOptions(4, 64)).spec == MatrixSpec(64, 96, WeightFormat("bf16"))
    assert _float_entry(entry, PackOptions(4, 32)).spec == MatrixSpec(64, 96, WeightFormat("affine", 4, 32))
