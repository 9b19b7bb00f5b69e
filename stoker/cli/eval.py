"""`stoker eval STORE`: what its bits, a routing mode or an adapter cost in quality. Owns options and printing."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from stoker.cli import common
from stoker.cli.common import Loading, note
from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.evaluate.models import Scorer
    from stoker.evaluate.run import Text

BUNDLED = ("bundled", "bundled:calibrate", "bundled:held-out")
_MEASURE = "store"

TextOption = Annotated[
    str,
    typer.Option(
        metavar="FILE|bundled", help="A text file, a .jsonl of {text, domain}, or bundled[:calibrate|:held-out]."
    ),
]
Windows = Annotated[int | None, typer.Option(min=1, help="At most so many windows of each domain (default: all).")]
WindowTokens = Annotated[int, typer.Option(min=16, help="Tokens of a window; each begins without what was before.")]
PromptTokens = Annotated[
    int, typer.Option(min=1, help="With a routing mode: so many first tokens are prompt, and are not scored.")
]


class _EvalGroup(TyperGroup):
    """`stoker eval STORE ...` is `stoker eval store STORE ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = [_MEASURE, *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        cls=_EvalGroup,
        no_args_is_help=True,
        help="Measure quality: `stoker eval STORE` (see `stoker eval store --help`).",
    )
    group.command(_MEASURE)(evaluate)
    group.command("tasks")(tasks)
    group.command("modes")(modes)
    app.add_typer(group, name="eval")


def evaluate(
    model: common.ModelArgument,
    text: TextOption = "bundled",
    reference: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare with this checkpoint (full precision, by transformers) or store."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with an earlier --json result on the same text.")
    ] = None,
    windows: Windows = None,
    window_tokens: WindowTokens = 512,
    prompt_tokens: PromptTokens = 64,
    memory: common.Memory = "auto",
    threads: common.Threads = None,
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
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures; `-` prints them.")
    ] = None,
) -> None:
    """Perplexity by domain; against a reference also KL, agreement, and which experts differ."""
    from stoker.evaluate.results import compare, read_result, table
    from stoker.evaluate.run import Text, evaluate

    earlier = None if against is None else read_result(against)
    asked = Text(text, passages(text), windows, window_tokens, prompt_tokens)
    rule = common.rule_options(roster_size, pin_after, delta, shift, cache_lambda, keep_best, own_slots)
    context = max(window_tokens, 512)
    loading = Loading(model, memory, "auto", "auto", threads, context, None, activation_bits, routing, adapter, rule)
    if adapter is not None and reference is None:
        reference = Path(model)  # what an adapter adds to the weights is part of the loaded model
    with common.load_model(loading) as loaded:
        other = None if reference is None else _reference(reference, loaded.runtime, asked, memory)
        result = evaluate(loaded.runtime, asked, reference=other, progress=_progress)
    if earlier is not None:
        result["against_earlier"] = compare(result, earlier)
    _write(result, as_json)
    if as_json is None or str(as_json) != "-":
        print(_headline(result))
        print("\n".join(table(result)))


def passages(text: str) -> Any:
    """The passages that --text names."""
    from stoker.evaluate.text import bundled, read

    if text not in BUNDLED:
        return read(Path(text))
    use: Any = text.partition(":")[2] or None
    return bundled(use)


def _reference(path: Path, runtime: Any, text: "Text", memory: str) -> "Scorer":
    """A store in exact mode, or a checkpoint run by transformers."""
    from stoker.evaluate.models import CheckpointScorer, StoreScorer
    from stoker.runtime.model import Options, load

    if not path.is_dir():
        raise OptionError("no such directory", where=f"--reference {path}", expected="a checkpoint or a store")
    scorer: StoreScorer | CheckpointScorer
    if (path / "stoker.json").exists():
        options = Options(memory=memory, threads=runtime.options.threads, ctx_size=max(text.window_tokens, 512))
        scorer = StoreScorer(load(path, options))
        entries = scorer.runtime.vocab_size
    else:
        scorer = CheckpointScorer(path)
        entries = scorer.model.config.get_text_config().vocab_size
    if entries != runtime.vocab_size:
        raise OptionError(
            "the reference has another vocabulary",
            where=f"--reference {path}",
            expected=f"{runtime.vocab_size} entries",
            got=entries,
        )
    return scorer


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[Kwindow {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _headline(result: dict[str, Any]) -> str:
    from stoker.generate.report import described

    model, reference = result["model"], result["reference"]
    mode = described(model["routing"]) if not model["routing"]["lossless"] else "exact"
    line = f"{model['model']} ({mode}) on {result['text']['name']}: {result['tokens']} tokens"
    if result["fed"] != "prompt":
        line += (
            f", the first {result['prompt_tokens']} of each window as prompt, the others as answer ({result['fed']})"
        )
    return line + ("" if reference is None else f"; reference {reference['model']} ({reference['kind']})")


def _write(result: dict[str, Any], file: Path | None) -> None:
    from stoker.bench.provenance import provenance, write_result

    if file is None:
        return
    if str(file) == "-":
        print(json.dumps({"provenance": provenance()} | result))
    else:
        write_result(file, result)
        note(f"wrote {file}")


def tasks(
    model: common.ModelArgument,
    names: Annotated[list[str], typer.Argument(metavar="TASK...", help="Tasks of lm-evaluation-harness, by name.")],
    include: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A directory of further task files (yaml), such as recipes/tasks."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions of each task.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question (default: the task's).")
    ] = None,
    memory: common.Memory = "auto",
    threads: common.Threads = None,
    ctx_size: common.CtxSize = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures; `-` prints them.")
    ] = None,
) -> None:
    """Run tasks of lm-evaluation-harness (the eval extra)."""
    from stoker.evaluate.harness import run_tasks

    loading = Loading(model, memory, "auto", "auto", threads, ctx_size, None)
    with common.load_model(loading) as loaded:
        found = run_tasks(loaded, names, include=include, limit=limit, shots=shots)
    figures = {"model": model, "results": found["results"], "versions": found.get("versions", {})}
    _write(figures, as_json)
    if as_json is None or str(as_json) != "-":
        for name, one in found["results"].items():
            told = [f"{key.split(',')[0]} {value:.4f}" for key, value in one.items() if isinstance(value, float)]
            print(f"{name}: {', '.join(told)}")


def modes(
    model: common.ModelArgument,
    adapter: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Measure the mode of this adapter too; may be repeated.")
    ] = None,
    text: TextOption = "bundled:calibrate",
    windows: Windows = None,
    window_tokens: WindowTokens = 512,
    prompt_tokens: PromptTokens = 64,
    memory: common.Memory = "auto",
    threads: common.Threads = None,
    activation_bits: common.ActivationBits = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what each routing mode costs and how fast it is, so that --quality can choose (docs/quality.md)."""
    from dataclasses import asdict

    from stoker.bench.provenance import provenance
    from stoker.evaluate.modes import candidates, measure_modes
    from stoker.evaluate.run import Text
    from stoker.generate.quality import Records, remember
    from stoker.runtime.budget import resolve
    from stoker.runtime.model import Options
    from stoker.store.reader import open_store

    store = open_store(Path(model))
    budget_bytes = resolve(memory)
    asked = Text(text, passages(text), windows, window_tokens, prompt_tokens)
    options = Options(
        memory=budget_bytes, threads=threads, ctx_size=max(window_tokens, 512), activation_bits=activation_bits
    )
    say = (lambda line: None) if as_json else print
    found = measure_modes(Path(model), candidates(store, adapter or []), asked, options, say)
    about = {"text": text, "windows": windows, "prompt_tokens": prompt_tokens, "provenance": provenance()}
    file = remember(store.fingerprint, Records(budget_bytes, found, about))
    if as_json:
        print(json.dumps({"about": about, "budget_bytes": budget_bytes, "modes": [asdict(mode) for mode in found]}))
    note(f"kept in {file}, for budgets about {budget_bytes / 2**30:.2f} GiB")
