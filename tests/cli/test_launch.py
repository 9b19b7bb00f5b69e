"""`stoker launch` as a process of its own, with a server that answers and agents that print what they were given."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.launch import AGENTS

ROOT = Path(__file__).parents[2]
KEY = "sesame"
MODELS = [{"id": "small", "context_length": 32768, "aliases": ["s"]}, {"id": "big", "context_length": 4096}]


class Listing(HTTPServer):
    """Answers /v1/models to those who bring the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: list[dict[str, Any]] = MODELS[:1]
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {KEY}" and self.path == "/v1/models"
        body = json.dumps({"data": self.server.models}).encode()  # type: ignore[attr-defined]
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Listing]:
    listing = Listing()
    thread = threading.Thread(target=listing.serve_forever)
    thread.start()
    yield listing
    listing.shutdown()
    thread.join()
    listing.server_close()


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """Programs of the agents' names, which print their arguments and variables as JSON and end with code 7."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        script = folder / agent.program
        script.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            "print(json.dumps({'arguments': sys.argv[1:], 'variables': dict(os.environ)}))\nsys.exit(7)\n"
        )
        script.chmod(0o755)
    return folder


def launch(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
    }
    (tmp_path / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "stoker", "launch", *arguments],
        env=environment | variables, capture_output=True, text=True, cwd=tmp_path, timeout=180,
    )  # fmt: skip


def told(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    return said["arguments"], said["variables"]


def test_claude_gets_the_server_and_nothing_else_does(agents: Path, server: Listing, tmp_path: Path) -> None:
    done = launch(
        tmp_path, "claude", "--url", server.url + "/", "--api-key", KEY, "--", "-p", "hi", "--model", "x",
        ANTHROPIC_API_KEY="of another service", KEPT="kept",
    )  # fmt: skip
    arguments, variables = told(done)
    assert arguments == ["-p", "hi", "--model", "x"]
    assert variables["ANTHROPIC_BASE_URL"] == server.url and variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    assert {variables[name] for name in names} == {"small"}
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768"
    assert variables["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] == "1"
    assert "ANTHROPIC_API_KEY" not in variables and variables["KEPT"] == "kept"
    assert not list((tmp_path / "home").rglob("*")), "something was written into the home directory"


def test_codex_gets_flags_and_no_file(agents: Path, server: Listing, tmp_path: Path) -> None:
    arguments, variables = told(launch(tmp_path, "codex", "--url", server.url, "--", "exec", STOKER_API_KEY=KEY))
    settings = dict(part.split("=", 1) for flag, part in pairwise(arguments) if flag == "-c")
    assert settings["model_provider"] == '"stoker"' and settings["model_providers.stoker.wire_api"] == '"responses"'
    assert settings["model_providers.stoker.base_url"] == f'"{server.url}/v1"'
    assert settings["model_context_window"] == "32768"
    assert variables[json.loads(settings["model_providers.stoker.env_key"])] == KEY
    assert arguments[arguments.index("-m") + 1] == "small" and arguments[-1] == "exec"
    assert not list((tmp_path / "home").rglob("*"))


def test_opencode_gets_its_configuration_as_a_variable(agents: Path, server: Listing, tmp_path: Path) -> None:
    _, variables = told(launch(tmp_path, "opencode", "--url", server.url, "--api-key", KEY, "--model", "s"))
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["stoker"]
    assert config["model"] == "stoker/small" and provider["options"]["baseURL"] == f"{server.url}/v1"
    assert provider["options"]["apiKey"] == "{env:STOKER_API_KEY}" and variables["STOKER_API_KEY"] == KEY
    assert provider["models"]["small"]["limit"]["context"] == 32768


@pytest.mark.parametrize(
    ("agent", "url_name", "suffix", "model_name", "model"),
    [
        ("aider", "OPENAI_API_BASE", "/v1", "AIDER_MODEL", "openai/small"),
        ("goose", "OPENAI_HOST", "", "GOOSE_MODEL", "small"),
        ("qwen", "OPENAI_BASE_URL", "/v1", "OPENAI_MODEL", "small"),
    ],
)
def test_the_others(
    agents: Path, server: Listing, tmp_path: Path, agent: str, url_name: str, suffix: str, model_name: str, model: str
) -> None:
    _, variables = told(launch(tmp_path, agent, "--url", server.url, "--api-key", KEY))
    assert variables[url_name] == server.url + suffix and variables[model_name] == model
    assert variables["OPENAI_API_KEY"] == KEY


def test_dry_run_prints_what_a_shell_can_run(agents: Path, server: Listing, tmp_path: Path) -> None:
    bare = f"{server.url.removeprefix('http://')}/v1"
    done = launch(tmp_path, "claude", "--url", bare, "--dry-run", "--", "-p", "two words", STOKER_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout.replace("$STOKER_API_KEY", "")
    shell = subprocess.run(
        ["/bin/sh", "-c", done.stdout],
        env={"PATH": f"{agents}:{os.environ['PATH']}", "STOKER_API_KEY": KEY, "ANTHROPIC_API_KEY": "gone"},
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    arguments, variables = told(shell)
    assert arguments == ["-p", "two words"]
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY and variables["ANTHROPIC_BASE_URL"] == server.url
    assert "ANTHROPIC_API_KEY" not in variables


def test_refusals(agents: Path, server: Listing, tmp_path: Path) -> None:
    unknown = launch(tmp_path, "clade", "--url", server.url)
    assert unknown.returncode == 2 and all(name in unknown.stderr for name in AGENTS) and "claude?" in unknown.stderr
    wrong_key = launch(tmp_path, "claude", "--url", server.url)
    assert wrong_key.returncode == 1 and "401" in wrong_key.stderr and "--api-key" in wrong_key.stderr
    silent = launch(tmp_path, "claude", "--url", "http://127.0.0.1:9")
    assert silent.returncode == 1 and "stoker serve" in silent.stderr
    assert "Connection refused" in silent.stderr and "urlopen" not in silent.stderr
    foreign = launch(tmp_path, "claude", "--url", server.url, "--model", "gpt-9", STOKER_API_KEY=KEY)
    assert foreign.returncode == 2 and "small" in foreign.stderr
    server.models = MODELS
    several = launch(tmp_path, "claude", "--url", server.url, STOKER_API_KEY=KEY)
    assert several.returncode == 2 and "small, big" in several.stderr
    short = launch(tmp_path, "claude", "--url", server.url, "--model", "big", "--dry-run", STOKER_API_KEY=KEY)
    assert short.returncode == 0 and "4096 tokens of context" in short.stderr
    for program in agents.iterdir():
        program.unlink()
    missing = launch(tmp_path, "claude", "--url", server.url, "--model", "small", STOKER_API_KEY=KEY)
    assert missing.returncode == 2 and "not installed" in missing.stderr and "npm install" in missing.stderr
