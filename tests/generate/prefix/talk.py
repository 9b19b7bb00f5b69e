"""A model and its prefix cache as an engine uses them, with a way to begin again and a fresh computation to compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from stoker.generate.prefix import PrefixCache, open_prefix_cache
from stoker.runtime.model import Options, Runtime, load
from tests.runtime.tiny import VOCABULARY

PAGED = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe")
ROWS = ("deepseek_v3",)  # transformers' cache, can be cut anywhere
STATES = ("qwen3_5_moe", "lfm2_moe", "gpt_oss")
MIB = 1 << 20


def some_ids(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


class Talk:
    """One server process: `answer` does what an engine does with a prompt."""

    def __init__(
        self,
        store: Path,
        directory: Path | None = None,
        *,
        ctx_size: int = 1024,
        size_bytes: int = 64 * MIB,
        ram_bytes: int = 8 * MIB,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime or load(store, Options(memory="8GiB", ctx_size=ctx_size, prefix_ram=ram_bytes))
        self.directory, self.size_bytes = directory, size_bytes
        self.cache = self._open()

    def _open(self) -> PrefixCache:
        cache = open_prefix_cache(self.runtime, directory=self.directory, size_bytes=self.size_bytes)
        assert cache is not None
        return cache

    def reopen(self) -> None:
        """What a restart does to the cache: everything in memory is gone, files are read again."""
        self.cache.close()
        self.cache = self._open()

    def answer(self, prompt: Sequence[int], decoded: Sequence[int] = ()) -> tuple[int, Tensor]:
        """(tokens that were cached, logits after the prompt); `decoded` is answered, then everything is kept."""
        sequence = self.runtime.new_sequence()
        try:
            cached = done = self.cache.match(sequence, prompt)
            assert cached < len(prompt) and sequence.ids == list(prompt[:cached])
            logits = self.runtime.prefill(sequence, prompt[done : (pause := self.cache.pause(done, len(prompt)))])
            while pause < len(prompt):
                self.cache.keep(sequence)
                done, pause = pause, self.cache.pause(pause, len(prompt))
                logits = self.runtime.prefill(sequence, prompt[done:pause])
            found = logits.clone()
            for token in decoded:
                self.runtime.decode([sequence], [token])
            self.cache.keep(sequence)
        finally:
            sequence.close()
        return cached, found

    def fresh(self, *parts: Sequence[int]) -> Tensor:
        """Logits after the parts, each computed as one piece, without any cache."""
        sequence: Any = self.runtime.new_sequence()
        try:
            for part in parts:
                logits = self.runtime.prefill(sequence, part)
            return logits.clone()
        finally:
            sequence.close()

    def close(self) -> None:
        self.cache.close()
        self.runtime.close()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
