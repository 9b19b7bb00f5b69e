"""Opens what others publish: a directory of safetensors with a config, one file or many.

Owns finding the files and checking that they fit together (headers only). Reads no weights and knows no architecture.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.safetensors_file import TensorEntry, read_header
from stoker.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tiktoken.model",
    "LICENSE",
)


@dataclass(frozen=True)
class Checkpoint:
    """A published model: its config as it is, and every tensor of every file by name."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the decoder: nested in models that also see."""
        return self.config.get("text_config", self.config)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def newest_ns(self) -> int:
        """When the youngest weight file was changed; a resumed pack must see the same."""
        return max(file.stat().st_mtime_ns for file in {entry.file for entry in self.tensors.values()})

    def fingerprint(self) -> str:
        """sha256 over the config and every header entry (names, dtypes, shapes): which model, not which bytes."""
        entries = sorted((e.name, e.dtype, e.shape, e.file.name) for e in self.tensors.values())
        return hashlib.sha256(json.dumps([self.config, entries], sort_keys=True).encode()).hexdigest()

    def side_files(self) -> dict[str, bytes]:
        """Config, tokenizer and chat templates, as they are."""
        found = {name: self.path / name for name in SIDE_FILES}
        found |= {f"additional_chat_templates/{p.name}": p for p in self.path.glob("additional_chat_templates/*.jinja")}
        return {name: file.read_bytes() for name, file in found.items() if file.is_file()}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint directory. Raises CheckpointError for anything missing, cut short, mismatched or foreign."""
    directory = Path(path)
    if not directory.exists():
        raise CheckpointError("no such file or directory", where=str(directory))
    if not directory.is_dir():
        raise CheckpointError(
            "not a checkpoint directory", where=str(directory), expected="a directory with config.json and safetensors"
        )
    config = _read_json(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError("the config names no model_type", where=str(directory / "config.json"))
    tensors: dict[str, TensorEntry] = {}
    for file, wanted in _files(directory).items():
        if not file.exists():
            raise CheckpointError(
                "the index names a file that is not here",
                where=str(directory / INDEX),
                expected=file.name,
                remedy="finish the download, or copy the missing shard",
            )
        tensors.update(_check_shard(file, read_header(file), wanted, tensors))
    if not tensors:
        raise CheckpointError("the checkpoint holds no tensors", where=str(directory))
    return Checkpoint(directory, config, tensors)


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """Every weight file, with the tensors that the index expects in it (None: no index)."""
    if (directory / INDEX).exists():
        weight_map = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError("the index has no usable weight_map", where=str(directory / INDEX))
        files: dict[Path, set[str] | None] = {}
        for tensor, name in weight_map.items():
            wanted = files.setdefault(directory / name, set())
            assert wanted is not None
            wanted.add(tensor)
        return files
    if (directory / SINGLE).exists():
        return {directory / SINGLE: None}
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        others = [p.name for p in directory.iterdir() if p.suffix in (".bin", ".gguf", ".pt", ".pth")]
        raise CheckpointError(
            "no safetensors files here",
            where=str(directory),
            expected=f"{SINGLE} or {INDEX}",
            got=", ".join(sorted(others)[:3]) or "none",
            remedy="save the model as safetensors first" if others else None,
        )
    _check_complete(directory, shards)
    return {shard: None for shard in shards}


def _check_complete(directory: Path, shards: list[Path]) -> None:
    """Without an index, names like model-00002-of-00005 still say how many files there should be."""
    for shard in shards:
        match = re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", shard.name)
        if match is None:
            continue
        stem, width, total = match[1], len(match[2]), int(match[3])
        for i in range(1, total + 1):
            name = f"{stem}-{i:0{width}d}-of-{match[3]}.safetensors"
            if not (directory / name).exists():
                raise CheckpointError("a shard is missing", where=str(directory), expected=name)


def _check_shard(
    file: Path, found: dict[str, TensorEntry], wanted: set[str] | None, seen: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    if wanted is not None and wanted - found.keys():
        missing = sorted(wanted - found.keys())
        raise CheckpointError(
            f"the file lacks {len(missing)} of the tensors that the index expects in it",
            where=str(file),
            expected=missing[0],
            got=f"{len(found)} other tensors" if found else "no tensors",
            remedy="two shards may have been swapped, or come from different downloads: fetch them again",
        )
    for name in found.keys() & seen.keys():
        raise CheckpointError(f"tensor {name} is in two files", where=str(file), got=str(seen[name].file))
    return found


def _read_json(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise CheckpointError("the file is missing", where=str(file)) from problem
    except OSError as problem:
        raise CheckpointError("cannot read the file", where=str(file), got=problem.strerror) from problem
    except ValueError as problem:
        raise CheckpointError("the file is not valid JSON", where=str(file), got=str(problem)) from problem
    if not isinstance(body, dict):
        raise CheckpointError("the file is not a JSON object", where=str(file), got=type(body).__name__)
    return body
