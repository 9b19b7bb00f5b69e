"""The testbed's corpus in the tokens of the store that is studied, cached beside the runs.

corpus: models/testbed/corpus/DOMAIN.SPLIT.jsonl, see recipes/testbed/corpus.py
"""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recipes.testbed.corpus import CORPUS, read
from recipes.testbed.sources import DOMAINS
from stoker.train.data import Windows

TRAIN_TOKENS = 150_000  # of each domain: more than the longest stage sees
TEST_TOKENS = 30_000


def streams(tokenizer: Any, split: str, directory: Path, corpus: Path = CORPUS) -> dict[str, np.ndarray]:
    """uint16 ids by domain; documents end with the end token."""
    wanted = TRAIN_TOKENS if split == "train" else TEST_TOKENS
    return {domain: _stream(tokenizer, domain, split, wanted, directory, corpus) for domain in DOMAINS}


def _stream(tokenizer: Any, domain: str, split: str, wanted: int, directory: Path, corpus: Path) -> np.ndarray:
    file = directory / f"{domain}.{split}.npy"
    if not file.exists():
        texts, ids = iter(read(domain, split, corpus)), []
        while len(ids) < wanted and (some := list(islice(texts, 64))):
            for one in tokenizer(some, add_special_tokens=False)["input_ids"]:
                ids += [*one, tokenizer.eos_token_id]
        directory.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial.npy")
        np.save(partial, np.array(ids[:wanted], dtype=np.uint16))
        partial.rename(file)
    return np.load(file, mmap_mode="r")


def test_windows(found: dict[str, np.ndarray], width: int, each: int) -> Windows:
    """The same number of evenly spaced windows of every domain, in the order of DOMAINS."""
    parts = []
    for domain in DOMAINS:
        starts = np.arange(0, len(found[domain]) - width + 1, width)
        for low in starts[np.linspace(0, len(starts) - 1, min(each, len(starts))).astype(int)]:
            parts.append(found[domain][low : low + width])
    return Windows(parts, width, 0)
