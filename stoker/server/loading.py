"""Loads a model for the registry: the model itself, its prefix cache, its engine thread.

The one file of the server that knows how these three are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.generate.batcher import Batcher
from stoker.generate.model import load
from stoker.generate.prefix import open_prefix_cache
from stoker.generate.probe import probe_of
from stoker.server.registry import Loader, Spec
from stoker.server.service import Service
from stoker.server.settings import Settings


@dataclass(frozen=True)
class Batching:
    """parallel: answers at one time; queue: requests that wait behind them; directory, size_bytes: of the prefix cache
    on disk, all models together (None: in memory alone)."""

    parallel: int = 4
    queue: int = 64
    directory: Path | None = None
    size_bytes: int = 8 << 30


def model_options(options: Mapping[str, Any], batching: Batching) -> dict[str, Any]:
    """options: of `generate.model.load`. What is loaded for a server has room for several sequences and prefixes."""
    return {**options, "parallel": batching.parallel, "prefix_ram": None, "grammars": True}


def loader(settings: Settings, options: Mapping[str, Any], batching: Batching) -> Loader:
    """How a registry loads: `options` are those of `generate.model.load`."""

    def load_service(spec: Spec, memory_bytes: int, process_bytes: int | None) -> Service:
        more = model_options(options, batching) | {"process_bytes": process_bytes}
        model, prefix = load(spec.path, memory=memory_bytes, **more), None
        try:
            prefix = open_prefix_cache(model.runtime, directory=batching.directory, size_bytes=batching.size_bytes)
            batcher = Batcher(
                model, parallel=batching.parallel, queue=batching.queue, prefix=prefix, probe=probe_of(model)
            )
        except BaseException:
            if prefix is not None:
                prefix.close()
            model.close()
            raise
        return Service(spec.name, model, batcher, settings, prefix)

    return load_service
