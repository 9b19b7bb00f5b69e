"""`stoker run MODEL "prompt"`: one prompt, one streamed answer, one closing line.

The answer goes to stdout, the ledger and the closing line to stderr; with --json one object goes to stdout instead.
"""

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import common
from stoker.cli.common import INTERRUPTED, Loading, note
from stoker.cli.live import Live, check_terminal
from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.generate.model import Model, Prompt, Result


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    model: common.ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or nothing reads it from a pipe.")] = None,
    memory: common.Memory = "auto",
    path: common.PathOption = "auto",
    policy: common.Policy = "auto",
    threads: common.Threads = None,
    ctx_size: common.CtxSize = None,
    trace: common.Trace = None,
    activation_bits: common.ActivationBits = 16,
    routing: common.Routing = None,
    adapter: common.Adapter = None,
    roster_size: common.RosterSize = None,
    pin_after: common.PinAfter = None,
    delta: common.Delta = None,
    shift: common.ShiftOption = None,
    cache_lambda: common.CacheLambda = None,
    keep_best: common.KeepBest = None,
    own_slots: common.OwnSlots = None,
    quality: common.Quality = None,
    max_tokens: common.MaxTokens = None,
    stop: common.Stop = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Put the prompt into the chat template (default: if the model has one)."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message, with a chat template.")] = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    repetition_penalty: common.RepetitionPenalty = None,
    seed: common.Seed = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show speed, stall, hits, reads and memory in the terminal's last lines.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, usage, timings, ledger, stats.")
    ] = False,
) -> None:
    """Answer one prompt, streaming."""
    if system is not None and chat is False:
        raise OptionError("--system needs the chat template", where="--system", remedy="leave out --raw or --system")
    options = common.sampling_options(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    options |= {"max_tokens": max_tokens, "stop": stop or ()}
    if live:
        check_terminal(sys.stderr)
    text = common.read_stdin_prompt() if prompt in (None, "-") else prompt
    rule = common.rule_options(roster_size, pin_after, delta, shift, cache_lambda, keep_best, own_slots)
    loading = Loading(
        model, memory, path, policy, threads, ctx_size, trace, activation_bits, routing, adapter, rule, quality
    )
    with common.load_model(loading) as loaded:
        if as_json:
            result = _silent(loaded, _prompt(loaded, text, chat, system), options, live)
            print(json.dumps(_report(loaded, loading, result), ensure_ascii=False))
        else:
            result = _streamed(loaded, loading, _prompt(loaded, text, chat, system), options, live)
        loaded.check_quality()
    if result.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _prompt(model: "Model", text: str, chat: bool | None, system: str | None) -> "Prompt":
    """The text itself, or messages when the chat template is to be used (its absence is then an error of its own)."""
    if chat or (chat is None and (model.has_chat_template or system is not None)):
        messages = [{"role": "user", "content": text}]
        return [{"role": "system", "content": system}, *messages] if system is not None else messages
    return text


def _streamed(model: "Model", loading: Loading, prompt: "Prompt", options: dict[str, Any], live: bool) -> "Result":
    watch = Live(model, sys.stderr) if live else None
    on_prefill = watch.on_prefill if watch is not None else common.prefill_progress
    with model.stream(prompt, on_prefill=on_prefill, **options) as stream:
        common.show_ledger(model, loading)
        with common.interruptible(stream), watch or nullcontext():
            common.write_pieces(watch.watched(stream) if watch is not None else stream)
    print(flush=True)
    note(stream.result.closing_line())
    return stream.result


def _silent(model: "Model", prompt: "Prompt", options: dict[str, Any], live: bool) -> "Result":
    watch = Live(model, sys.stderr) if live else None
    on_prefill = watch.on_prefill if watch is not None else None
    with (
        model.stream(prompt, on_prefill=on_prefill, **options) as stream,
        common.interruptible(stream),
        watch or nullcontext(),
    ):
        for _ in watch.watched(stream) if watch is not None else stream:
            pass
    return stream.result


def _report(model: "Model", loading: Loading, result: "Result") -> dict[str, Any]:
    plain = result.as_dict()
    request_stats = plain.pop("stats")
    loaded = {
        "memory": loading.memory,
        "path": model.runtime.options.path,
        "policy": model.runtime.options.policy,
        "ctx_size": model.runtime.ctx_size,
        "routing": model.runtime.mode.routing,
        "adapter": loading.adapter,
    }
    return {
        "model": loading.model, "options": loaded, **plain, "ledger": model.ledger(),
        "stats": {**request_stats, "total": model.stats()},
    }  # fmt: skip
