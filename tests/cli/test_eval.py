"""`stoker eval` as a command: figures on stdout, JSON with provenance, refusals by name."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import stoker

FEW = ("--windows", 1, "--window-tokens", 64, "--memory", "1GiB", "--threads", 1)


def test_a_store_against_its_checkpoint(plain_store: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = stoker("eval", plain_store, "--reference", plain_store.parent / "checkpoint", *FEW, "--json", file)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert {"provenance", "model", "reference", "text", "documents"} <= set(result)
    assert result["against_reference"]["all"]["kl_mean"] < 1e-3 and result["fed"] == "prompt"
    assert f"{result['tokens']} tokens; reference checkpoint" in done.stdout
    assert all(f"\n{name}" in done.stdout for name in result["perplexity"])
    again = stoker("eval", plain_store, *FEW, "--against", file, "--json", "-")
    assert json.loads(again.stdout)["against_earlier"]["all"] == {"ratio": 1.0, "ratio_95": [1.0, 1.0]}
    other = stoker("eval", plain_store, *FEW[2:], "--windows", 2, "--against", file)
    assert other.returncode == 2 and "different tokens" in other.stderr


def test_a_store_as_reference(plain_store: Path, store: Path) -> None:
    done = stoker("eval", store, "--reference", plain_store, *FEW, "--json", "-")
    assert done.returncode == 0, done.stderr
    against = json.loads(done.stdout)["against_reference"]["all"]
    assert 0 < against["kl_mean"] < 0.1 and 0.9 < against["ratio"] < 1.1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--text", "absent.txt"), "absent.txt"),
        (("--reference", "absent"), "absent"),
        (("--against", "absent.json"), "absent.json"),
        (("--text", "bundled:train"), "bundled:train"),
        (("--perplexity",), "--perplexity"),
    ],
)
def test_what_is_wrong_is_named(plain_store: Path, options: tuple[str, ...], told: str) -> None:
    done = stoker("eval", plain_store, *FEW, *options)
    assert done.returncode == 2 and told in done.stderr
