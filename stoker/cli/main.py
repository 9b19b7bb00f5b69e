"""The `stoker` command: finds the commands beside it, and turns every ending into one message and one exit code.

Exit codes: 0 done; 1 failed; 2 a wrong option; 3 the budget does not suffice; 130 interrupted; 141 output not read.
Imports nothing heavy: each command imports what it needs when it runs.
"""

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from stoker import __version__
from stoker.cli.common import INTERRUPTED
from stoker.errors import StokerError

BROKEN_PIPE = 141
_NOT_COMMANDS = ("__init__", "main", "common", "live")
# Commands in the order of their use; those that are not named here follow by name.
_ORDER = ("run", "chat", "serve", "pull", "pack", "verify", "inspect", "doctor", "synth", "trace", "simulate", "bench")


class _Commands(TyperGroup):
    """The group of commands: the one place where an ending becomes a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            outcome = super().invoke(ctx)
            sys.stdout.flush()
            return outcome
        except (StokerError, OSError, KeyboardInterrupt) as error:
            if os.environ.get("STOKER_DEBUG") == "1":
                traceback.print_exc()
            raise typer.Exit(_tell(error)) from error


def _tell(error: BaseException) -> int:
    """Print what happened, once and without a traceback; the exit code."""
    if isinstance(error, StokerError):
        print(f"stoker: {error.render()}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print("\nstoker: interrupted", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):  # `stoker run ... | head`: stop, and keep the interpreter from complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    print(f"stoker: {error}", file=sys.stderr)
    return 1


app = typer.Typer(
    name="stoker",
    cls=_Commands,
    help="Run Mixture-of-Experts models that do not fit in memory: experts stream from SSD inside a budget that holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"stoker {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before the command."""


def command_names() -> list[str]:
    """The commands that exist: one file of this package each, with a `register(app)`."""
    names = [path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NOT_COMMANDS]
    return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def build_app() -> typer.Typer:
    """The app with every command registered; safe to call again."""
    if not app.registered_commands:
        for name in command_names():
            import_module(f"stoker.cli.{name}").register(app)
    return app


def main() -> NoReturn:
    """Run the command line and exit."""
    build_app()(prog_name="stoker")
    raise AssertionError("the command line exits by itself")


if __name__ == "__main__":
    main()
