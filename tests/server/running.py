"""A real server process for tests: started as a user would, on a free port, stopped by a signal."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0  # what a busy machine may take for a thing that takes a moment; nothing that goes well waits so long
# Every request on a connection of its own, and answered in PATIENCE_S: httpx's functions give up after five seconds.
http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
_URL = re.compile(r"OpenAI\s+(http://\S+)/v1")


class Server:
    """`stoker serve ARGUMENTS --port 0`. `url` has no slash at its end; `log` is everything on stderr so far."""

    def __init__(self, *arguments: object, start_s: float = 300, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
        command = [sys.executable, "-m", "stoker", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command, env={**kept, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **environment}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for(_URL, start_s)
        self.wait_for_line("Ctrl-C ends it", start_s)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def wait_for_line(self, text: str, timeout_s: float = PATIENCE_S, *, times: int = 1) -> None:
        """Until the log holds `text` so many times."""
        deadline = time.monotonic() + timeout_s
        while self.log.count(text) < times:
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {text!r} in the log:\n{self.log}"
            time.sleep(0.02)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, when it has ended by itself."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        """End it and hold it to a clean end."""
        if self.process.poll() is None:
            self.signal()
        try:
            code = self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert code == 0, self.log
        assert "Traceback" not in self.log, self.log

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.process.kill()
        else:
            self.stop()

    def _read(self) -> None:
        stream: Any = self.process.stderr
        for line in stream:
            self._lines.append(line)

    def _wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (match := pattern.search(self.log)) is None:
            if self.process.poll() is not None:
                self._reader.join(5)
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return match[1]
