"""The prefix cache: what earlier prompts and answers computed, kept in memory and on disk, taken up by later ones.

Another thing than expert streaming: this keeps keys, values and states of tokens; that moves weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import OptionError
from stoker.generate.prefix.cache import PrefixCache
from stoker.generate.prefix.disk import borrow, largest_file_bytes

__all__ = ["PrefixCache", "check_size", "open_prefix_cache", "why_not"]

DEFAULT_SIZE_BYTES = 8 << 30


def why_not(runtime: Any) -> str | None:
    """Why prefixes of this model cannot be kept, or None."""
    from stoker.runtime import snapshot

    rule = getattr(runtime, "rule", None)
    if rule is not None and rule.recompute_tokens is None:
        return f"routing {rule.name} depends on every token of a prompt"
    if runtime.kv is not None:
        return None
    kind = snapshot.unsupported(runtime.config)
    if kind is not None:
        return f"the model's cache has a kind of layer that is not known here: {kind}"
    if not runtime.budget.prefix_bytes:
        return "this model has no paged KV, and its budget has no memory for kept prefixes"
    return None


def check_size(size_bytes: int, block_bytes: int, model: str) -> None:
    """Raises OptionError where a directory of `size_bytes` could not hold one block of `model`."""
    if block_bytes > largest_file_bytes(size_bytes):
        least, block = _kib(2 * block_bytes), _kib(block_bytes)
        raise OptionError(
            "not one block of this model would be kept", where=f"--prefix-cache-size, for {model}",
            expected=f"at least {least}: a file takes half of it at most, and a block {block}",
            got=_kib(size_bytes), remedy="give more, or leave --prefix-cache away",
        )  # fmt: skip


def _kib(nbytes: int) -> str:
    return f"{-(-nbytes // 1024)}KiB"


def open_prefix_cache(
    runtime: Any, *, directory: Path | None = None, size_bytes: int = DEFAULT_SIZE_BYTES
) -> PrefixCache | None:
    """The prefix cache of a loaded model, or None where `why_not` has a reason.

    In memory it takes what is free of the KV pool, or, for models without one, what the ledger has under `prefix`.
    directory: keep blocks on disk too, at most `size_bytes` over all models that share it; they outlive the process.
    Raises OptionError where the directory cannot be used or another process uses it.
    """
    from stoker.generate.prefix.fingerprint import fingerprint_of
    from stoker.generate.prefix.places import PagedPlaces, Places, TensorPlaces
    from stoker.runtime import snapshot

    if why_not(runtime) is not None:
        return None
    places: Places
    if runtime.kv is not None:
        places = PagedPlaces(runtime.kv)
    else:
        places = TensorPlaces(snapshot.has_state(runtime.config), runtime.budget.prefix_bytes)
    disk = None if directory is None else borrow(directory, size_bytes)
    cache = PrefixCache(places, fingerprint_of(runtime), disk)
    if runtime.kv is not None:
        runtime.kv.keeper = cache
    return cache
