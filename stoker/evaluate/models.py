"""The models that are compared: a store, with or without a routing mode, and a published checkpoint as it is.

Each gives the logits and routes of a window's scored rows. How a mode is fed (`Feed`) is decided here, once.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.errors import CheckpointError, OptionError, StokerError
from stoker.evaluate.routes import LayerRoutes, RouteMeter
from stoker.evaluate.text import Window
from stoker.runtime.skeleton import load_config

Feed = Literal["prompt", "answer", "token by token"]
FLOAT32_BYTES = 4
ROOM = 0.6  # of the free memory, for a reference model that is held whole


@dataclass(frozen=True)
class Scored:
    """Rows first .. T - 2 of a window of T tokens, each scored on the token after it: logits float32 [N, V], routes of
    the same rows by MoE layer, none where they were not asked for."""

    logits_NV: Tensor
    routes: list[LayerRoutes]


class Scorer(Protocol):
    """A model that can be measured. about(): what results say of it, as plain data."""

    def score(self, window: Window, first: int) -> Scored: ...

    def about(self) -> dict[str, Any]: ...


class StoreScorer:
    """A loaded store. feed: how a window's tokens reach it.

    "prompt": all at once, as a prompt does. "answer": the first `prompt_tokens` as prompt, the others at once but
    treated as an answer, which is the same as one by one for a mode that does not ask what is in memory. "token by
    token": the first as prompt, the others by decode steps. gate: the model's own routes, whatever mode is loaded.
    """

    def __init__(
        self, runtime: Any, *, feed: Feed = "prompt", prompt_tokens: int = 0, gate: bool = False, routes: bool = True
    ) -> None:
        self.runtime, self.feed, self.prompt_tokens, self.gate = runtime, feed, prompt_tokens, gate
        self.meter = _meter(runtime.model) if routes else None

    def score(self, window: Window, first: int) -> Scored:
        ids = window.ids[:-1]
        with _recording(self.meter):
            logits_NV = self._decoded(ids) if self.feed == "token by token" else self._whole(ids)
        return Scored(logits_NV[-(len(ids) - first) :], _taken(self.meter, first))

    def _whole(self, ids: tuple[int, ...]) -> Tensor:
        prompt = self.prompt_tokens if self.feed == "answer" else None
        logits_TV: Tensor = self.runtime.logits(torch.tensor([ids]), prompt_tokens=prompt, gate=self.gate)[0]
        return logits_TV

    def _decoded(self, ids: tuple[int, ...]) -> Tensor:
        """Logits of all rows from the prompt's last on."""
        sequence = self.runtime.new_sequence(gate=self.gate)
        sequence.prompt_tokens = self.prompt_tokens
        try:
            rows = [self.runtime.prefill(sequence, ids[: self.prompt_tokens])[None]]
            rows += [self.runtime.decode([sequence], [token]) for token in ids[self.prompt_tokens :]]
        finally:
            sequence.close()
        return torch.cat(rows)

    def about(self) -> dict[str, Any]:
        store = self.runtime.store
        mode = {"mode": "exact", "lossless": True} if self.gate else self.runtime.mode.about()
        return {"model": store.path.name, "kind": "store", "fingerprint": store.fingerprint, "routing": mode}


class CheckpointScorer:
    """A published checkpoint run by transformers, eager, in float32: what the weights say, without any of stoker's
    arithmetic. Where it does not fit, its layers are read from disk for each forward pass."""

    def __init__(self, directory: Path, *, memory_bytes: int | None = None, routes: bool = True) -> None:
        self.directory = directory
        self.model = _load(directory, memory_bytes)
        self.meter = _meter(self.model) if routes else None

    @torch.inference_mode()
    def score(self, window: Window, first: int) -> Scored:
        with _recording(self.meter):
            logits_TV = self.model(input_ids=torch.tensor([window.ids[:-1]]), use_cache=False).logits[0]
        return Scored(logits_TV[first:].float(), _taken(self.meter, first))

    def about(self) -> dict[str, Any]:
        return {"model": self.directory.name, "kind": "checkpoint", "arithmetic": "float32, transformers eager"}


def _meter(model: Any) -> RouteMeter | None:
    """None for a model whose routers follow no rule that is known: its quality is measured, its routes are not."""
    try:
        return RouteMeter(model)
    except OptionError:
        return None


def _recording(meter: RouteMeter | None) -> AbstractContextManager[None]:
    """Only while this model runs: another may share its modules."""
    return nullcontext() if meter is None else meter.recording()


def _taken(meter: RouteMeter | None, first: int) -> list[LayerRoutes]:
    return [] if meter is None else [layer.rows(first, len(layer.used_TK)) for layer in meter.take()]


def checkpoint_bytes(directory: Path) -> int:
    """What its weights take in float32, from the sizes of its files (published in 16 bits)."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) * FLOAT32_BYTES // 2


def _load(directory: Path, memory_bytes: int | None) -> Any:
    """The eager model: whole, or with what does not fit left on disk (needs accelerate).

    Raises CheckpointError for a directory without weights in safetensors.
    """
    load_config(directory)
    needed = checkpoint_bytes(directory)
    if not needed:
        raise CheckpointError("no weights to compare with", where=str(directory), expected="*.safetensors")
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager", "local_files_only": True}
    limit = memory_bytes or int(psutil.virtual_memory().available * ROOM)
    if needed > limit:
        options |= _on_disk(directory, limit)
    model = AutoModelForCausalLM.from_pretrained(str(directory), **options).eval()
    if "offload_folder" in options:
        weakref.finalize(model, shutil.rmtree, options["offload_folder"], ignore_errors=True)
    return model


def _on_disk(directory: Path, limit: int) -> dict[str, Any]:
    """Options that leave on disk, as float32 in a folder of their own, what exceeds `limit` bytes."""
    if find_spec("accelerate") is None:
        raise StokerError(
            "the reference model does not fit into memory",
            where=f"--reference {directory}",
            expected=f"at most {limit / 2**30:.1f} GiB in float32",
            got=f"{checkpoint_bytes(directory) / 2**30:.1f} GiB",
            remedy="install the eval extra (pip install 'stoker[eval]'), or give a store packed with --bits 16",
        )
    folder = tempfile.mkdtemp(prefix="stoker-reference-")
    return {"device_map": "auto", "max_memory": {"cpu": limit}, "offload_folder": folder}
