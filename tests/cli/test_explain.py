"""`stoker explain` on what a real store writes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stoker.cli.main import build_app

FED = ("--memory", "2GiB", "--prompt", "16", "--decode", "24", "--warmup", "2", "--threads", "1", "--repeats", "1")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


@pytest.fixture(scope="module")
def files(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("explain")
    trace, result = folder / "b.trace", folder / "b.json"
    done = command("bench", store, *FED, "--path", "exact", "--trace", trace, "--out", result)
    assert done.exit_code == 0, done.output
    return trace, result


def test_both_kinds_in_one_call(files: tuple[Path, Path]) -> None:
    done = command("explain", *files)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("bound by") == 2 and done.stdout.count("what would help most") == 2
    assert "stoker exact lru warm" in done.stdout and "0.0% of 4 experts a token" in done.stdout


def test_json(files: tuple[Path, Path]) -> None:
    (verdict,) = json.loads(command("explain", files[0], "--json").stdout)
    assert set(verdict) == {"source", "bound", "because", "parts_ms", "figures", "change", "then_ms"}
    assert sum(verdict["parts_ms"].values()) > 0 and verdict["source"] == "b.trace"


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.trace").write_text("no")
    for name in ("a.json", "b.json", "c.trace", "gone.trace", "gone.json"):
        done = command("explain", tmp_path / name)
        assert done.exit_code == 1 and name in done.output and "Traceback" not in done.output
