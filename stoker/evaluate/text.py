"""The text that is measured on: passages with a domain, tokenised into windows.

Owns the bundled passages (data/text.jsonl; packages and licences in data/SOURCES.json). Knows no model.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from stoker.errors import OptionError

WINDOW_TOKENS = 512
LEAST_TOKENS = 16  # a shorter rest of a document is left out
Use = Literal["calibrate", "held-out"]
USES: tuple[Use, ...] = ("calibrate", "held-out")


@dataclass(frozen=True)
class Passage:
    """A document or part of one. use: bundled passages are divided, so that a bound found on one half is checked on
    the other."""

    domain: str
    text: str
    use: Use | None = None


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document, at most WINDOW_TOKENS unless said otherwise."""

    domain: str
    document: int
    ids: tuple[int, ...]


def bundled(use: Use | None = None) -> list[Passage]:
    """The passages that stoker ships: six domains, ten of each; `use`: one half."""
    lines = resources.files("stoker.evaluate").joinpath("data/text.jsonl").read_text(encoding="utf-8").splitlines()
    passages = [Passage(one["domain"], one["text"], one["use"]) for one in map(json.loads, lines)]
    return [one for one in passages if use is None or one.use == use]


def read(file: Path) -> list[Passage]:
    """Passages of a .jsonl ({"text", "domain"} a line; the domain may be missing) or of a plain text file, which is
    one document. Raises OptionError."""
    if not file.is_file():
        raise OptionError("no such file", where=f"--text {file}", remedy="give a text file, a .jsonl, or `bundled`")
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return [Passage(file.stem, text)]
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [Passage(str(line.get("domain", file.stem)), str(line["text"])) for line in lines]
    except (ValueError, KeyError, AttributeError) as error:
        raise OptionError(
            "not a file of passages", where=f"--text {file}", expected='{"text": ..., "domain": ...} a line', got=error
        ) from error


def windows(
    passages: Sequence[Passage],
    encode: Callable[[str], Sequence[int]],
    *,
    window_tokens: int = WINDOW_TOKENS,
    most: int | None = None,
) -> list[Window]:
    """Each passage in windows that do not overlap; `most`: so many of each domain, at even distances.

    Raises OptionError where nothing is left.
    """
    found: dict[str, list[Window]] = {}
    for document, passage in enumerate(passages):
        ids = tuple(encode(passage.text))
        parts = [ids[first : first + window_tokens] for first in range(0, len(ids), window_tokens)]
        kept = [Window(passage.domain, document, part) for part in parts if len(part) >= LEAST_TOKENS]
        found.setdefault(passage.domain, []).extend(kept)
    chosen = [one for each in found.values() for one in spread_evenly(each, most)]
    if not chosen:
        raise OptionError("the text is too short to measure on", where="--text", expected=f"{LEAST_TOKENS} tokens")
    return chosen


def spread_evenly(items: Sequence[Window], most: int | None) -> list[Window]:
    """At most so many, at even distances."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[place * len(items) // most] for place in range(most)]


def text_hash(passages: Sequence[Passage]) -> str:
    """Names the text in results: sha256 over domains and texts."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(json.dumps([passage.domain, passage.text]).encode())
    return digest.hexdigest()
