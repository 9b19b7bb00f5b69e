"""`stoker chat MODEL`: a conversation. History is kept and its KV reused; Ctrl-C stops the answer, not the program.

Works at a terminal (line editing, earlier prompts on the arrow keys) and with prompts from a pipe, one a line.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import common
from stoker.cli.common import Loading, note
from stoker.errors import OptionError, StokerError

if TYPE_CHECKING:
    from stoker.generate.model import Model, Result, Session

_PROMPT = ">>> "
_HELP = """/reset           forget the conversation (the system message stays)
/system [TEXT]   show or set the system message
/stats           what the last answer and the whole run cost
/help            this list
/quit            leave (so does Ctrl-D); Ctrl-C stops an answer"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat")(chat)


def chat(
    model: common.ModelArgument,
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
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    repetition_penalty: common.RepetitionPenalty = None,
    seed: common.Seed = None,
) -> None:
    """Converse, streaming; /help lists what can be said to the program instead of the model."""
    options = common.sampling_options(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    options |= {"max_tokens": max_tokens, "stop": stop or ()}
    rule = common.rule_options(roster_size, pin_after, delta, shift, cache_lambda, keep_best, own_slots)
    loading = Loading(
        model, memory, path, policy, threads, ctx_size, trace, activation_bits, routing, adapter, rule, quality
    )
    with common.load_model(loading) as loaded:
        if not loaded.has_chat_template:
            raise OptionError(
                "this model has no chat template", where=model, remedy="continue plain text with `stoker run --raw`"
            )
        common.show_ledger(loaded, loading)
        with loaded.session() as session:
            Conversation(loaded, session, options, system).converse()
        loaded.check_quality()


class Conversation:
    """The messages so far, and the loop that grows them."""

    def __init__(self, model: "Model", session: "Session", options: dict[str, Any], system: str | None) -> None:
        self._model, self._session, self._options, self._system = model, session, options, system
        self._turns: list[dict[str, str]] = []
        self._last: Result | None = None

    def converse(self) -> None:
        """Until /quit or the end of input."""
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            _edit_lines()
            note("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves")
        while True:
            try:
                line = _read_line(at_terminal)
            except KeyboardInterrupt:
                print(flush=True)
                note("Ctrl-D or /quit leaves")
                continue
            if line is None or line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        try:
            result = self._stream()
        except KeyboardInterrupt:  # pressed twice: the step itself was broken off, and its KV dropped with it
            self._turns.pop()
            note("interrupted")
            return
        except StokerError as error:
            self._turns.pop()
            note(f"stoker: {error.render()}")
            if isinstance(error, OptionError):
                note("/reset frees the context")
            return
        self._last = result
        if result.text:
            self._turns.append({"role": "assistant", "content": result.text})
        else:
            self._turns.pop()
        note(result.closing_line())

    def _stream(self) -> "Result":
        options = self._options | {"max_tokens": self._room()}
        stream = self._model.stream(
            self._messages(), session=self._session, on_prefill=common.prefill_progress, **options
        )
        with stream, common.interruptible(stream):
            common.write_pieces(stream)
        print(flush=True)
        return stream.result

    def _room(self) -> int | None:
        """--max-tokens, or less where a long conversation leaves less: an upper bound must not refuse the answer."""
        wanted: int | None = self._options["max_tokens"]
        left = self._model.runtime.ctx_size - len(self._model.encode(self._messages())) + 1
        return wanted if wanted is None or left < 1 else min(wanted, left)

    def _messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._turns

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
            self._session.close()
            note("the conversation is forgotten")
        elif name == "/system":
            self._system = rest.strip() or self._system
            note(f"system message: {self._system or 'none'}")
        elif name == "/stats":
            self._show_stats()
        elif name == "/help":
            note(_HELP)
        else:
            note(f"unknown command {name}\n{_HELP}")

    def _show_stats(self) -> None:
        note(self._last.closing_line() if self._last else "no answer yet")
        note(f"{self._session.cached_tokens} tokens of context held; since loading:")
        for name, value in self._model.stats().items():
            note(f"  {name:<24} {value}")


def _read_line(at_terminal: bool) -> str | None:
    """The next line without its end, or None at the end of input. Prompts are shown at a terminal alone."""
    try:
        return (input(_PROMPT) if at_terminal else input()).strip()
    except EOFError:
        if at_terminal:
            print(flush=True)
        return None


def _edit_lines() -> None:
    """Line editing and this conversation's earlier prompts on the arrow keys, where Python was built with it."""
    try:
        import readline

        readline.set_auto_history(True)
    except ImportError:
        note("no line editing: this Python has no readline")
