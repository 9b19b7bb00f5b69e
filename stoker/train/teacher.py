"""Who the student learns from: a full-precision store, the base itself with its own gates, or an HTTP endpoint.

A local teacher scores and writes; an endpoint writes text only. Text goes to a .jsonl file, batch by batch, so that a
run that was stopped goes on writing where it was.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.errors import OptionError, StokerError
from stoker.train.data import Batch, Source
from stoker.train.losses import Likeliest
from stoker.train.model import TrainingModel
from stoker.train.sample import answer
from stoker.train.session import Student

TIMEOUT_S = 120
TRIES = 3


@dataclass(frozen=True)
class Writing:
    """What a teacher is asked to write: `rows` answers of `answer_tokens` to `prompt_tokens` of text each."""

    rows: int
    prompt_tokens: int = 32
    answer_tokens: int = 224
    temperature: float = 1.0
    seed: int = 0
    at_once: int = 32

    def draws(self, batch: int) -> Tensor:
        """float32 [at_once, answer_tokens] in [0, 1), a function of seed and batch alone."""
        generator = torch.Generator().manual_seed(self.seed * 2**20 + batch)
        return torch.rand(self.at_once, self.answer_tokens, generator=generator)


@dataclass(frozen=True)
class Teacher:
    """A model that scores: another store, or (`student` given) the student's base without what was trained."""

    model: TrainingModel
    student: Student | None = None

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within, the model computes as its checkpoint does, but for its bits."""
        with nullcontext() if self.student is None else self.student.untrained():
            yield

    @torch.no_grad()
    def scores(self, batch: Batch, count: int) -> Likeliest:
        """The likeliest next tokens at every row that predicts an answer's token."""
        parts: list[Likeliest] = []

        def keep(logits: Tensor, rows: slice) -> Tensor:
            parts.append(Likeliest.of(logits, min(count, logits.shape[-1] - 1)))
            return logits.new_zeros(())

        with self.plain():
            hidden_BTD = self.model.hidden_states(batch.ids_BT)
            self.model.head_loss(hidden_BTD[:, :-1][batch.answers_BT[:, 1:]], keep)
        return Likeliest(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def write(self, file: Path, prompts: Source, wanted: Writing) -> None:
        """Lines {"ids", "answer_from"} of sampled answers."""

        def some(at: int) -> list[dict[str, Any]]:
            prompt_BP = prompts.batch(at, wanted.at_once).ids_BT[:, : wanted.prompt_tokens]
            with self.plain():
                batch = answer(
                    self.model,
                    prompt_BP,
                    wanted.draws(at),
                    temperature=wanted.temperature,
                    end_ids=end_ids(self.model),
                )
            rows = zip(batch.ids_BT.tolist(), batch.length_B.tolist(), strict=True)
            return [{"ids": ids[:length], "answer_from": prompt_BP.shape[1]} for ids, length in rows]

        _write_batches(file, wanted, some)


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server: `url` up to and without /v1, a model's name, an optional key."""

    url: str
    model: str
    tokenizer: Any
    api_key: str | None = None

    def write(self, file: Path, prompts: Source, wanted: Writing) -> None:
        """Lines {"prompt", "answer"} by /v1/completions. Raises StokerError when the endpoint does not answer."""
        if self.tokenizer is None:
            raise OptionError("the store has no tokenizer to make prompts with", where="--teacher-url")

        def some(at: int) -> list[dict[str, Any]]:
            ids_BT = prompts.batch(at, wanted.at_once).ids_BT[:, : wanted.prompt_tokens]
            texts = [self.tokenizer.decode(row) for row in ids_BT.tolist()]
            return [
                {"prompt": text, "answer": self._complete(text, wanted, at * wanted.at_once + row)}
                for row, text in enumerate(texts)
            ]

        _write_batches(file, wanted, some)

    def _complete(self, prompt: str, wanted: Writing, row: int) -> str:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": wanted.answer_tokens,
            "temperature": wanted.temperature,
            "seed": wanted.seed + row,
        }
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        url, last = self.url.rstrip("/") + "/v1/completions", ""
        for _ in range(TRIES):
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                    return str(json.load(reply)["choices"][0]["text"])
            except urllib.error.HTTPError as error:
                last = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError, KeyError, IndexError) as error:
                last = str(error) or type(error).__name__
        raise StokerError(
            "the teacher's endpoint gave no answer",
            where=url,
            expected="an OpenAI-compatible /v1/completions",
            got=last,
            remedy="check --teacher-url, --teacher-model and the server's log; run again to go on where it stopped",
        )


def end_ids(model: TrainingModel) -> tuple[int, ...]:
    """Tokens that end a text."""
    eos = model.config.eos_token_id
    return tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (eos,))


def _write_batches(file: Path, wanted: Writing, some: Callable[[int], list[dict[str, Any]]]) -> None:
    """Whole batches alone are kept of an earlier run."""
    batches = -(-wanted.rows // wanted.at_once)
    lines = file.read_text().splitlines() if file.exists() else []
    done = len(lines) // wanted.at_once
    partial = file.with_suffix(".partial")
    partial.write_text("".join(line + "\n" for line in lines[: done * wanted.at_once]))
    partial.rename(file)
    for at in range(done, batches):
        made = "".join(json.dumps(row) + "\n" for row in some(at))
        with file.open("a") as handle:
            handle.write(made)
