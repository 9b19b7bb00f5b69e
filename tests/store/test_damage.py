"""A store that was damaged, cut, mixed up or written by somebody else is refused by name: at opening, or by verify."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.errors import StoreError
from stoker.quant.formats import WeightFormat
from stoker.store.reader import open_store
from stoker.store.synth import write_store
from stoker.store.synth_shapes import shape


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mini"
    write_store(path, shape("qwen3.5-35b-a3b-mini"), WeightFormat("affine", 4, 64), seed=1)
    return path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "mini")
    return tmp_path / "mini"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def edit_manifest(store: Path, change: Callable[[dict], None]) -> None:
    body = json.loads((store / "stoker.json").read_text())
    change(body)
    (store / "stoker.json").write_text(json.dumps(body))


def test_a_whole_store_verifies_and_counts_every_byte(store: Path) -> None:
    opened = open_store(store)
    seen: list[int] = []
    total = opened.verify(seen.append)
    assert total == sum(seen) == sum(extent.length for _, extent, _ in opened.checks())
    assert total > opened.expert_bytes + opened.dense_bytes


@pytest.mark.parametrize(("pool", "expert", "at"), [(0, 0, 0), (3, 15, -1), (1, 7, 5000)])
def test_one_flipped_bit_in_a_record_is_found_and_named(store: Path, pool: int, expert: int, at: int) -> None:
    extent = open_store(store).record(pool, expert)
    flip(Path(extent.file), extent.offset + at % extent.length)
    with pytest.raises(StoreError, match=f"pool {pool} expert {expert} is damaged"):
        open_store(store).verify()


def test_one_flipped_bit_in_every_kind_of_dense_part_is_found(store: Path) -> None:
    tensor = open_store(store).dense["lm_head.weight"]
    assert set(tensor.parts) == {"codes", "scales", "biases"}
    for part, extent in tensor.parts.items():
        flip(Path(extent.file), extent.offset + extent.length // 2)
        with pytest.raises(StoreError, match=rf"lm_head.weight \({part}\) is damaged"):
            open_store(store).verify()
        flip(Path(extent.file), extent.offset + extent.length // 2)
    open_store(store).verify()


def test_a_changed_tokenizer_is_found(store: Path) -> None:
    flip(store / "tokenizer.json", 100)
    with pytest.raises(StoreError, match=r"tokenizer\.json is damaged"):
        open_store(store).verify()


def test_a_missing_tokenizer_is_found(store: Path) -> None:
    (store / "tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"tokenizer\.json is damaged"):
        open_store(store).verify()


def test_two_swapped_records_are_found(store: Path) -> None:
    opened = open_store(store)
    a, b = opened.record(0, 1), opened.record(0, 2)
    data = Path(a.file).read_bytes()
    swapped = bytearray(data)
    swapped[a.offset : a.offset + a.length] = data[b.offset : b.offset + b.length]
    swapped[b.offset : b.offset + b.length] = data[a.offset : a.offset + a.length]
    Path(a.file).write_bytes(swapped)
    with pytest.raises(StoreError, match="pool 0 expert 1 is damaged"):
        open_store(store).verify()


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_cut_file_is_refused_at_opening(store: Path, kind: str) -> None:
    file = next(store.glob(f"{kind}-*"))
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    with pytest.raises(StoreError, match="wrong size"):
        open_store(store)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_missing_file_is_refused_at_opening(store: Path, kind: str) -> None:
    next(store.glob(f"{kind}-*")).unlink()
    with pytest.raises(StoreError, match="missing"):
        open_store(store)


def test_a_damaged_header_is_refused_at_opening(store: Path) -> None:
    file = next(store.glob("experts-*"))
    for offset in (0, 7, 8, 30, open_store(store).record(0, 0).offset - 1):
        original = file.read_bytes()
        flip(file, offset)
        with pytest.raises(StoreError):
            open_store(store)
        file.write_bytes(original)


def test_a_missing_record_is_named(store: Path) -> None:
    """The header is rewritten so that one record has another name: same size, valid safetensors."""
    import zlib

    file = next(store.glob("experts-*"))
    data = file.read_bytes().replace(b'"pool.2.expert.9"', b'"pool.2.expert.X"', 1)
    file.write_bytes(data)
    header = f"{zlib.crc32(data[: 8 + int.from_bytes(data[:8], 'little')]):08x}"
    edit_manifest(store, lambda body: body["files"][file.name].update(header=header))
    with pytest.raises(StoreError, match=r"record pool\.2\.expert\.9 is in no file"):
        open_store(store)


def test_a_newer_version_is_refused(store: Path) -> None:
    edit_manifest(store, lambda body: body.update(version=2))
    with pytest.raises(StoreError, match="newer stoker") as refused:
        open_store(store)
    assert "upgrade" in str(refused.value)


@pytest.mark.parametrize("version", [0, None, "1"])
def test_nonsense_versions_are_refused(store: Path, version: object) -> None:
    edit_manifest(store, lambda body: body.update(version=version))
    with pytest.raises(StoreError, match="no usable version"):
        open_store(store)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "other"}', '{"kind": "stoker-store", "version": 1}'])
def test_manifests_that_are_not_stokers_are_refused(store: Path, text: str) -> None:
    (store / "stoker.json").write_text(text)
    with pytest.raises(StoreError):
        open_store(store)


def test_every_missing_manifest_key_is_refused(store: Path) -> None:
    body = json.loads((store / "stoker.json").read_text())
    for key in set(body) - {"checksum"}:
        (store / "stoker.json").write_text(json.dumps({k: v for k, v in body.items() if k != key}))
        with pytest.raises(StoreError):
            open_store(store)


def test_an_edited_manifest_is_refused(store: Path) -> None:
    edit_manifest(store, lambda body: body["pools"][1]["checksums"].reverse())
    with pytest.raises(StoreError, match="its own fingerprint"):
        open_store(store)


def test_parts_that_lie_elsewhere_are_refused(store: Path) -> None:
    edit_manifest(store, lambda body: body["pools"][0]["parts"]["up"]["codes"].update(offset=1 << 40))
    with pytest.raises(StoreError, match="damaged"):
        open_store(store)


def test_a_manifest_of_another_store_is_refused(store: Path, tmp_path: Path) -> None:
    """Same shape, other weights: sizes agree, so only the checksums can tell."""
    other = tmp_path / "other"
    write_store(other, shape("qwen3.5-35b-a3b-mini"), WeightFormat("affine", 4, 64), seed=2)
    shutil.copy(other / "stoker.json", store / "stoker.json")
    with pytest.raises(StoreError, match="damaged"):
        open_store(store).verify()


def test_a_manifest_of_another_shape_is_refused_at_opening(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_store(other, shape("qwen3-30b-a3b-mini"), WeightFormat("affine", 4, 64), seed=1)
    shutil.copy(other / "stoker.json", store / "stoker.json")
    with pytest.raises(StoreError, match="wrong size"):
        open_store(store)


def test_another_models_config_is_refused_at_opening(store: Path) -> None:
    config = json.loads((store / "config.json").read_text())
    config["text_config"]["num_experts_per_tok"] = 2
    (store / "config.json").write_text(json.dumps(config))
    with pytest.raises(StoreError, match="not the one that was packed"):
        open_store(store)


def test_what_is_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such directory"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="stoker pack"):
        open_store(tmp_path)
