"""What a benchmark measures: the variants, and the sessions of token ids that each of them runs.

Pure: options and numbers in, frozen plans out. Starts no engine and reads no clock.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import OptionError

COLD, WARM, WARM_UP = "cold", "warm", "warm-up"
MEASURED = (COLD, WARM)
PEER = "llama.cpp"


@dataclass(frozen=True)
class Session:
    """A prompt and the ids that are fed after it; the first `warmup` of those count to the total alone."""

    name: str
    prompt: tuple[int, ...]
    decode: tuple[int, ...]
    warmup: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.decode)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "prompt": self.prompt, "decode": self.decode, "warmup": self.warmup}


@dataclass(frozen=True)
class Variant:
    """One thing to time: a store under `options` (fields of the runtime's Options), or the peer on a GGUF file."""

    name: str
    engine: str  # "stoker" or PEER
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mmap: bool = True

    @property
    def direct(self) -> bool:
        """Reads its weights past the page cache."""
        return self.engine == "stoker" and bool(self.options.get("direct", True))


@dataclass(frozen=True)
class Plan:
    """Every round runs each variant once.

    limit_bytes: what each process may use, page cache included (None: no limit);
    separate: each run in a process of its own (always with a peer); preload: read all experts that fit, measure warm.
    """

    variants: tuple[Variant, ...]
    sessions: tuple[Session, ...]
    repeats: int
    threads: int
    ctx_size: int
    separate: bool = False
    limit_bytes: int | None = None
    peer_python: str | None = None
    preload: bool = False
    routes: str | None = None
    route_weights: str = "own"
    trace: Path | None = None

    def order(self, round_: int) -> list[Variant]:
        """The variants of a round; every other round backwards, so that a drift of the machine favours none."""
        return list(self.variants if round_ % 2 == 0 else reversed(self.variants))


def stoker_variants(
    model: str, base: Mapping[str, Any], paths: Sequence[str], policies: Sequence[str]
) -> tuple[Variant, ...]:
    """The base options, then each further path with the base policy, then each further policy with the base path."""
    chosen = [(base["path"], base["policy"])]
    chosen += [(path, base["policy"]) for path in paths] + [(base["path"], policy) for policy in policies]
    if len(set(chosen)) != len(chosen):
        raise OptionError("a variant is named twice", where="--vs-path, --vs-policy", got=chosen)
    if policies and base["path"] not in ("auto", "hot"):
        raise OptionError(f"path {base['path']} has no policy to compare", where="--vs-policy", expected="--path hot")
    return tuple(
        Variant(f"stoker {path} {policy}", "stoker", model, {**base, "path": path, "policy": policy})
        for path, policy in chosen
    )


def peer_variant(text: str, mmap: bool) -> Variant:
    """`llama.cpp=FILE.gguf` as a variant. Raises OptionError for another peer or a file that is not there."""
    name, _, file = text.partition("=")
    if name != PEER or not file:
        raise OptionError("unknown peer", where="--vs", expected="llama.cpp=FILE.gguf", got=text)
    if not Path(file).is_file():
        raise OptionError("there is no such file", where="--vs", got=file)
    return Variant(f"{PEER} {'mmap' if mmap else 'in memory'}", PEER, file, mmap=mmap)


def random_sessions(
    prompt: int, decode: int, warmup: int, vocabulary: int, seed: int, *, preload: bool = False
) -> tuple[Session, ...]:
    """Cold, then warm, of seeded random ids, none of them shared; with `preload` a short warm-up instead of cold."""
    generator = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(vocabulary) for _ in range(count))

    first = Session(COLD, ids(prompt), ids(decode))
    warm = Session(WARM, ids(prompt), ids(warmup + decode), warmup)
    if preload:
        first = Session(WARM_UP, first.prompt[:64], first.decode[: max(1, warmup)])
    return first, warm


def given_sessions(file: Path, warmup: int, vocabulary: int, *, preload: bool = False) -> tuple[Session, ...]:
    """Sessions of the ids in a JSON file {prompt: [...], decode: [...]}; both sessions get the same ids.

    Raises OptionError where the file is not of that form or an id lies outside the vocabulary.
    """
    if not file.is_file():
        raise OptionError("there is no such file", where="--ids", got=str(file))
    try:
        plain = json.loads(file.read_text())
        prompt, decode = tuple(plain["prompt"]), tuple(plain["decode"])
        whole = all(isinstance(token, int) and 0 <= token < vocabulary for token in (*prompt, *decode))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            "holds no token ids", where=f"--ids {file}", expected='{"prompt": [...], "decode": [...]}', got=error
        ) from error
    if not whole or not prompt or len(decode) <= warmup:
        raise OptionError(
            "these ids cannot be run",
            where=f"--ids {file}",
            expected=f"whole numbers below {vocabulary}; a prompt; more decode ids than --warmup {warmup}",
            got=f"{len(prompt)} prompt and {len(decode)} decode ids",
        )
    first = Session(COLD, prompt, decode[warmup:])
    if preload:
        first = Session(WARM_UP, prompt[:64], decode[: max(1, warmup)])
    return first, Session(WARM, prompt, decode, warmup)
