"""`stoker train heads|sft|distill|roster|all`: adapters for a store, trained on this machine inside a budget."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import common
from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.train.job import Job

_TEXT = "Text"
_HEADS = "Heads"
_LORA = "LoRA"
_TEACHER = "Teacher"
_LOADING = "Loading"

Store = Annotated[Path, typer.Argument(metavar="STORE", help="The packed base.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The adapter's directory; the same command goes on in it.")]
Text = Annotated[
    list[Path],
    typer.Option("--text", metavar="FILE", help=".txt, .jsonl or .npy; may be repeated.", rich_help_panel=_TEXT),
]
SequenceTokens = Annotated[int, typer.Option(min=2, help="Tokens of one sequence.", rich_help_panel=_TEXT)]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences of a step, over all processes.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps (default: heads 150, sft 150, distill 40).")]
Rate = Annotated[float | None, typer.Option(help="Learning rate (default: heads 2e-3, sft 5e-4, distill 2e-4).")]
Seed = Annotated[int, typer.Option(min=0, help="Order of the text, first weights, draws.")]
K = Annotated[int | None, typer.Option("--k", min=1, help="Experts a token (default: the model's own).")]
Adapter = Annotated[Path | None, typer.Option(metavar="DIR", help="Go on from the heads and LoRA of this adapter.")]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Budget of the whole process: 8GiB, auto.", rich_help_panel=_LOADING)
]
HoldOption = Annotated[
    str,
    typer.Option(
        metavar="auto|memory|stream", rich_help_panel=_LOADING,
        help="The base dequantised in memory, or its experts read from the store in every pass.",
    ),
]  # fmt: skip
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Threads.", rich_help_panel=_LOADING)]
Owners = Annotated[
    str | None,
    typer.Option(metavar="LAYERS", help="Layers with a head: 3-10,12 (default: all that can).", rich_help_panel=_HEADS),
]
Hidden = Annotated[int | None, typer.Option(min=1, help="Width of a head (default: 512).", rich_help_panel=_HEADS)]
NextToken = Annotated[
    bool | None,
    typer.Option(
        "--next-token/--one-ahead", rich_help_panel=_HEADS, show_default=False,
        help="Heads also see the token that the route is for: near to the gate's choice, and read when its step "
        "begins (the default); or they name it a token earlier without (Edge0's way).",
    ),
]  # fmt: skip
LossOption = Annotated[
    str,
    typer.Option(
        "--loss", metavar="kl|set", help="To imitate the gate's distribution, or its set.", rich_help_panel=_HEADS
    ),
]
TrainHeads = Annotated[bool, typer.Option("--train-heads", help="Heads go on learning too.", rich_help_panel=_HEADS)]
Imitation = Annotated[
    float, typer.Option(min=0, help="Weight of their imitation of the gates then.", rich_help_panel=_HEADS)
]
Rank = Annotated[int | None, typer.Option(min=1, help="Rank (default: 16).", rich_help_panel=_LORA)]
Alpha = Annotated[
    int | None,
    typer.Option(min=1, help="The update's scale is alpha / rank (default: twice the rank).", rich_help_panel=_LORA),
]
TeacherStore = Annotated[
    Path | None,
    typer.Option("--teacher", metavar="DIR", help="A store of the same model in 16 bits.", rich_help_panel=_TEACHER),
]
TeacherUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="An OpenAI-compatible endpoint that writes the text.", rich_help_panel=_TEACHER),
]
TeacherModel = Annotated[str, typer.Option(metavar="NAME", help="Its model.", rich_help_panel=_TEACHER)]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of text to go on from.", rich_help_panel=_TEACHER)]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Tokens of a student's answer.", rich_help_panel=_TEACHER)]
Temperature = Annotated[float, typer.Option(min=0, help="Of answers.", rich_help_panel=_TEACHER)]
Likeliest = Annotated[
    int,
    typer.Option(min=1, help="The teacher's tokens that are compared; a tail for the rest.", rich_help_panel=_TEACHER),
]

group = typer.Typer(no_args_is_help=True, help="Train heads and LoRA beside a store, inside a budget.")


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(group, name="train")


@group.command("heads")
def heads(
    store: Store,
    out: Out,
    text: Text,
    k: K = None,
    owners: Owners = None,
    hidden: Hidden = None,
    next_token: NextToken = None,
    loss: LossOption = "kl",
    steps: Steps = None,
    sequences: Sequences = 8,
    sequence_tokens: SequenceTokens = 256,
    lr: Rate = None,
    seed: Seed = 0,
    adapter: Adapter = None,
    memory: Memory = "auto",
    hold: HoldOption = "auto",
    threads: Threads = None,
) -> None:
    """Heads that tell the next layers' experts before they are asked: they imitate the gates, on exact passes."""
    _run(
        ["heads"], store, out, text, {"sequences": sequences, "loss": loss, "seed": seed},
        k=k, owners=owners, hidden=hidden, next_token=next_token, steps=steps, sequence_tokens=sequence_tokens, lr=lr,
        adapter=adapter, memory=memory, hold=hold, threads=threads,
    )  # fmt: skip


@group.command("sft")
def sft(
    store: Store,
    out: Out,
    text: Text,
    adapter: Adapter = None,
    k: K = None,
    rank: Rank = None,
    alpha: Alpha = None,
    train_heads: TrainHeads = False,
    imitation: Imitation = 0.1,
    loss: LossOption = "kl",
    steps: Steps = None,
    sequences: Sequences = 8,
    sequence_tokens: SequenceTokens = 256,
    lr: Rate = None,
    seed: Seed = 0,
    teacher: TeacherStore = None,
    teacher_url: TeacherUrl = None,
    teacher_model: TeacherModel = "default",
    prompt_tokens: PromptTokens = 32,
    temperature: Temperature = 1.0,
    memory: Memory = "auto",
    hold: HoldOption = "auto",
    threads: Threads = None,
) -> None:
    """LoRA on text, along the adapter's routes. The text as given, or what a teacher writes on from its beginnings."""
    options = {
        "sequences": sequences, "loss": loss, "train_heads": train_heads, "imitation": imitation, "seed": seed,
        "prompt_tokens": prompt_tokens, "temperature": temperature,
    }  # fmt: skip
    _run(
        ["sft"], store, out, text, options,
        k=k, rank=rank, alpha=alpha, steps=steps, sequence_tokens=sequence_tokens, lr=lr, adapter=adapter,
        memory=memory, hold=hold, threads=threads, teacher=teacher, teacher_url=teacher_url,
        teacher_model=teacher_model,
    )  # fmt: skip


@group.command("distill")
def distill(
    store: Store,
    out: Out,
    text: Text,
    adapter: Adapter = None,
    teacher: TeacherStore = None,
    k: K = None,
    rank: Rank = None,
    alpha: Alpha = None,
    train_heads: TrainHeads = False,
    imitation: Imitation = 0.1,
    loss: LossOption = "kl",
    steps: Steps = None,
    sequences: Sequences = 8,
    sequence_tokens: SequenceTokens = 256,
    lr: Rate = None,
    seed: Seed = 0,
    prompt_tokens: PromptTokens = 32,
    answer_tokens: AnswerTokens = 128,
    temperature: Temperature = 1.0,
    likeliest: Likeliest = 64,
    memory: Memory = "auto",
    hold: HoldOption = "auto",
    threads: Threads = None,
) -> None:
    """The student answers, the teacher scores. Without --teacher the base itself does, by its own gates."""
    options = {
        "sequences": sequences, "loss": loss, "train_heads": train_heads, "imitation": imitation, "seed": seed,
        "prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "temperature": temperature,
        "likeliest": likeliest,
    }  # fmt: skip
    _run(
        ["distill"], store, out, text, options,
        k=k, rank=rank, alpha=alpha, steps=steps, sequence_tokens=sequence_tokens, lr=lr, adapter=adapter,
        memory=memory, hold=hold, threads=threads, teacher=teacher,
    )  # fmt: skip


@group.command("roster")
def roster(
    store: Store,
    out: Out,
    text: Text,
    roster_size: common.RosterSize = None,
    pin_after: common.PinAfter = None,
    delta: common.Delta = None,
    adapter: Adapter = None,
    rank: Rank = None,
    alpha: Alpha = None,
    steps: Steps = None,
    sequences: Sequences = 8,
    sequence_tokens: SequenceTokens = 256,
    lr: Rate = None,
    seed: Seed = 0,
    memory: Memory = "auto",
    hold: HoldOption = "auto",
    threads: Threads = None,
) -> None:
    """LoRA on text under the roster rule with pinning active: what makes `--routing roster` cost little (600 steps)."""
    from types import SimpleNamespace

    from stoker.routing.settings import roster_settings
    from stoker.runtime.plan import top_k
    from stoker.runtime.skeleton import load_config
    from stoker.store.reader import open_store

    asked = SimpleNamespace(roster_size=roster_size, pin_after=pin_after, delta=delta, shift=False)
    experts = min(pool.experts for pool in open_store(store).pools)
    rosters = roster_settings(asked, experts, top_k(load_config(store).get_text_config()))
    _run(
        ["roster"], store, out, text, {"sequences": sequences, "seed": seed},
        rank=rank, alpha=alpha, steps=steps, sequence_tokens=sequence_tokens, lr=lr, adapter=adapter, memory=memory,
        hold=hold, threads=threads, roster=rosters,
    )  # fmt: skip


@group.command("all")
def everything(
    store: Store,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help=".txt, .jsonl or .npy.")],
    out: Out,
    k: K = None,
    owners: Owners = None,
    next_token: NextToken = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps (default: heads 60, sft 24, distill 6).")] = None,
    sequences: Sequences = 8,
    sequence_tokens: SequenceTokens = 128,
    seed: Seed = 0,
    teacher: TeacherStore = None,
    memory: Memory = "auto",
    threads: Threads = None,
) -> None:
    """Heads, then LoRA on text, then distillation, then what it costs on held-out text: one command."""
    _run(
        ["heads", "sft", "distill"], store, out, [text], {"sequences": sequences, "seed": seed},
        k=k, owners=owners, next_token=next_token, steps=steps, quick=True, sequence_tokens=sequence_tokens,
        teacher=teacher, memory=memory, threads=threads,
    )  # fmt: skip


def _run(stages: list[str], store: Path, out: Path, text: list[Path], options: dict[str, Any], **given: Any) -> None:
    from stoker.cli.adapter import layers_of
    from stoker.cli.common import note, quiet_transformers

    quiet_transformers()
    if given.get("adapter") is not None and given["adapter"].resolve() == out.resolve():
        raise OptionError("an adapter cannot be its own beginning", where="OUT", remedy="name another directory")
    from stoker.train.job import Job, run
    from stoker.train.stages import StageOptions

    layers = layers_of(given.pop("owners", None))
    given["owners"] = None if layers is None else tuple(layers)
    job = Job(store, out, tuple(text), options=StageOptions(**options), **given)
    cost = run(job, stages, note)
    for name, value in cost.items():
        note(f"{name}: {value}")
    print(f"wrote {out}")
    print(f"next: stoker serve {store} {_routing(job)} --adapter {out}")
    sys.stdout.flush()


def _routing(job: "Job") -> str:
    """The options that serve what was trained."""
    if job.roster is None:
        return "--routing prerouter"
    settings = job.roster.as_dict()
    sizes = ",".join(map(str, settings["sizes"]))
    return f"--routing roster --roster-size {sizes} --pin-after {settings['pin_after']} --delta {settings['delta']}"
