"""What prerouting costs on a testbed, and what each stage of training gives back: the ablation, row by row.

    python -m recipes.prerouter.run e32k4 [--only NAME] [--seeds 0] [--longer 10] [--minutes 40]

Resumable: every stage of every row is a training run of its own under models/prerouter, which goes on where it was
stopped; results.json is written after each row. Rows that share their first stages share those runs. All rows are
measured on the same test windows, along the student's routes, teacher-forced.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from recipes.prerouter.text import streams, test_windows
from stoker.bench.provenance import provenance
from stoker.checkpoint.source import open_checkpoint
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, plan_pack
from stoker.store.reader import open_store
from stoker.train.data import Answers, Windows, read_source
from stoker.train.loop import Schedule
from stoker.train.lora import LoraSettings
from stoker.train.model import BaseOptions, TrainingModel, load
from stoker.train.quality import perplexity, ratio
from stoker.train.session import Student
from stoker.train.stages import Stage, StageOptions, train_distill, train_heads, train_sft
from stoker.train.student import StudentRoutes
from stoker.train.teacher import Teacher, Writing
from stoker.train.workers import Workers

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
WORK = Path("models/prerouter")
WIDTH, SEQUENCES, PROMPT, ANSWER = 128, 8, 16, 64
TEST_EACH = 16
STEPS = {"heads": 80, "sft": 50, "distill": 15}
RATES = {"heads": 2e-3, "sft": 1e-3, "distill": 5e-4}
LORA = LoraSettings(16, 32)


@dataclass(frozen=True)
class Row:
    """stages: "heads", "sft", "distill", in the order of training; "-joint": heads go on learning; "-set": set loss."""

    name: str
    stages: tuple[str, ...] = ()
    k: int = 0  # 0: the model's own
    heads: bool = True
    owners: str = "all"
    seed: int = 0
    bits: int = 4
    next_token: bool = False  # heads also see the token that the route is for

    @property
    def layers(self) -> list[int] | None:
        """Owners "2-4" as layers."""
        first, _, last = self.owners.partition("-")
        return None if self.owners == "all" else list(range(int(first), int(last) + 1))

    @property
    def key(self) -> str:
        return f"{self.name} | k {self.k} | owners {self.owners} | seed {self.seed}"


THREE = ("heads", "sft", "distill")


def rows(chosen: int, layers: int) -> Iterator[Row]:
    """Those that the bars speak of first."""
    yield Row("full precision", heads=False, bits=16)
    yield Row("int4 exact", heads=False)
    fewer = [k for k in (2, 1) if k < chosen]
    for k in fewer:
        yield Row("int4 exact, fewer experts", heads=False, k=k)
    yield Row("untrained heads")
    yield Row("heads", ("heads",))
    yield Row("heads, sft", THREE[:2])
    yield Row("heads, sft, distill", THREE)
    yield Row("heads, distill", ("heads", "distill"))
    yield Row("heads, distill, sft", ("heads", "distill", "sft"))
    for seed in (1, 2):
        for count in (1, 2, 3):
            yield Row(", ".join(THREE[:count]), THREE[:count], seed=seed)
    for count in (0, 1, 2, 3):
        yield Row(f"next token seen: {', '.join(THREE[:count]) or 'untrained heads'}", THREE[:count], next_token=True)
    for seed in (1, 2):
        for count in (1, 2, 3):
            yield Row(f"next token seen: {', '.join(THREE[:count])}", THREE[:count], seed=seed, next_token=True)
    for seed in (0, 1, 2):
        for stages in (("heads", "distill"), ("heads", "distill", "sft")):
            yield Row(f"next token seen: {', '.join(stages)}", stages, seed=seed, next_token=True)
    yield Row("next token seen: heads, then sft jointly", ("heads", "sft-joint"), next_token=True)
    yield Row("next token seen: first layers keep their gate", ("heads",), owners=f"2-{layers - 2}", next_token=True)
    for k in fewer:
        for count in (1, 3):
            yield Row(f"next token seen: {', '.join(THREE[:count])}", THREE[:count], k=k, next_token=True)
    yield Row("LoRA without prerouter", ("sft", "distill"), heads=False)
    yield Row("LoRA without prerouter: sft", ("sft",), heads=False)
    yield Row("heads, then sft jointly", ("heads", "sft-joint"))
    yield Row("heads, then all jointly", ("heads", "sft-joint", "distill-joint"))
    yield Row("heads by set loss", ("heads-set",))
    yield Row("first layers keep their gate: heads", ("heads",), owners=f"2-{layers - 2}")
    yield Row("first layers keep their gate: heads, sft", THREE[:2], owners=f"2-{layers - 2}")
    yield Row("first layers keep their gate: all three", THREE, owners=f"2-{layers - 2}")
    for k in fewer:
        yield Row("untrained heads", k=k)
        for count in (1, 2, 3):
            yield Row(", ".join(THREE[:count]), THREE[:count], k=k)
        yield Row("LoRA without prerouter", ("sft", "distill"), k=k, heads=False)
    for seed in (1, 2):
        yield Row("heads, distill", ("heads", "distill"), seed=seed)
        yield Row("heads, distill, sft", ("heads", "distill", "sft"), seed=seed)


class Study:
    """One testbed: its two stores, its text, and what was measured so far."""

    def __init__(self, name: str, threads: int, longer: int = 1) -> None:
        """longer: every stage takes so many times the steps, in runs of their own."""
        self.name, self.threads = name, threads
        self.steps = {stage: longer * count for stage, count in STEPS.items()}
        source = Path("recipes/testbed") / name
        identity = json.loads((source / "training.json").read_text())["weights_sha256"]
        self.identity: str = identity
        self.key = f"{name}-{identity[:12]}" + (f"-x{longer}" if longer > 1 else "")
        self.directory = WORK / self.key
        self.stores = {bits: self._store(source, bits) for bits in (4, 16)}
        tokenizer = AutoTokenizer.from_pretrained(source)
        found = streams(tokenizer, "train", self.directory / "tokens")
        self.text = Windows(list(found.values()), WIDTH, 0)
        self.test = test_windows(streams(tokenizer, "test", self.directory / "tokens"), WIDTH, TEST_EACH)
        self.losses: dict[str, np.ndarray] = {}
        self._bases: dict[int, TrainingModel] = {}

    def _store(self, source: Path, bits: int) -> Path:
        store = self.directory / f"store-{bits}"
        if not (store / "stoker.json").exists():
            pack(plan_pack(open_checkpoint(source), PackOptions(bits=bits)), store)
        return store

    def base(self, bits: int) -> TrainingModel:
        """Loaded once; what a row puts beside it is taken away again by `_leave`."""
        if bits not in self._bases:
            options = BaseOptions(
                memory="3GiB", step_tokens=SEQUENCES * WIDTH, sequence_tokens=WIDTH, threads=self.threads
            )
            self._bases[bits] = load(self.stores[bits], options)
        return self._bases[bits]

    def sft_text(self, seed: int) -> Answers | Windows:
        """What the full-precision model writes on from the corpus's beginnings; the same text for every row."""
        file = self.directory / "teacher.jsonl"
        wanted = Writing(self.steps["sft"] * SEQUENCES, PROMPT, WIDTH - PROMPT)
        Teacher(self.base(16)).write(file, self.text, wanted)
        return read_source([file], None, WIDTH, seed)

    def measure(self, row: Row) -> dict[str, Any]:
        """Train what is not trained yet, then the losses on the test windows."""
        started = time.monotonic()
        student = Student.of(self.base(row.bits), row.k or None)
        if row.heads:
            student.add_heads(row.layers, seed=row.seed, next_token=row.next_token)
        done: tuple[str, ...] = ()
        for stage in row.stages:
            done = (*done, stage)
            self._train(student, row, done)
        losses_W = student.token_losses(self.test).mean(1)
        agreement = _agreement(student, self.test)
        _leave(student)
        self.losses[row.key] = losses_W
        exact = self.losses[Row("int4 exact", heads=False).key] if row.bits == 4 else losses_W
        found = asdict(row) | {"k": student.top_k, "perplexity": perplexity(losses_W)}
        found |= {"to_int4_exact": ratio(losses_W, exact), "slot_agreement": agreement}
        return found | {"seconds": round(time.monotonic() - started), "losses": [round(float(x), 5) for x in losses_W]}

    def _train(self, student: Student, row: Row, done: tuple[str, ...]) -> None:
        stage, _, variant = done[-1].partition("-")
        if stage != "heads" and not student.lora:
            student.add_lora(LORA, row.seed)
        gates = "gates" if not row.heads else f"owners-{row.owners}" + ("-next" if row.next_token else "")
        place = self.directory / f"k{student.top_k}-{gates}-seed{row.seed}" / "+".join(done)
        options = StageOptions(
            sequences=SEQUENCES, loss="set" if variant == "set" else "kl", train_heads=variant == "joint",
            answer_tokens=ANSWER, prompt_tokens=PROMPT, seed=row.seed,
        )  # fmt: skip
        schedule = Schedule(self.steps[stage], RATES[stage], warmup=5, save_every=10)
        run = Stage(place, schedule, options, {"stage": done[-1], "after": done[:-1]}, Workers())
        text = self.text.with_seed(row.seed)
        if stage == "heads":
            train_heads(student, text, run)
        elif stage == "sft":
            train_sft(student, self.sft_text(row.seed), run)
        else:
            train_distill(student, Teacher(self.base(16)), text, run)


def _leave(student: Student) -> None:
    """The base is as it was."""
    for path, update in student.lora.items():
        student.model.model.set_submodule(path, update.base, strict=True)
    student.model.use_top_k(None)


@torch.no_grad()
def _agreement(student: Student, test: Windows) -> float | None:
    """Share of the gate's experts that the heads name, on the student's own path."""
    if student.heads is None:
        return None
    batch = test.rows(np.arange(0, len(test), max(1, len(test) // 8)))
    with student.routing(batch) as routes:
        student.model.hidden_states(batch.ids_BT)
    assert isinstance(routes, StudentRoutes)
    return round(float(routes.agreement()) / batch.count, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ablation of prerouting on a testbed.")
    parser.add_argument("testbed", choices=("e32k4", "e8k2"))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no row after so many")
    parser.add_argument("--rows", type=int, default=1000, help="only the first ones")
    parser.add_argument("--seeds", default="0,1,2", help="only rows of these")
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument("--longer", type=int, default=1, help="times the steps of every stage")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    started, study = time.monotonic(), Study(options.testbed, options.threads, options.longer)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    about = {"testbed": options.testbed, "weights_sha256": study.identity, "width": WIDTH, "sequences": SEQUENCES}
    about |= {"steps": study.steps, "rates": RATES, "lora": asdict(LORA), "test_windows": len(study.test)}
    about |= {"base": open_store(study.stores[4]).fingerprint, "provenance": provenance()}
    entry = results.setdefault(study.key, about | {"rows": {}})
    for name, row in entry["rows"].items():
        study.losses[name] = np.array(row["losses"])
    config = json.loads((Path("recipes/testbed") / options.testbed / "config.json").read_text())
    for row in list(rows(config["num_experts_per_tok"], config["num_hidden_layers"]))[: options.rows]:
        if row.key in entry["rows"] or str(row.seed) not in options.seeds.split(","):
            continue
        if options.only and options.only not in row.name:
            continue
        if time.monotonic() - started > 60 * options.minutes:
            break
        entry["rows"][row.key] = study.measure(row)
        partial = options.results.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.rename(options.results)
        found = entry["rows"][row.key]
        print(
            row.key, found["perplexity"], found["to_int4_exact"], found["slot_agreement"], found["seconds"], flush=True
        )


if __name__ == "__main__":
    main()
