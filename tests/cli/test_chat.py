"""`stoker chat` at a real terminal (a pty) and from a pipe: streaming, history, Ctrl-C, commands."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stoker as stoker_package
from stoker.cli import common
from stoker.cli.main import build_app
from stoker.generate.model import Stream
from tests.cli.conftest import ENVIRONMENT, stoker, stoker_command

BUDGET = ("--memory", "2GiB")
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program on a terminal of its own, so that Ctrl-C is what a key press makes of it."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            stoker_command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT,
            start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""
        self._read_to = 0

    def expect(self, pattern: str, seconds: float = 180) -> str:
        """Wait until `pattern` appears after what was matched last; what came before it."""
        end = time.monotonic() + seconds
        while not (match := re.compile(pattern, re.S).search(self.seen, self._read_to)):
            if not select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"no {pattern!r} in {self.seen[self._read_to :]!r}")
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # the program has left the terminal
                raise AssertionError(f"ended without {pattern!r}: {self.seen[self._read_to :]!r}") from None
        before, self._read_to = self.seen[self._read_to : match.start()], match.end()
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def line(self, text: str) -> None:
        self.expect(">>> ")
        self.type(text + "\r")

    def interrupt_typing(self, pattern: str, attempts: int = 10) -> None:
        """Ctrl-C at the input line, pressed again where nothing happens, as a person would.

        CPython looks for signals only when its wait for a key is cut short, so one that arrives between a key
        and the next wait stays unseen until the next key: microseconds, or longer on a busy machine.
        """
        for attempt in range(attempts):
            self.type(CTRL_C)
            try:
                self.expect(pattern, seconds=6)
                return
            except AssertionError:
                if attempt == attempts - 1 or self.process.poll() is not None:
                    raise

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(store: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal("chat", store, "--max-tokens", getattr(request, "param", 450), *BUDGET)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("terminal", [20], indirect=True)
def test_a_conversation_at_a_terminal(terminal: Terminal) -> None:
    terminal.expect("expert slots")
    terminal.line("Hello there")
    terminal.expect(r"prompt (\d+) tokens \|.*(stop|length)")
    terminal.line("/stats")
    terminal.expect("tokens of context held")
    terminal.expect("dropped_experts +0")
    terminal.line("And again")
    terminal.expect(r"prompt \d+ tokens \((\d+) cached\)")
    terminal.line("/system Be brief.")
    terminal.expect("system message: Be brief.")
    terminal.line("/reset")
    terminal.expect("forgotten")
    terminal.line("/nonsense")
    terminal.expect("unknown command /nonsense")
    terminal.line("/quit")
    assert terminal.process.wait(timeout=180) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.line("Tell me everything")
    terminal.expect("Tell me everything\r\n.")
    terminal.type(CTRL_C)
    terminal.expect(r"prompt \d+ tokens.*cancelled")
    terminal.expect(">>> ")
    terminal.type("half a line")
    terminal.expect("half a line")
    terminal.interrupt_typing("Ctrl-D or /quit leaves")
    terminal.line("What is the capital of France?")
    terminal.expect(r"prompt \d+ tokens")
    terminal.expect(">>> ")
    terminal.type(CTRL_D)
    assert terminal.process.wait(timeout=180) == 0
    assert "Traceback" not in terminal.seen


def test_from_a_pipe(store: Path) -> None:
    """Answers alone on stdout; the second is what the model says to the whole history."""
    done = stoker("chat", store, "-n", 12, *BUDGET, "--system", "Be brief.", stdin="Hello\n\nAnd you?\n/quit\nnever\n")
    assert done.returncode == 0, done.stderr
    with stoker_package.load(store, memory="8GiB") as model:
        history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        first = model.generate(history, max_tokens=12, temperature=0.0).text
        history += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
        second = model.generate(history, max_tokens=12, temperature=0.0).text
    assert done.stdout == f"{first}\n{second}\n"
    lines = [line for line in done.stderr.splitlines() if line.startswith("prompt ")]
    closing = [line for line in lines if "TTFT" in line]
    assert len(closing) == 2 and "cached" in closing[1] and "cached" not in closing[0]
    assert ">>>" not in done.stdout + done.stderr


def in_process(store: Path, text: str, *arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(build_app(), ["chat", str(store), *map(str, arguments), *BUDGET], input=text)
    return done.exit_code, done.stdout, done.stderr


def test_reset_forgets(store: Path) -> None:
    code, out, _ = in_process(store, "Hello\n/reset\nHello\n", "-n", 10)
    first, second = out.splitlines()[0], out.splitlines()[-1]
    assert code == 0 and first == second


def test_a_long_conversation_gets_shorter_answers(store: Path) -> None:
    """--max-tokens is an upper bound: what the context still holds is given."""
    code, out, err = in_process(store, "Hello\n", "-n", 5000)
    assert code == 0 and "too long" not in err and out.strip()


def test_a_full_context_is_said_and_reset_frees_it(store: Path) -> None:
    long = "the quick brown fox " * 60
    code, out, err = in_process(store, f"{long}\n{long}\n/reset\nHello\n", "-n", 10)
    assert code == 0
    assert "context is too long" in err and "/reset" in err
    assert sum("TTFT" in line for line in err.splitlines()) == out.count("\n") >= 1


def test_an_answer_that_is_broken_off_costs_only_itself(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C pressed twice raises in the middle of a step: the conversation goes on without that turn."""
    real, presses = common.write_pieces, iter([True, False])

    def write(stream: Stream) -> None:
        if next(presses):
            next(stream)
            raise KeyboardInterrupt
        real(stream)

    _, expected, _ = in_process(store, "Hello\n", "-n", 10)
    monkeypatch.setattr(common, "write_pieces", write)
    code, out, err = in_process(store, "Something long\nHello\n", "-n", 10)
    assert code == 0 and "interrupted" in err and out == expected


def test_a_model_without_a_template_is_refused(plain_store: Path) -> None:
    code, out, err = in_process(plain_store, "Hello\n")
    assert code == 2 and out == "" and "no chat template" in err and "--raw" in err
