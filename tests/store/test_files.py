"""The format itself: readable with the safetensors library alone, every record one aligned extent, no holes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.store.files import dense_parts, lay_out
from stoker.store.manifest import DenseEntry, read_manifest
from stoker.store.reader import open_store
from stoker.store.synth import RandomWeights, synth_plan, write_store
from stoker.store.synth_shapes import shape

MINI = shape("qwen3.5-35b-a3b-mini")
FORMAT = WeightFormat("affine", 4, 32, "f16")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mini"
    write_store(path, MINI, FORMAT, seed=3)
    return path


def test_the_safetensors_library_reads_every_record(path: Path) -> None:
    store = open_store(path)
    seen = 0
    for file in sorted(path.glob("experts-*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                _, pool, _, expert = name.split(".")
                extent = store.record(int(pool), int(expert))
                assert extent.file == str(file) and extent.offset % 4096 == 0 and extent.length % 4096 == 0
                mine = np.fromfile(file, np.uint8, extent.length, offset=extent.offset)
                assert np.array_equal(handle.get_tensor(name).numpy(), mine)
                seen += 1
    assert seen == sum(pool.experts for pool in store.pools) == 64


def test_the_safetensors_library_reads_every_dense_part(path: Path) -> None:
    store = open_store(path)
    tensors = {}
    for file in path.glob("dense-*.safetensors"):
        with safe_open(file, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    mine = {}
    for tensor in store.dense.values():
        for part, value in tensor.read().items():
            mine[tensor.name if part == "data" else f"{tensor.name}.{part}"] = value
    assert mine.keys() == tensors.keys()
    for name, value in mine.items():
        assert value.dtype == tensors[name].dtype and torch.equal(
            value.view(torch.uint8), tensors[name].view(torch.uint8)
        )


def test_headers_end_in_spaces_and_files_have_no_holes() -> None:
    plan = synth_plan(MINI, RandomWeights(MINI, FORMAT, 0), 0)
    files = lay_out(plan.pools, plan.dense, shard_bytes=200_000)
    assert len(files) > 4
    for file in files:
        cursor = len(file.header)
        assert cursor % (4096 if file.name.startswith("experts") else 64) == 0
        assert file.header.rstrip(b" ").endswith(b"}")
        for start, nbytes in sorted(file.spans.values()):
            assert start == cursor
            cursor += nbytes
        assert cursor == file.nbytes
        assert file.nbytes <= 210_000 or len(file.spans) <= 3
    names = [file.name for file in files]
    total = sum(name.startswith("experts") for name in names)
    assert names[-1] == f"experts-{total:05d}-of-{total:05d}.safetensors"


def test_large_dense_parts_are_aligned_whatever_lies_before() -> None:
    odd = DenseEntry("a.bias", "bf16", (3,), None)
    matrix = DenseEntry("b.weight", "u32", (32, 64), MatrixSpec(32, 64, FORMAT))
    (file,) = lay_out((), (odd, matrix))
    assert all(file.spans[part.name][0] % 64 == 0 for part in dense_parts(matrix).values())


def test_the_manifest_survives_its_json(path: Path) -> None:
    manifest = read_manifest(path)
    assert manifest.dumps() == (path / "stoker.json").read_text()
    assert manifest.pools[0].layout == RandomWeights(MINI, FORMAT, 3).layout
    assert open_store(path).fingerprint == manifest.fingerprint()
