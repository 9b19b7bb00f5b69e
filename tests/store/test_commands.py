"""pack, verify, inspect and synth as a user runs them: output, exit codes, one clear message."""

import json
from pathlib import Path

import pytest
from tiny_models import save_tiny
from typer.testing import CliRunner, Result

from stoker.cli.main import build_app


def stoker(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny"
    save_tiny("qwen3_5_moe", path)
    return path


@pytest.fixture(scope="module")
def store(source: Path) -> Path:
    path = source.with_name("store")
    result = stoker("pack", source, path, "--group-size", 32)
    assert result.exit_code == 0, result.output
    assert "left out: vision tower: 21 tensors" in result.output and "packed" in result.output
    return path


def test_a_dry_run_prints_the_sizes_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    result = stoker("pack", source, tmp_path / "store", "--bits", 8, "--group-size", 32, "--dry-run")
    assert result.exit_code == 0
    assert "experts 64.0 KiB: 2 layers of 4, records of 8,192 bytes" in result.output
    assert "nothing was written" in result.output
    assert not (tmp_path / "store").exists()


def test_verify_says_whole_and_then_names_the_damage(store: Path) -> None:
    result = stoker("verify", store)
    assert result.exit_code == 0 and "whole" in result.output
    file = next(store.glob("experts-*"))
    original = file.read_bytes()
    damaged = bytearray(original)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    result = stoker("verify", store)
    file.write_bytes(original)
    assert result.exit_code == 1
    assert "pool 1 expert 3 is damaged" in result.output and "Traceback" not in result.output


def test_inspect_of_a_checkpoint_and_of_its_store_agree(source: Path, store: Path) -> None:
    checkpoint = json.loads(stoker("inspect", source, "--json").output)
    packed = json.loads(stoker("inspect", store, "--json").output)
    for key in ("layers", "moe_layers", "experts_per_layer", "top_k", "hidden_size", "expert_width", "model_type"):
        assert checkpoint[key] == packed[key], key
    assert (packed["layers"], packed["experts_per_layer"], packed["top_k"]) == (2, 4, 2)
    assert packed["sizes"]["as stored"] == checkpoint["sizes"]["4"]
    on_disk = sum(file.stat().st_size for file in store.glob("*.safetensors"))
    assert packed["sizes"]["as stored"]["total_bytes"] == on_disk
    assert checkpoint["sizes"]["4"]["total_bytes"] < checkpoint["sizes"]["8"]["total_bytes"]
    assert "4 bits: affine-4 g32" in stoker("inspect", source).output


@pytest.mark.parametrize("command", [("verify",), ("inspect",)])
def test_what_is_not_there(command: tuple[str, ...], tmp_path: Path) -> None:
    result = stoker(*command, tmp_path / "nowhere")
    assert result.exit_code == 1 and "no such" in result.output and "Traceback" not in result.output


def test_wrong_options(source: Path, tmp_path: Path) -> None:
    for arguments in (("--bits", 5), ("--group-size", 48), ("--bits", 16, "--group-size", 64), ("--nonsense", 1)):
        result = stoker("pack", source, tmp_path / "store", *arguments)
        assert result.exit_code == 2, arguments
    result = stoker("pack", source, tmp_path / "store")
    assert result.exit_code == 2 and "use --group-size 32" in result.output
    assert not (tmp_path / "store").exists()


def test_synth_writes_a_store_and_its_gguf(tmp_path: Path) -> None:
    result = stoker("synth", "qwen3-30b-a3b-mini", tmp_path / "mini", "--gguf", tmp_path / "mini.gguf")
    assert result.exit_code == 0, result.output
    assert "affine-4 g32 f16" in result.output and (tmp_path / "mini.gguf").exists()
    assert stoker("verify", tmp_path / "mini").exit_code == 0
    result = stoker("synth", "qwen3-30b-a3b-mini", "--gguf", tmp_path / "two.gguf", "--gguf-only", "--layers", 2)
    assert result.exit_code == 0 and (tmp_path / "two.gguf").stat().st_size < (tmp_path / "mini.gguf").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen9", "DIR"), "unknown shape"),
        (("qwen3-30b-a3b-mini", "DIR", "--gguf", "FILE", "--group-size", "64"), "groups of 32"),
        (("qwen3.5-35b-a3b-mini", "DIR", "--gguf", "FILE"), "qwen3 shapes alone"),
        (("qwen3-30b-a3b-mini", "DIR", "--gguf-only"), "--gguf FILE and no DIR"),
        (("qwen3-30b-a3b-mini", "DIR", "--group-size", "128"), "32 or 64"),
        (("qwen3-30b-a3b-mini",), "no directory"),
    ],
)
def test_synth_refuses(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    placed = [str(tmp_path / a) if a in ("DIR", "FILE") else a for a in arguments]
    result = stoker("synth", *placed)
    assert result.exit_code == 2 and message in result.output
    assert not list(tmp_path.iterdir())
