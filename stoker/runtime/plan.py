"""What a store needs in memory under given options, and how the budget is divided: everything decided before loading.

Reads configuration, manifest and the process's own size; loads no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
from transformers import PreTrainedModel

from stoker.errors import OptionError, StokerError
from stoker.runtime import dense
from stoker.runtime.experts import Path
from stoker.runtime.kv import KVShape
from stoker.runtime.ledger import Ledger, Needs, PoolNeed, floor_bytes, plan_memory, with_slots
from stoker.runtime.sequence import cache_state_bytes, cache_token_bytes
from stoker.store.reader import Store

PATHS = ("auto", "exact", "staged", "hot", "whole_layer")
CHUNKS = (2048, 1024, 512, 256, 128, 64, 32)
SCRATCH_SHARE = 0.05
SCRATCH_FLOOR = 48 << 20
GRAMMAR_TOKEN_BYTES = 736  # measured: 31 MiB for 49k tokens, 106 MiB for 151k
STATES_BYTES = 64 << 20  # room for a few recurrent states beside a context's keys and values
PREFIX_SHARE = 0.1


@dataclass(frozen=True)
class Options:
    """How to run a store; resolved once. `memory` is bytes or text such as "3GiB" or "auto"."""

    memory: str | int = "auto"
    path: Path = "auto"
    policy: str = "lru"
    threads: int | None = None
    ctx_size: int = 4096  # tokens of the longest sequence
    kv_tokens: int | None = None  # tokens over all sequences; None: ctx_size
    parallel: int = 1  # sequences at once; prices the states that hybrid models keep for each
    prefill_chunk: int | None = None
    depth: int | None = None  # reads in flight; None: measured on the store
    io_backend: str = "auto"
    direct: bool = True
    fuse: bool = True
    activation_bits: int = 16  # how finely kernels round their inputs; 8 is up to 1.5 times faster at prefill
    prefetch: int = 3  # reads ahead for the next layer while a token's misses are awaited; 0: none
    populate: bool = True  # a thread touches the slots from load on: a faster first prompt
    slots: tuple[int, ...] | None = None  # per pool; None: the ledger splits evenly
    process_bytes: int | None = None  # what the process is priced at beside the model; None: measured
    grammars: bool = False  # room for a tokenizer's vocabulary in the form that grammars need: servers want it
    routing: str | None = None  # who chooses experts: see runtime/modes.py; None: the gate, or an adapter's heads
    adapter: str | None = None  # a directory: docs/adapters.md
    roster_size: str | None = None  # of --routing roster, with pin_after, delta and shift: docs/routing.md
    pin_after: str | None = None
    delta: float | None = None
    shift: bool | None = None
    cache_lambda: float | None = None  # of --routing cache-aware, with keep_best and own_slots
    keep_best: int | None = None
    own_slots: int | None = None
    loras: tuple[tuple[str, str], ...] = ()  # (name, directory) of further LoRAs, for sequences that ask for them
    prefix_ram: int | None = 0  # bytes for kept prefixes of a model without paged KV; None: about one context's worth

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise OptionError("unknown path", where="--path", expected=", ".join(PATHS), got=self.path)
        if self.ctx_size < 1:
            raise OptionError("the context must hold a token", where="--ctx-size", got=self.ctx_size)
        if self.kv_tokens is not None and self.kv_tokens < self.ctx_size:
            raise OptionError(
                "the KV cache must hold the longest sequence",
                where="--kv-tokens",
                expected=f"at least --ctx-size {self.ctx_size}",
                got=self.kv_tokens,
            )
        if self.parallel < 1:
            raise OptionError("at least one sequence must run", where="--parallel", got=self.parallel)
        if self.prefetch < 0:
            raise OptionError("a number of reads cannot be negative", where="--prefetch", got=self.prefetch)
        if self.prefix_ram is not None and self.prefix_ram < 0:
            raise OptionError("a number of bytes cannot be negative", where="prefix_ram", got=self.prefix_ram)
        if self.activation_bits not in (8, 16):
            raise OptionError("activations are rounded to 8 or 16 bits", expected="8 or 16", got=self.activation_bits)


@dataclass(frozen=True)
class Plan:
    """The divided budget, the tokens of one prefill step, the paged cache's axes (None: transformers' own cache)."""

    ledger: Ledger
    prefill_chunk: int
    kv_shape: KVShape | None


def plan_run(
    store: Store, model: PreTrainedModel, options: Options, limit: int, shape: KVShape | None, adapter_bytes: int = 0
) -> Plan:
    """Divide `limit` bytes. Raises OptionError for a context past the model's, BudgetError for too small a budget."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest and options.ctx_size > longest:
        raise OptionError(
            "the context is longer than the model's",
            where="--ctx-size",
            expected=f"at most {longest}",
            got=options.ctx_size,
        )
    smallest = min(options.prefill_chunk or CHUNKS[-1], options.ctx_size)
    token_bytes = shape.token_bytes if shape else cache_token_bytes(config)
    kv_tokens = options.kv_tokens or options.ctx_size
    states_bytes = 0 if shape else cache_state_bytes(config) * options.parallel
    kv_bytes = shape.bytes_for(kv_tokens) if shape else token_bytes * kv_tokens + states_bytes
    needs = Needs(
        process_bytes=options.process_bytes or psutil.Process().memory_info().rss,
        dense_bytes=dense.quantised_bytes(store) + dense.plain_bytes(store),
        kv_bytes=kv_bytes,
        scratch_bytes=scratch_bytes(store, config, smallest),
        pools=tuple(PoolNeed(pool.experts, pool.layout.record_bytes, top_k(config)) for pool in store.pools),
        ctx_tokens=options.ctx_size,
        kv_token_bytes=token_bytes,
        kv_tokens=kv_tokens,
        states_bytes=states_bytes,
        prefix_bytes=_prefix_bytes(options, kv_bytes, limit, paged=shape is not None),
        adapter_bytes=adapter_bytes,
        grammar_bytes=GRAMMAR_TOKEN_BYTES * config.vocab_size if options.grammars else 0,
    )
    chunk, scratch = smallest, needs.scratch_bytes
    if options.prefill_chunk is None:
        room = limit - floor_bytes(needs) + scratch
        chunk, scratch = _chunk(store, config, limit, room, options.ctx_size)
    ledger = plan_memory(limit, needs, scratch_bytes=scratch)
    return Plan(ledger if options.slots is None else with_slots(ledger, options.slots, needs.pools), chunk, shape)


def _prefix_bytes(options: Options, kv_bytes: int, limit: int, *, paged: bool) -> int:
    if paged:
        return 0
    if options.prefix_ram is None:
        return min(kv_bytes + STATES_BYTES, int(PREFIX_SHARE * limit))
    return options.prefix_ram


def _chunk(store: Store, config: Any, limit: int, room: int, ctx_tokens: int) -> tuple[int, int]:
    """(tokens, scratch bytes) of the longest prefill step whose scratch fits `room` and does not eat the slots."""
    allowed = min(room, max(SCRATCH_SHARE * limit, SCRATCH_FLOOR))
    sizes = [(tokens, scratch_bytes(store, config, tokens)) for tokens in (min(c, ctx_tokens) for c in CHUNKS)]
    return next((size for size in sizes if size[1] <= allowed), sizes[-1])


def top_k(config: Any) -> int:
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    raise StokerError("the configuration does not say how many experts a token uses", got=config.model_type)


def scratch_bytes(store: Store, config: Any, tokens: int) -> int:
    """What one prefill chunk holds beside weights and cache: activations, (token, expert) pairs, logits."""
    width, chosen = config.hidden_size, top_k(config)
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    projected = config.num_attention_heads * head_dim + 2 * config.num_key_value_heads * head_dim
    expert_width = max(pool.layout.down.spec.cols for pool in store.pools)
    per_token = 4 * (8 * width + 3 * projected) + chosen * (4 * width + 9 * expert_width)
    return tokens * per_token + 3 * 4 * config.vocab_size
