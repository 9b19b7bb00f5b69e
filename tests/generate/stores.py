"""Small real stores: a random checkpoint with a trained tokenizer, packed by `stoker pack`."""

from pathlib import Path

from typer.testing import CliRunner

from stoker.cli.main import build_app
from tests.generate.eager_runtime import random_model
from tests.generate.tokenizers_ import byte_level


def write_checkpoint(directory: Path, *, chat_template: bool = True) -> Path:
    """Qwen3-MoE in bf16: 2 layers, 8 experts, 2 chosen, 512 tokens of vocabulary and of context."""
    tokenizer = byte_level() if chat_template else byte_level(chat_template=None)
    random_model(512, seed=3).bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def pack(checkpoint: Path, store: Path, *options: object) -> Path:
    done = CliRunner().invoke(build_app(), ["pack", str(checkpoint), str(store), *map(str, options)])
    assert done.exit_code == 0, done.output
    return store
