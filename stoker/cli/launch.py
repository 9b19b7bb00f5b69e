"""`stoker launch AGENT`: starts a coding agent that talks to a running server, by variables of that one process.

Nothing is written: no profile, no file in anybody's home. What an agent needs beyond variables goes in as flags of its
own command line. Knows agents' customs and asks the server for its models; loads nothing.
"""

import json
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer

from stoker.errors import OptionError, StokerError

DEFAULT_URL = "http://127.0.0.1:8080"
# Agents begin with ten thousand tokens of instructions and tools.
LEAST_CTX_TOKENS = 16_384
NO_KEY = "stoker"  # agents insist on a key; a server without one takes any


@dataclass(frozen=True)
class Target:
    """The server and what it serves: url without a slash at its end, the model's name and its context."""

    url: str
    key: str
    model: str
    ctx_tokens: int | None


@dataclass(frozen=True)
class Launch:
    """What is set for the child: variables, variables taken away, and arguments before the user's own."""

    variables: dict[str, str]
    without: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agent:
    """An agent that can be started. program: its executable; install: how one gets it."""

    program: str
    install: str
    launch: Callable[[Target], Launch] = field(repr=False)


def _claude(target: Target) -> Launch:
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    kinds = tuple(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU"))
    window = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.ctx_tokens)} if target.ctx_tokens else {}
    return Launch(
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            **dict.fromkeys((*models, *kinds), target.model),
            # Fields of betas are not part of the API; a line that differs each time would spoil the prefix cache.
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3600000",
            **window,
        },
        without=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
    )


def _codex(target: Target) -> Launch:
    settings = {
        "model_provider": "stoker",
        "model_providers.stoker.name": "stoker",
        "model_providers.stoker.base_url": f"{target.url}/v1",
        "model_providers.stoker.env_key": "STOKER_API_KEY",
        "model_providers.stoker.wire_api": "responses",
        "web_search": "disabled",
    }
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    arguments += ["-c", "model_providers.stoker.stream_idle_timeout_ms=3600000", "-m", target.model]
    if target.ctx_tokens:
        arguments += ["-c", f"model_context_window={target.ctx_tokens}"]
    return Launch({"STOKER_API_KEY": target.key}, arguments=tuple(arguments))


def _opencode(target: Target) -> Launch:
    limit = {"limit": {"context": target.ctx_tokens, "output": target.ctx_tokens // 4}} if target.ctx_tokens else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "stoker",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": "{env:STOKER_API_KEY}"},
        "models": {target.model: {"name": target.model, "tool_call": True, **limit}},
    }
    name = f"stoker/{target.model}"
    config = {"provider": {"stoker": provider}, "model": name, "small_model": name, "autoupdate": False}
    return Launch({"STOKER_API_KEY": target.key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(target: Target) -> Launch:
    return Launch(
        {
            "OPENAI_API_BASE": f"{target.url}/v1",
            "OPENAI_API_KEY": target.key,
            "AIDER_MODEL": f"openai/{target.model}",
            "AIDER_WEAK_MODEL": f"openai/{target.model}",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
        }
    )


def _goose(target: Target) -> Launch:
    return Launch(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": target.model,
            "OPENAI_HOST": target.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": target.key,
        }
    )


def _qwen(target: Target) -> Launch:
    return Launch(_openai(target) | {"OPENAI_MODEL": target.model})


def _openai(target: Target) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": target.key}


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Agent("aider", "python -m pip install aider-install && aider-install", _aider),
    "goose": Agent("goose", "see https://goose-docs.ai", _goose),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("launch")(launch)


def launch(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=", ".join(AGENTS) + ".")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", help="For the agent itself.")] = None,
    url: Annotated[str, typer.Option("--url", envvar="STOKER_URL", help="The server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option("--model", help="Which of its models (default: its only one).")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="STOKER_API_KEY", help="The server's key, where it has one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
) -> None:
    """Start a coding agent on a running server. Variables are set for the agent alone; no file is written."""
    chosen = AGENTS.get(agent)
    if chosen is None:
        near = get_close_matches(agent, AGENTS, n=1)
        raise OptionError(
            "unknown agent", where="launch", expected=", ".join(AGENTS), got=agent,
            remedy=f"did you mean {near[0]}?" if near else None,
        )  # fmt: skip
    target = find_target(server_url(url), api_key, model)
    planned = chosen.launch(target)
    command = [chosen.program, *planned.arguments, *(arguments or ())]
    if target.ctx_tokens is not None and target.ctx_tokens < LEAST_CTX_TOKENS:
        print(
            f"stoker: {target.model} has {target.ctx_tokens} tokens of context; agents need {LEAST_CTX_TOKENS} or more "
            "(stoker serve --ctx-size)",
            file=sys.stderr,
        )
    if dry_run:
        print(shown(planned, command, secret=api_key))
        return
    _run(chosen, planned, command)


def server_url(text: str) -> str:
    """A server's address as it may be typed: with or without http://, a slash at its end, or /v1."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")


def find_target(url: str, key: str | None, model: str | None) -> Target:
    """The server at `url`, asked for its models. Raises StokerError where none answers, OptionError where the model is
    not one of its own or not the only one."""
    listed = _models(url, key)
    names = [str(each["id"]) for each in listed]
    if model is None and len(listed) > 1:
        raise OptionError("this server has several models", where="--model", expected=", ".join(names))
    found = [each for each in listed if model in (None, each["id"], *each.get("aliases", ()))]
    if not found:
        raise OptionError("there is no such model", where="--model", expected=", ".join(names), got=model)
    length = found[0].get("context_length")
    return Target(url, key or NO_KEY, str(found[0]["id"]), length if isinstance(length, int) else None)


def _models(url: str, key: str | None) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key or NO_KEY}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a local server is behind no proxy
    try:
        with opener.open(request, timeout=10) as answer:
            listed = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        remedy = "give its key with --api-key or STOKER_API_KEY" if error.code == 401 else None
        raise StokerError("the server refuses", where=url, got=f"HTTP {error.code}", remedy=remedy) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "start one with `stoker serve MODEL`, or name another with --url"
        raise StokerError("no server answers", where=url, got=_reason(error), remedy=remedy) from error
    if not isinstance(listed, list) or not listed:
        raise StokerError("the server has no models", where=url)
    return listed


def _reason(error: Exception) -> str:
    """What went wrong, in plain words."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) if isinstance(reason, str | OSError) else "an answer that is no list of models"


def shown(planned: Launch, command: list[str], *, secret: str | None) -> str:
    """The command as a shell would take it; a real key is left out."""
    pairs = [
        f"{name}={shlex.quote(value)}" for name, value in planned.variables.items() if not secret or value != secret
    ]
    pairs += [f'{name}="$STOKER_API_KEY"' for name, value in planned.variables.items() if secret and value == secret]
    removed = [part for name in planned.without for part in ("-u", name)]
    return " \\\n  ".join([" ".join(["env", *removed]), *pairs, shlex.join(command)])


def _run(agent: Agent, planned: Launch, command: list[str]) -> NoReturn:
    """Become the agent: its terminal, signals and exit code are its own."""
    program = shutil.which(agent.program)
    if program is None:
        raise OptionError(f"{agent.program} is not installed", where="launch", remedy=agent.install)
    environment = {name: value for name, value in os.environ.items() if name not in planned.without}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, command, environment | planned.variables)
