"""What `run` and `chat` share: their options, loading with the ledger shown, Ctrl-C that stops an answer.

Results go to stdout, everything about them to stderr. Imports nothing heavy before a command runs.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.generate.model import Model, Stream

INTERRUPTED = 130

_SAMPLING = "Sampling (default: the model's generation_config.json, else greedy)"
_LOADING = "Loading"

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A packed store (see `stoker pack`).")]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Budget of the whole process: 3GiB, 500MB, auto.", rich_help_panel=_LOADING)
]
PathOption = Annotated[
    str,
    typer.Option(
        "--path", metavar="PATH", rich_help_panel=_LOADING,
        help="How experts get into memory: auto, exact, staged, hot, whole_layer. Never changes the output.",
    ),
]  # fmt: skip
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which experts stay in memory: auto (as tuned, else lru), lru, lfu, ...",
        rich_help_panel=_LOADING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, help="Compute threads (default: physical cores).", rich_help_panel=_LOADING),
]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "--ctx-size", "-c", min=1, rich_help_panel=_LOADING,
        help="Tokens of context to hold (default: 4096, or the model's length where that is shorter).",
    ),
]  # fmt: skip
ActivationBits = Annotated[
    int,
    typer.Option(
        metavar="8|16", help="Rounding of the kernels' inputs: 16 is exact to 0.1%, 8 is faster at prefill.",
        rich_help_panel=_LOADING,
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Record routes, reads and waits.", rich_help_panel=_LOADING),
]
_ROUTING = "Routing (changes the output)"
Routing = Annotated[
    str | None,
    typer.Option(
        "--routing", metavar="MODE", rich_help_panel=_ROUTING,
        help="Who chooses experts: gate (the model's own; default), prerouter (with --adapter), roster, cache-aware.",
    ),
]  # fmt: skip
RosterSize = Annotated[
    str | None,
    typer.Option(
        "--roster-size", metavar="M", rich_help_panel=_ROUTING,
        help="roster: experts a layer keeps for a sequence; one number, or one a layer (default: a quarter).",
    ),
]  # fmt: skip
PinAfter = Annotated[
    str | None,
    typer.Option(
        "--pin-after", metavar="20%|N|prompt|never", rich_help_panel=_ROUTING,
        help="roster: the prefix after which a sequence may use its roster alone (default: 20%).",
    ),
]  # fmt: skip
Delta = Annotated[
    float | None,
    typer.Option(
        help="roster: half the lead that an outsider needs, in mean logit ranges (default: 0.15; inf: a wall).",
        rich_help_panel=_ROUTING,
    ),
]
ShiftOption = Annotated[
    bool | None,
    typer.Option(
        "--shift/--no-shift", rich_help_panel=_ROUTING,
        help="roster: whether a change of topic gives up a pinned roster (default: it does).",
    ),
]  # fmt: skip
CacheLambda = Annotated[
    float | None,
    typer.Option(
        "--lambda", rich_help_panel=_ROUTING,
        help="cache-aware: the lead of experts in memory, in mean logit ranges (default: 0.1).",
    ),
]  # fmt: skip
KeepBest = Annotated[
    int | None,
    typer.Option("--keep-best", help="cache-aware: a token's so many best are always used (default: 1).",
                 rich_help_panel=_ROUTING),
]  # fmt: skip
OwnSlots = Annotated[
    int | None,
    typer.Option(
        "--own-slots", metavar="N", rich_help_panel=_ROUTING,
        help="cache-aware: decide by an imagined cache of N slots a layer for each sequence, so that an answer "
        "depends on nothing else.",
    ),
]  # fmt: skip
Quality = Annotated[
    str | None,
    typer.Option(
        "--quality", metavar="BOUND", rich_help_panel=_ROUTING,
        help="exact, kl<=0.01 or ppl<=+1%: the fastest mode that `stoker eval modes` measured to keep it.",
    ),
]  # fmt: skip
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", metavar="DIR", rich_help_panel=_ROUTING,
        help="Prerouter heads, LoRA or both: stoker's format, PEFT's, Edge0's.",
    ),
]  # fmt: skip
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens to generate (default: the context's room).")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the output before this text; may be repeated.")
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k most likely.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep this much probability.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Drop below this share of the best.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1 discourages repeats.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING)]


@dataclass(frozen=True)
class Loading:
    """How a command loads its model."""

    model: str
    memory: str
    path: str
    policy: str
    threads: int | None
    ctx_size: int | None
    trace: Path | None
    activation_bits: int = 16
    routing: str | None = None
    adapter: str | None = None
    rule: dict[str, Any] = field(default_factory=dict)  # the mode's own options, by their names in Options
    quality: str | None = None


def rule_options(
    roster_size: str | None,
    pin_after: str | None,
    delta: float | None,
    shift: bool | None,
    cache_lambda: float | None,
    keep_best: int | None,
    own_slots: int | None,
) -> dict[str, Any]:
    """The options of a routing mode that were given."""
    asked = {
        "roster_size": roster_size, "pin_after": pin_after, "delta": delta, "shift": shift,
        "cache_lambda": cache_lambda, "keep_best": keep_best, "own_slots": own_slots,
    }  # fmt: skip
    return {name: value for name, value in asked.items() if value is not None}


def sampling_options(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
) -> dict[str, Any]:
    """What was asked for, checked as far as it can be before a model is there."""
    from stoker.generate.request import resolve_sampling

    asked = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    chosen = {name: value for name, value in asked.items() if value is not None}
    try:
        resolve_sampling(chosen)
    except OptionError as error:
        if error.where not in chosen:
            raise
        flag = f"--{error.where.replace('_', '-')}"
        raise OptionError(
            error.what, where=flag, expected=error.expected, got=error.got, remedy=error.remedy
        ) from error  # fmt: skip
    return chosen


def load_model(loading: Loading) -> "Model":
    """Load the model. transformers' own progress bars and notes stay silent: stdout and stderr are the command's."""
    quiet_transformers()
    from stoker.generate.model import load

    return load(
        loading.model,
        memory=loading.memory,
        path=loading.path,
        threads=loading.threads,
        ctx_size=loading.ctx_size,
        policy=loading.policy,
        trace=loading.trace,
        activation_bits=loading.activation_bits,
        routing=loading.routing,
        adapter=loading.adapter,
        **loading.rule,
        quality=loading.quality,
    )


def quiet_transformers() -> None:
    """Before it is imported: stdout and stderr are the command's."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def show_ledger(model: "Model", loading: Loading) -> None:
    """The account of the budget and the effective mode, on stderr."""
    for line in model.ledger_lines():
        note(line)
    note(effective_mode(model))


def effective_mode(model: "Model") -> str:
    """How the experts come into memory, in plain words."""
    share = float(model.ledger()["resident_share"])
    place = "all experts fit in memory" if share >= 1 else f"{share:.0%} of the experts in memory, the rest from disk"
    options = model.runtime.options
    from stoker.generate.report import described

    routing = model.runtime.mode.about()
    output = "output is exact" if routing["lossless"] else f"{described(routing)}: output is not the plain model's"
    return f"path {options.path}, policy {options.policy}: {place}; {output}"


def note(text: str) -> None:
    """A line for people, on stderr; dim on a terminal."""
    if sys.stderr.isatty():
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


def write_pieces(pieces: Sequence[str] | Iterator[str]) -> None:
    """Stream text to stdout as it comes."""
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()


def prefill_progress(done: int, total: int) -> None:
    """A long prompt's progress, on a terminal's stderr alone, overwritten in place."""
    if sys.stderr.isatty() and total >= 256:
        print(f"\r\x1b[Kreading the prompt: {done} of {total} tokens\r", end="", file=sys.stderr, flush=True)


@contextmanager
def interruptible(stream: "Stream") -> Iterator[None]:
    """Ctrl-C ends the answer at the next token; pressed again before that, it interrupts whatever runs."""

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream.cancel()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def read_stdin_prompt() -> str:
    """The prompt from a pipe; refused when there is a person at the keyboard who was not asked."""
    if sys.stdin.isatty():
        raise OptionError(
            "there is no prompt", where="PROMPT", remedy='give it as an argument ("Hello"), or pipe it in'
        )
    return sys.stdin.read()
