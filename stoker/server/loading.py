"""Loads a model for the registry: the model itself, its prefix cache, its engine thread.

The one file of the server that knows how these three are made.
"""

from collections.abc import Mapping
from typing import Any

from stoker.generate.batcher import Batcher
from stoker.generate.model import load
from stoker.server.registry import Loader, Spec
from stoker.server.service import Service
from stoker.server.settings import Settings


def loader(
    settings: Settings, options: Mapping[str, Any], cache: Mapping[str, Any], parallel: int, queue: int
) -> Loader:
    """options: of `generate.model.load`; cache: directory and size of the prefix cache."""

    def load_service(spec: Spec, memory_bytes: int) -> Service:
        model = load(spec.path, memory=memory_bytes, **options)
        try:
            batcher = Batcher(model, parallel=parallel, queue=queue)
        except BaseException:
            model.close()
            raise
        return Service(spec.name, model, batcher, settings)

    return load_service
