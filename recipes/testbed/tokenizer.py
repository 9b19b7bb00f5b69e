"""The testbed's tokenizer: byte-level BPE of 4096 entries, learned on the training split, and the token files.

    python -m recipes.testbed.tokenizer [--corpus DIR] [--directory models/testbed]

Writes tokenizer/ (tokenizer.json, tokenizer_config.json, chat_template.jinja) and tokens/DOMAIN.SPLIT.npy (uint16,
documents end with <|endoftext|>). Any text can be encoded: the 256 bytes are in the vocabulary.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.testbed.corpus import CORPUS, SPLITS, read
from recipes.testbed.sources import DOMAINS

ENTRIES = 4096
END = "<|endoftext|>"
END_ID = 0
DIRECTORY = Path("models/testbed")
LEARN_BYTES = 5_000_000  # of each domain: plenty for 4096 entries
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 'A' if message['role'] == 'user' else 'B' }}: "
    "{{ message['content'] | trim }}\n{% endfor %}{% if add_generation_prompt %}B:{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the testbed's tokenizer and encode the corpus.")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    tokenizer = train(options.corpus)
    save(tokenizer, options.directory / "tokenizer")
    encode(tokenizer, options.corpus, options.directory / "tokens")


def train(corpus: Path = CORPUS) -> Tokenizer:
    """Learn the merges on the same number of bytes of every domain."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(corpus), trainer)
    return tokenizer


def sample(corpus: Path) -> Iterator[str]:
    for domain in DOMAINS:
        left = LEARN_BYTES
        for text in read(domain, "train", corpus):
            if left <= 0:
                break
            left -= len(text.encode())
            yield text


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """In the files that transformers' AutoTokenizer reads."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def encode(tokenizer: Tokenizer, corpus: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    for domain in DOMAINS:
        for split in SPLITS:
            ids = np.fromiter(stream(tokenizer, read(domain, split, corpus)), np.uint16)
            np.save(directory / f"{domain}.{split}.npy", ids)
            counts[f"{domain}.{split}"] = len(ids)
    print(json.dumps(counts, indent=1))


def stream(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[int]:
    while batch := list(islice(texts, 256)):
        for encoding in tokenizer.encode_batch(batch):
            yield from encoding.ids
            yield END_ID


if __name__ == "__main__":
    main()
