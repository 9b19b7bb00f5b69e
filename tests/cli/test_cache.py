"""`stoker cache`: what a prefix cache holds, and clearing it."""

import os
from pathlib import Path

from typer.testing import CliRunner

from stoker.cli.main import build_app
from stoker.generate.prefix.disk import borrow, give_back
from stoker.generate.prefix.segments import Draft, write_segment
from stoker.generate.prefix.tree import key_of


def fill(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for model, blocks in ((b"a" * 16, 1), (b"b" * 16, 3)):
        data = [(key_of([block] * 64), "", memoryview(os.urandom(9000))) for block in range(blocks)]
        write_segment(directory, Draft(model, model, 0, data))


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), ["cache", *arguments])
    return done.exit_code, done.output


def test_list_and_clear(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    damaged = next(tmp_path.glob("*.prefix"))
    os.truncate(damaged, 5000)
    code, shown = run("list", str(tmp_path))
    assert code == 0 and "1 damaged file" in shown and ("61616161" in shown) != ("62626262" in shown)
    assert "of 1 model;" in shown and "1 damaged files" not in shown
    fill(tmp_path)
    code, shown = run("list", str(tmp_path))
    assert (
        code == 0 and "61" * 8 in shown and "192 tokens" in shown and "of 2 models" in shown and "damaged" not in shown
    )
    code, shown = run("clear", str(tmp_path))
    assert code == 0 and "2 files removed" in shown
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", "notes.txt"]


def test_clearing_under_a_server_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    directory = borrow(tmp_path, 1 << 30)
    try:
        code, _ = run("list", str(tmp_path))
        assert code == 0
        code, _ = run("clear", str(tmp_path))
        assert code == 2 and len(list(tmp_path.glob("*.prefix"))) == 2
    finally:
        give_back(directory)
    assert run("list", str(tmp_path / "missing"))[0] == 2
