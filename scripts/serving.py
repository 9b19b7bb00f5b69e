"""A server process for the scripts that put it under load: started as a user would, its log in a file. Knows no API."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_URL = re.compile(r"OpenAI\s+(http://\S+)/v1")


class Served:
    """`stoker serve ARGUMENTS --port 0`. `url` has no slash at its end."""

    def __init__(self, *arguments: object, patience: int = 6000) -> None:
        """patience: how many times the log is looked at, a tenth of a second apart: a machine that stops everything
        for a while stops the looking too."""
        handle, name = tempfile.mkstemp(prefix="stoker-serve-", suffix=".log")
        self._log = Path(name)
        command = [sys.executable, "-m", "stoker", "serve", *map(str, arguments), "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=handle, stderr=handle)
        os.close(handle)
        for _ in range(patience):
            match = _URL.search(self.log)
            if match is not None and "Ctrl-C ends it" in self.log:
                self.url = match[1]
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.process.kill()
        raise SystemExit(f"the server did not start:\n{self.log}")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def kill(self) -> None:
        """As a crash or the kernel would: without a chance to write anything."""
        self.process.kill()
        self.process.wait()
