"""`stoker run --live`: the text stays what it is on a terminal and in a pipe, and the lines show the run's figures."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.text import Text

from stoker.cli.live import render
from stoker.generate.rates import Window
from tests.cli.conftest import ENVIRONMENT, stoker, stoker_command

PROMPT = "What is the capital of France?"
ROWS, COLUMNS = 30, 110
LEDGER = {
    "budget_bytes": 4 << 30, "process_bytes": 400 << 20, "dense_bytes": 1 << 30, "kv_bytes": 400 << 20,
    "slots_bytes": 2 << 30, "ring_bytes": 80 << 20, "scratch_bytes": 30 << 20, "reserve_bytes": 96 << 20,
}  # fmt: skip


def stats(**changed: int) -> dict[str, int]:
    names = ("decode_tokens", "decode_ns", "prefill_tokens", "hits", "misses", "demand_bytes", "prefetch_bytes")
    return {**dict.fromkeys((*names, "prefill_ns", "stall_ns"), 0), **changed}


def test_rates_are_of_the_last_seconds() -> None:
    window = Window(seconds=4)
    window.add(0.0, stats())
    window.add(1.0, stats(decode_tokens=100, decode_ns=10**9, hits=1000))
    for second in range(2, 9):
        tokens = 100 + 2 * (second - 1)
        window.add(
            float(second),
            stats(decode_tokens=tokens, decode_ns=10**9 + (second - 1) * 8 * 10**8, hits=1000 + 3 * second,
                  misses=second, demand_bytes=second * 50_000_000, stall_ns=second * 25 * 10**7),
        )  # fmt: skip
    rates = window.rates()
    assert rates.tok_s == pytest.approx(2.5), "two tokens of 0.4 s each a second; the fast start has gone by"
    assert (rates.stall, rates.hit_rate) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (rates.read_bytes_s, rates.bytes_per_token) == (pytest.approx(5e7), pytest.approx(2.5e7))
    empty = Window()
    empty.add(0.0, stats())
    assert empty.rates().tok_s is None and empty.rates().hit_rate is None


@pytest.mark.parametrize("columns", [12, 30, 40, 80, 200])
def test_lines_fit_and_name_the_parts(columns: int) -> None:
    window = Window()
    window.add(0.0, stats())
    window.add(2.0, stats(decode_tokens=4, decode_ns=2 * 10**9, hits=3, misses=1, demand_bytes=10**8, stall_ns=10**9))
    speed, memory = (Text.from_ansi(line).plain for line in render(window.rates(), LEDGER, 3 << 30, columns))
    assert len(speed) <= columns and len(memory) <= columns
    assert speed.startswith("2.00 tok/s") and ("stall 50%" in speed or columns < 22)
    whole = "2.00 tok/s  stall 50%  hits 75.0%  read 50 MB/s, 25.0 MB/token  "
    assert speed in {whole[:end] for end in (10, 21, 33, 47)} or speed.startswith(whole), "whole fields alone"
    assert memory.endswith((" GiB resident", " GiB")) or columns < 20
    if columns >= 80:
        assert "hits 75.0%" in speed and "50 MB/s" in speed
        assert "slots" in memory and "dense" in memory and memory.endswith("3.00 of 4.00 GiB resident")
    assert render(window.rates(), LEDGER, 0, columns, (5, 9))[0].find("prompt 5/9") >= 0


@contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal of ROWS x COLUMNS: the end for the program, and what was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                seen.append(data)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    yield theirs, seen
    reader.join(timeout=180)
    os.close(ours)


def command(store: Path) -> list[str]:
    return stoker_command("run", store, PROMPT, "--raw", "-n", 60, "--memory", "2GiB", "--live")


def test_a_pipe_gets_the_text_alone(store: Path) -> None:
    plain = stoker("run", store, PROMPT, "--raw", "-n", 60, "--memory", "2GiB")
    with terminal() as (end, seen):
        done = subprocess.run(command(store), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=end,
                              env={**ENVIRONMENT, "TERM": "xterm-256color"}, timeout=300)  # fmt: skip
        os.close(end)
    assert done.stdout.decode() == plain.stdout and done.returncode == 0
    drawn = b"".join(seen).decode()
    for words in ("tok/s", "stall", "hits", "MB/s", "slots", "of 2.00 GiB resident"):
        assert words in drawn
    assert "\x1b[r" in drawn, "the terminal gets its lines back"


def test_on_one_terminal_the_text_is_untouched(store: Path) -> None:
    """Without what is drawn between saving and restoring the cursor, the terminal saw ledger, text and closing line."""
    plain = stoker("run", store, PROMPT, "--raw", "-n", 60, "--memory", "2GiB")
    with terminal() as (end, seen):
        done = subprocess.run(command(store), stdin=subprocess.DEVNULL, stdout=end, stderr=end,
                              env={**ENVIRONMENT, "TERM": "xterm-256color"}, timeout=300)  # fmt: skip
        os.close(end)
    assert done.returncode == 0
    text = b"".join(seen).decode().replace("\r\n", "\n")
    drawings = re.findall(r"\x1b7.*?\x1b8", text, re.DOTALL)
    assert len(drawings) >= 3 and all(f"\x1b[{ROWS - 1};1H" in d for d in drawings if "tok/s" in d)
    rest = re.sub(r"\x1b7.*?\x1b8", "", text, flags=re.DOTALL)
    rest = re.sub(r"\x1b\[[0-9;]*[mA]", "", rest)
    assert plain.stdout in rest
    assert rest.rstrip().endswith("length") and "interpreter and libraries" in rest


def test_without_a_terminal_it_is_refused(store: Path) -> None:
    done = stoker("run", store, PROMPT, "--live", "--memory", "2GiB")
    assert done.returncode == 2 and "--live" in done.stderr and done.stdout == ""
