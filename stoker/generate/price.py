"""What a store would need in memory, told before it is loaded: for a server that shares one budget among models.

Draws up the same ledger as loading does; reads headers and configuration, no weight.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.runtime.ledger import RESERVE_BYTES

# More memory than any machine has: the ledger then gives a model all that it can use.
_PLENTY_BYTES = 1 << 50
_HEADER_BYTES = 8 << 10  # of a prefix cache's file
# How much of a model's reserve may go to what the process has grown by since it started.
GROWTH_BYTES = RESERVE_BYTES // 2


@dataclass(frozen=True)
class Price:
    """Bytes beside what the process holds already. floor: the least that works; full: all experts in memory.

    ctx_tokens: the context that this is for. block_bytes: the smallest file of a prefix cache on disk.
    """

    floor_bytes: int
    full_bytes: int
    ctx_tokens: int
    block_bytes: int = 0


def price(model: str | Path, *, ctx_size: int | None = None, **more: Any) -> Price:
    """Raises StoreError for a bad store, OptionError for a bad option. Takes a second: the skeleton is built."""
    from stoker.generate.model import context_tokens
    from stoker.generate.prefix.tree import BLOCK_TOKENS
    from stoker.runtime.fuse import kv_shape
    from stoker.runtime.model import open_store
    from stoker.runtime.modes import resolve_mode
    from stoker.runtime.plan import Options, plan_run
    from stoker.runtime.sequence import cache_token_bytes
    from stoker.runtime.skeleton import build_skeleton

    options = Options(memory=_PLENTY_BYTES, ctx_size=context_tokens(Path(model), ctx_size), **more)
    store = open_store(Path(model))
    skeleton = build_skeleton(store.path)
    shape = kv_shape(skeleton) if options.fuse else None
    ledger = plan_run(store, skeleton, options, _PLENTY_BYTES, shape, resolve_mode(store, options).nbytes).ledger
    full = ledger.budget_bytes - ledger.free_bytes - ledger.process_bytes
    rows = shape.token_bytes if shape is not None else cache_token_bytes(skeleton.config.get_text_config())
    block = BLOCK_TOKENS * rows + _HEADER_BYTES
    return Price(ledger.floor_bytes - ledger.process_bytes, full, ledger.ctx_tokens, block)
