"""The command itself: endings become messages and exit codes, help is fast, nothing heavy is imported for it."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stoker import __version__
from stoker.cli import main as cli_main
from stoker.cli.main import app, build_app, command_names
from stoker.errors import BudgetError, OptionError, StoreError
from tests.cli.conftest import ENVIRONMENT, stoker


def test_version_both_ways() -> None:
    assert stoker("--version").stdout == f"stoker {__version__}\n"
    assert CliRunner().invoke(build_app(), ["-V"]).stdout == f"stoker {__version__}\n"


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    assert {"run", "chat", "doctor"} <= set(command_names())
    for name in command_names():
        assert name in result.stdout
        assert CliRunner().invoke(build_app(), [name, "--help"]).exit_code == 0


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """What makes help fast, whatever the machine; its processor time is 0.2 to 0.6 s, most of it typer and rich."""
    code = (
        "import sys; from stoker.cli.main import main\n"
        "HEAVY = ('torch', 'transformers', 'numpy', 'tokenizers')\n"
        "try: main()\n"
        "finally: print([m for m in sys.modules if m in HEAVY], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout and done.stderr == "[]\n"


def test_python_door_is_lazy() -> None:
    code = (
        "import sys, stoker; assert 'torch' not in sys.modules; assert callable(stoker.load);"
        "assert 'torch' not in sys.modules; print(stoker.Model.__name__, hasattr(stoker, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "Model False\n"


def test_unknown_options_and_commands_are_named() -> None:
    wrong = CliRunner().invoke(build_app(), ["run", "model", "x", "--temprature", "1"])
    assert wrong.exit_code == 2 and "--temprature" in wrong.output and "--temperature" in wrong.output
    wrong = CliRunner().invoke(build_app(), ["rum"])
    assert wrong.exit_code == 2 and "rum" in wrong.output


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The real group with one more command, which ends as it is told."""
    endings = {
        "option": OptionError("no such thing", where="--x", expected="y", got="z", remedy="use y"),
        "budget": BudgetError("too small", remedy="more"),
        "store": StoreError("damaged", where="/a/b"),
        "file": FileNotFoundError(2, "No such file or directory", "/a/b"),
        "interrupt": KeyboardInterrupt(),
        "bug": AssertionError("a broken invariant"),
    }

    def end(how: str) -> None:
        raise endings[how]

    group = typer.Typer(cls=cli_main._Commands, pretty_exceptions_enable=False)
    group.command("end")(end)
    group.callback()(lambda: None)
    return group


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("option", 2, ["stoker: --x: no such thing", "expected: y", "got:      z", "to do:    use y"]),
        ("budget", 3, ["too small", "more"]),
        ("store", 1, ["/a/b: damaged"]),
        ("file", 1, ["No such file or directory", "/a/b"]),
        ("interrupt", 130, ["interrupted"]),
    ],
)
def test_endings(failing: typer.Typer, how: str, code: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(failing, ["end", how])
    assert result.exit_code == code
    assert all(word in result.stderr for word in words) and result.stdout == ""
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("STOKER_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(failing, ["end", how]).stderr


def test_bugs_are_not_dressed_up(failing: typer.Typer) -> None:
    result = CliRunner().invoke(failing, ["end", "bug"])
    assert isinstance(result.exception, AssertionError)


def test_a_missing_model_is_one_message(tmp_path: Path) -> None:
    done = stoker("run", tmp_path / "nothing", "Hello")
    assert done.returncode == 1 and done.stdout == ""
    assert str(tmp_path / "nothing") in done.stderr and "Traceback" not in done.stderr


def test_registered_once() -> None:
    build_app()
    build_app()
    assert [c.name or c.callback.__name__ for c in app.registered_commands].count("run") == 1
