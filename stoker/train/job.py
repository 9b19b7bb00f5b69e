"""A run from a store and text to an adapter: assembles base, student, teacher and sources, runs stages.

The flat view of training: read `run` from top to bottom. OUT holds the adapter, OUT/training one directory a stage
(run.json, metrics.jsonl, state.pt) and the teacher's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stoker.errors import OptionError
from stoker.routing.roster_options import RosterOptions
from stoker.runtime.skeleton import load_config
from stoker.store.reader import Store, open_store
from stoker.train.data import Answers, Windows, hashes, read_source
from stoker.train.heads import HIDDEN
from stoker.train.loop import Schedule
from stoker.train.lora import LoraSettings
from stoker.train.model import BaseOptions, load
from stoker.train.output import load_into, save
from stoker.train.plan import Hold
from stoker.train.quality import measured
from stoker.train.session import Student
from stoker.train.stages import Stage, StageOptions, train_distill, train_heads, train_sft
from stoker.train.teacher import Endpoint, Teacher, Writing
from stoker.train.workers import Workers

STAGES = ("heads", "sft", "distill", "roster")
STEPS = {"heads": 150, "sft": 150, "distill": 40, "roster": 600}
QUICK_STEPS = {"heads": 60, "sft": 24, "distill": 6}  # of `stoker train all`: minutes, not hours
RATES = {"heads": 2e-3, "sft": 5e-4, "distill": 2e-4, "roster": 5e-4}
TEXT = "teacher.jsonl"


@dataclass(frozen=True)
class Job:
    """What is trained, on what, how long. None: the stage's default, the adapter's or the model's own (k), all (owners,
    decoder layers). What shapes heads or LoRA is refused where `adapter` brings others.

    teacher: a store of full precision; teacher_url: writes text for sft, scores nothing. Neither: text as given, and
    the base itself by its own gates is distill's teacher.
    """

    store: Path
    out: Path
    text: tuple[Path, ...]
    k: int | None = None
    owners: tuple[int, ...] | None = None
    hidden: int | None = None
    next_token: bool | None = None  # heads see the token that their route is for: the default
    rank: int | None = None
    alpha: int | None = None
    options: StageOptions = field(default_factory=StageOptions)
    steps: int | None = None
    quick: bool = False
    lr: float | None = None
    save_every: int = 25
    sequence_tokens: int = 256
    held_windows: int = 32
    memory: str = "auto"
    hold: Hold = "auto"
    threads: int | None = None
    adapter: Path | None = None
    teacher: Path | None = None
    teacher_url: str | None = None
    teacher_model: str = "default"
    teacher_key: str | None = None
    roster: RosterOptions | None = None  # of stage roster

    def __post_init__(self) -> None:
        if self.teacher is not None and self.teacher_url is not None:
            raise OptionError("one teacher is enough", where="--teacher, --teacher-url")
        if self.sequence_tokens < 2:
            raise OptionError("a sequence needs two tokens", where="--sequence-tokens", got=self.sequence_tokens)

    @property
    def sees_next(self) -> bool:
        return self.next_token is not False

    @property
    def lora(self) -> LoraSettings:
        rank = self.rank or LoraSettings.r
        return LoraSettings(rank, self.alpha or 2 * rank)

    def schedule(self, stage: str) -> Schedule:
        steps = self.steps or (QUICK_STEPS if self.quick else STEPS)[stage]
        return Schedule(steps, self.lr or RATES[stage], min(10, steps // 5), save_every=self.save_every)


def run(job: Job, stages: Sequence[str], tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Train the stages in this order and write the adapter; what it costs on held-out text, as the adapter says it."""
    workers = Workers()
    store, tokenizer = open_store(job.store), _tokenizer(job.store)
    source = read_source(job.text, tokenizer, job.sequence_tokens, job.options.seed)
    source, held = _hold_out(source, job.held_windows)
    _check_source(source, stages, job)
    scoring = load(job.teacher, _base_options(job, store, 0)) if job.teacher is not None else None
    with load(job.store, _base_options(job, store, workers.world)) as base:
        if workers.leads:
            for line in base.plan.lines():
                tell(line)
        student = Student.of(base, job.k)
        if job.adapter is not None:
            load_into(student, job.adapter)
            _check_brought(job, student)
        teacher = Teacher(base, student) if scoring is None else Teacher(scoring)
        recipe: dict[str, Any] = {"sequence_tokens": job.sequence_tokens, "seed": job.options.seed, "stages": []}
        for stage in stages:
            recipe["stages"].append(_train(job, stage, student, teacher, source, tokenizer, workers, hashes(job.text)))
        cost = measured(student, held) if held is not None and workers.leads else {}
        if workers.leads:
            save(student, job.out, recipe, hashes(job.text), cost)
        workers.wait()
    if scoring is not None:
        scoring.close()
    return cost


def _train(
    job: Job,
    name: str,
    student: Student,
    teacher: Teacher,
    source: Windows | Answers,
    tokenizer: Any,
    workers: Workers,
    text: dict[str, str],
) -> dict[str, Any]:
    options = job.options
    if name == "heads" and student.heads is None:
        student.add_heads(job.owners, job.hidden or HIDDEN, options.seed, job.sees_next)
    if name != "heads" and not student.lora:
        student.add_lora(job.lora, options.seed)
    if name == "roster":
        assert job.roster is not None
        student.add_roster(job.roster)
    settings = {
        "stage": name,
        "base": student.model.store.fingerprint,
        "k": student.top_k,
        "owners": []
        if student.heads is None
        else [student.model.blocks[owner].layer for owner in student.heads.owners],
        "heads_see_next": student.heads is not None and bool(student.heads.next_scale),
        "text": text,
        "adapter": None if job.adapter is None else str(job.adapter),
        "teacher": _teacher_name(job, teacher) if name != "heads" else None,
        **{key: value for key, value in vars(options).items()},
        **({} if name == "heads" else vars(student.lora_settings or job.lora)),
        "sequence_tokens": job.sequence_tokens,
        **({} if name != "roster" or job.roster is None else {"roster": job.roster.as_dict()}),
    }
    stage = Stage(job.out / "training" / name, job.schedule(name), options, settings, workers)
    if name == "heads":
        metrics = train_heads(student, source, stage)
    elif name == "roster":
        metrics = train_sft(student, source, stage)
    elif name == "sft":
        metrics = train_sft(student, _sft_text(job, teacher, source, tokenizer, workers, stage), stage)
    else:
        metrics = train_distill(student, teacher, source, stage)
    return settings | vars(stage.schedule) | {"last_loss": metrics[-1]["loss"]}


def _sft_text(
    job: Job, teacher: Teacher, source: Windows | Answers, tokenizer: Any, workers: Workers, stage: Stage
) -> Windows | Answers:
    """The given text, or what a teacher that was named writes on from its beginnings."""
    if job.teacher is None and job.teacher_url is None:
        return source
    options = job.options
    wanted = Writing(
        rows=stage.schedule.steps * options.sequences,
        prompt_tokens=options.prompt_tokens,
        answer_tokens=job.sequence_tokens - options.prompt_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    file = job.out / "training" / TEXT
    if workers.leads:
        file.parent.mkdir(parents=True, exist_ok=True)
        if job.teacher_url is not None:
            Endpoint(job.teacher_url, job.teacher_model, tokenizer, job.teacher_key).write(file, source, wanted)
        else:
            teacher.write(file, source, wanted)
    workers.wait()
    return read_source([file], tokenizer, job.sequence_tokens, options.seed)


def _teacher_name(job: Job, teacher: Teacher) -> str:
    if job.teacher_url is not None:
        return f"{job.teacher_model} at {job.teacher_url}"
    return teacher.model.store.fingerprint


def _hold_out(source: Windows | Answers, held: int) -> tuple[Windows | Answers, Windows | None]:
    """Windows to measure on are taken out of the text; of prompts with answers none are."""
    if not held or not isinstance(source, Windows) or len(source) < 2 * held:
        return source, None
    return source.without(held)


def _check_source(source: Windows | Answers, stages: Sequence[str], job: Job) -> None:
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages:
        raise OptionError("unknown stage", where="stages", expected=", ".join(STAGES), got=", ".join(unknown))
    prompts = "distill" in stages or ("sft" in stages and (job.teacher or job.teacher_url))
    if prompts and job.options.prompt_tokens >= job.sequence_tokens:
        raise OptionError(
            "a prompt leaves no room for an answer",
            where="--prompt-tokens",
            expected=f"below --sequence-tokens {job.sequence_tokens}",
            got=job.options.prompt_tokens,
        )
    if prompts and isinstance(source, Answers):
        raise OptionError(
            "the teacher and the student go on from plain text",
            where="TEXT",
            expected='.txt, .npy, or lines {"text": ...}',
            got="prompts with answers",
            remedy="train sft on these, without --teacher; give plain text for distill",
        )


def _check_brought(job: Job, student: Student) -> None:
    """Raises OptionError where an option asks for heads or LoRA of another shape than the adapter's, by its name."""
    asked: dict[str, tuple[Any, Any]] = {}
    if student.heads is not None:
        owners = tuple(student.model.blocks[owner].layer for owner in student.heads.owners)
        asked["--owners"] = (job.owners, owners)
        asked["--hidden"] = (job.hidden, student.heads.hidden)
        asked["--next-token, --one-ahead"] = (job.next_token, bool(student.heads.next_scale))
    if student.lora_settings is not None:
        asked["--rank"] = (job.rank, student.lora_settings.r)
        asked["--alpha"] = (job.alpha, student.lora_settings.alpha)
    for option, (wanted, brought) in asked.items():
        if wanted is not None and wanted != brought:
            raise OptionError(
                "the adapter's heads and LoRA are trained on as they are",
                where=option,
                expected=brought,
                got=wanted,
                remedy="leave the option out, or begin without --adapter",
            )
    if job.roster is not None and student.heads is not None:
        raise OptionError(
            "heads and rosters both want to choose",
            where="--adapter",
            expected="an adapter without heads",
            got=f"{job.adapter}, with heads",
        )


def _base_options(job: Job, store: Store, world: int) -> BaseOptions:
    """world 0: of a teacher that only scores."""
    rows = -(-job.options.sequences // max(1, world))
    longest = max(job.sequence_tokens, job.options.prompt_tokens + job.options.answer_tokens)
    return BaseOptions(
        memory=job.memory,
        hold=job.hold,
        step_tokens=rows * longest,
        sequence_tokens=longest,
        trained_parameters=_trained_parameters(job, store) if world else 0,
        threads=job.threads,
    )


def _trained_parameters(job: Job, store: Store) -> int:
    """Of all heads and LoRA, roughly."""
    config = load_config(store.path).get_text_config()
    experts, width = max(pool.experts for pool in store.pools), config.hidden_size
    hidden = job.hidden or HIDDEN
    head = ((2 if job.sees_next else 1) * width + 2 * experts) * (hidden + experts) + experts * hidden
    return len(store.pools) * (head + 14 * job.lora.r * 2 * width)


def _tokenizer(directory: Path) -> Any:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((directory / name).exists() for name in names):
        return None
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
