"""Writes a training checkpoint as a committed model: bf16 safetensors, config, tokenizer, record of its training.

    python -m recipes.testbed.export e32k4 [--directory recipes/testbed/e32k4]

training.json says how far training went: tokens seen, tokens planned, seed, data hashes, the loss curve thinned.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from recipes.testbed.model import SHAPES, build
from recipes.testbed.tokenizer import DIRECTORY, END_ID

HERE = Path(__file__).parent
CURVE_POINTS = 150


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a testbed checkpoint.")
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--source", type=Path, help="default: models/testbed/MODEL")
    parser.add_argument("--directory", type=Path, help="default: recipes/testbed/MODEL")
    options = parser.parse_args()
    source = options.source or DIRECTORY / options.model
    export(options.model, source, options.directory or HERE / options.model)


def export(name: str, source: Path, directory: Path) -> None:
    state = torch.load(source / "checkpoint.pt", weights_only=True)
    model = build(name, state["plan"]["seed"])
    model.load_state_dict(state["model"])
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    GenerationConfig(eos_token_id=END_ID, do_sample=False).save_pretrained(directory)
    for file in (DIRECTORY / "tokenizer").iterdir():
        shutil.copy(file, directory / file.name)
    weights = directory / "model.safetensors"
    record = {
        "tokens_seen": state["step"] * state["plan"]["step_tokens"],
        "plan": state["plan"],
        "token_files_sha256": state["data"],
        "corpus_sha256": hashlib.sha256((HERE / "corpus.json").read_bytes()).hexdigest(),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "curve": curve(source / "metrics.jsonl", state["step"]),
    }
    (directory / "training.json").write_text(json.dumps(record, indent=None, separators=(",", ": ")) + "\n")


def curve(metrics: Path, last_step: int) -> list[dict]:
    """At most CURVE_POINTS evenly spaced lines, and every line with a validation loss."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if line["step"] <= last_step]
    every = max(1, len(lines) // CURVE_POINTS)
    wanted = ("step", "tokens", "loss", "balance", "least_load", "rate", "valid_loss")
    return [
        {name: line[name] for name in wanted if name in line}
        for place, line in enumerate(lines)
        if place % every == 0 or "valid_loss" in line
    ]


if __name__ == "__main__":
    main()
