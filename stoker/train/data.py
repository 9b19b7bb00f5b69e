"""Training text as token ids: windows of plain text, or prompts with answers, in an order that seed and step fix.

A file is .txt (one document), .jsonl (a document, or a prompt with its answer, a line) or .npy (token ids). A run that
starts again at step s sees what it would have seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stoker.errors import OptionError

SUFFIXES = (".txt", ".jsonl", ".npy")


@dataclass(frozen=True)
class Batch:
    """ids int64 [B, T], padded on the right; `length_B` of each; `answer_from_B`: its first position that is answer.

    Tokens from there on are learned, and follow the prerouter when they are themselves an input.
    """

    ids_BT: Tensor
    length_B: Tensor
    answer_from_B: Tensor

    @property
    def answers_BT(self) -> Tensor:
        """bool [B, T]: positions that are answer; never the first of a sequence, which has no token before it."""
        at_T = torch.arange(self.ids_BT.shape[1])
        first_B = self.answer_from_B.clamp(min=1)
        return (at_T >= first_B[:, None]) & (at_T < self.length_B[:, None])

    @property
    def count(self) -> int:
        """Tokens that are learned."""
        return int(self.answers_BT.sum())

    def share(self, rank: int, world: int) -> Batch:
        """The rows of one process of `world`."""
        return Batch(self.ids_BT[rank::world], self.length_B[rank::world], self.answer_from_B[rank::world])


class Source(Protocol):
    """Batches by step."""

    def batch(self, step: int, sequences: int) -> Batch: ...


class _Shuffled:
    """Rows in a fresh permutation each epoch; the ragged end is left out."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._order = -1, np.empty(0, int)

    def of(self, step: int, sequences: int) -> np.ndarray:
        a_pass = max(1, self._rows // sequences)
        epoch, at = divmod(step, a_pass)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._rows)
        if self._rows < sequences:
            return np.resize(self._order, sequences)
        return self._order[at * sequences : (at + 1) * sequences]


class Windows:
    """Streams of ids, cut into windows of `width` tokens; every token but a window's first is learned."""

    def __init__(self, streams: Sequence[np.ndarray], width: int, seed: int) -> None:
        each = [np.arange(0, len(stream) - width + 1, width) for stream in streams]
        self._streams, self.width, self._seed = list(streams), width, seed
        self._places = np.concatenate([np.stack((np.full(len(at), i), at), 1) for i, at in enumerate(each)])
        if not len(self._places):
            raise OptionError(
                "the text is too short", where="TEXT", expected=f"at least one window of {width} tokens",
                got=f"{sum(map(len, streams))} tokens", remedy="give more text, or a smaller --sequence-tokens",
            )  # fmt: skip
        self._shuffled = _Shuffled(len(self._places), seed)

    def __len__(self) -> int:
        return len(self._places)

    def without(self, held: int) -> tuple[Windows, Windows]:
        """(the others, so many evenly spaced windows): to train on, and to measure on."""
        picked = np.linspace(0, len(self) - 1, held).astype(int)
        rest = np.setdiff1d(np.arange(len(self)), picked)
        return self._of(rest), self._of(picked)

    def _of(self, which: np.ndarray) -> Windows:
        some = copy(self)
        some._places, some._shuffled = self._places[which], _Shuffled(len(which), self._seed)
        return some

    def with_seed(self, seed: int) -> Windows:
        """The same windows in another order."""
        some = copy(self)
        some._seed, some._shuffled = seed, _Shuffled(len(self), seed)
        return some

    def batch(self, step: int, sequences: int) -> Batch:
        return self.rows(self._shuffled.of(step, sequences))

    def rows(self, which: np.ndarray) -> Batch:
        cut = [self._streams[i][low : low + self.width] for i, low in self._places[which]]
        ids_BT = torch.from_numpy(np.stack(cut).astype(np.int64))
        return Batch(ids_BT, torch.full((len(cut),), self.width), torch.ones(len(cut), dtype=torch.int64))


class Answers:
    """Prompts with answers: (ids, first position of the answer), cut at `width` tokens."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], int]], width: int, seed: int) -> None:
        self._rows = [(list(ids[:width]), answer) for ids, answer in rows if answer < min(len(ids), width)]
        if not self._rows:
            raise OptionError(
                "no prompt leaves room for an answer", where="TEXT", expected=f"prompts below {width} tokens",
                remedy="give a larger --sequence-tokens",
            )  # fmt: skip
        self._shuffled = _Shuffled(len(self._rows), seed)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, step: int, sequences: int) -> Batch:
        picked = [self._rows[at] for at in self._shuffled.of(step, sequences)]
        width = max(len(ids) for ids, _ in picked)
        ids_BT = torch.zeros(len(picked), width, dtype=torch.int64)
        for row, (ids, _) in enumerate(picked):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids) for ids, _ in picked])
        return Batch(ids_BT, lengths, torch.tensor([answer for _, answer in picked]))


def read_source(files: Sequence[Path], tokenizer: Any, width: int, seed: int) -> Windows | Answers:
    """Files that are all plain text, or all prompts with answers. Raises OptionError naming file and line."""
    found = [_read(file, tokenizer) for file in files]
    answers = [row for _, rows in found for row in rows]
    streams = [stream for stream, _ in found if len(stream)]
    if answers and streams:
        raise OptionError(
            "plain text and prompts with answers cannot be mixed", where="TEXT", got=", ".join(map(str, files))
        )
    return Answers(answers, width, seed) if answers else Windows(streams, width, seed)


def hashes(files: Sequence[Path]) -> dict[str, str]:
    """sha256 of each file, by its name."""
    found = {}
    for file in files:
        with file.open("rb") as handle:
            found[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


def _read(file: Path, tokenizer: Any) -> tuple[np.ndarray, list[tuple[list[int], int]]]:
    if file.suffix not in SUFFIXES or not file.is_file():
        what = "no such text file" if file.suffix in SUFFIXES else "a text file of an unknown kind"
        raise OptionError(what, where=str(file), expected="an existing file: " + ", ".join(SUFFIXES))
    if file.suffix == ".npy":
        return np.load(file, mmap_mode="r"), []
    if file.suffix == ".txt":
        return _closed(tokenizer, [file.read_text(encoding="utf-8")]), []
    documents, rows = [], []
    for entry in _lines(file):
        if "ids" in entry:
            rows.append(([int(token) for token in entry["ids"]], int(entry["answer_from"])))
        elif "answer" in entry:
            rows.append(_answered(tokenizer, entry))
        else:
            documents.append(entry["text"])
    return (_closed(tokenizer, documents) if documents else np.empty(0, np.int64)), rows


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise OptionError("not JSON", where=f"{file}:{number}", got=str(error)) from error
            if not isinstance(entry, dict) or not ({"text", "ids"} & set(entry) or {"prompt", "answer"} <= set(entry)):
                raise OptionError(
                    "a line of training text has none of the known forms", where=f"{file}:{number}",
                    expected='{"text": ...}, {"prompt": ..., "answer": ...} or {"ids": [...], "answer_from": n}',
                )  # fmt: skip
            yield entry


def _answered(tokenizer: Any, entry: dict[str, Any]) -> tuple[list[int], int]:
    """A prompt given as text or as messages, and its answer."""
    _need(tokenizer)
    prompt = entry["prompt"]
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail = tokenizer(entry["answer"], add_special_tokens=False)["input_ids"]
    return head + tail + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]), len(head)


def _closed(tokenizer: Any, documents: Sequence[str]) -> np.ndarray:
    """Documents one after the other, each closed by the end token where the tokenizer has one."""
    _need(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
    return np.array([token for part in parts for token in (*part, *end)], dtype=np.int64)


def _need(tokenizer: Any) -> None:
    if tokenizer is None:
        raise OptionError("the store has no tokenizer for text", where="TEXT", remedy="give token ids: .npy files")
