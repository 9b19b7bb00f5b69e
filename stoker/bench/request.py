"""From what a user asks of `stoker bench` to a plan that can run. Everything is checked here, before weights are read.

Knows stores by their headers alone.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.bench.cases import (
    Plan,
    Session,
    Variant,
    given_sessions,
    peer_variant,
    random_sessions,
    stoker_variants,
)
from stoker.errors import OptionError, StoreError, TraceError

DEFAULT_CTX_TOKENS = 4096


@dataclass(frozen=True)
class Request:
    """The options of the command, as given. Counts in tokens; None: the default."""

    model: str
    memory: str = "auto"
    path: str = "auto"
    policy: str = "lru"
    threads: int | None = None
    ctx_size: int | None = None
    depth: int | None = None  # None: measured on the store at load
    prefetch: int | None = None  # None: the runtime's own default
    buffered: bool = False
    prompt: int = 256
    decode: int = 64
    warmup: int = 8
    repeats: int = 3
    seed: int = 0
    ids: Path | None = None
    preload: bool = False
    routes: Path | None = None
    route_weights: str = "own"
    routing: str | None = None
    adapter: str | None = None
    vs_paths: tuple[str, ...] = ()
    vs_policies: tuple[str, ...] = ()
    peer: str | None = None
    peer_python: str | None = None
    peer_in_memory: bool = False
    read_ahead_kib: int | None = None
    trace: Path | None = None
    given: tuple[str, ...] = field(default=())  # flags that the user wrote, to refuse those without effect


def build(request: Request) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what the result says about it. Raises StoreError, OptionError, TraceError or BudgetError."""
    from stoker.runtime import budget

    _refuse_without_effect(request)
    store_config, about = _store(request)
    threads = request.threads or budget.default_threads()
    limit = budget.resolve(request.memory)
    sessions = _sessions(request, int(store_config["vocab_size"]))
    ctx_size = _ctx_size(request, sessions, store_config.get("max_position_embeddings"))
    _check_routes(request, about, sessions)
    base = {
        "memory": request.memory,
        "path": request.path,
        "policy": request.policy,
        "threads": threads,
        "ctx_size": ctx_size,
        "depth": request.depth,
        "direct": not request.buffered,
    }
    given = (("prefetch", request.prefetch), ("routing", request.routing), ("adapter", request.adapter))
    base |= {name: value for name, value in given if value is not None}
    variants: tuple[Variant, ...] = stoker_variants(request.model, base, request.vs_paths, request.vs_policies)
    _check_names(request, variants)
    if request.peer is not None:
        variants += (peer_variant(request.peer, mmap=not request.peer_in_memory),)
    plan = Plan(
        variants=variants,
        sessions=sessions,
        repeats=request.repeats,
        threads=threads,
        ctx_size=ctx_size,
        separate=request.peer is not None,
        limit_bytes=None if request.memory.strip().lower() == "auto" else limit,
        peer_python=request.peer_python,
        preload=request.preload,
        routes=None if request.routes is None else str(request.routes),
        route_weights=request.route_weights,
        trace=request.trace,
    )
    shown = {name: value for name, value in asdict(request).items() if name not in ("given", "model")}
    options = {**{k: str(v) if isinstance(v, Path) else v for k, v in shown.items()}, "threads": threads}
    return plan, {"model": about, "options": {**options, "ctx_size": ctx_size}}


def _store(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """The text part of the store's configuration, and the store in figures."""
    from stoker.store.describe import top_k_of
    from stoker.store.reader import open_store

    if not Path(request.model).exists():
        raise StoreError("there is no such store", where=request.model, remedy="make one with `stoker pack SRC DST`")
    store = open_store(request.model)
    config = store.config.get("text_config", store.config)
    about = {
        "path": request.model,
        "fingerprint": store.fingerprint,
        "model_type": store.config.get("model_type"),
        "moe_layers": sum(len(pool.layers) for pool in store.pools),
        "experts": max(pool.experts for pool in store.pools),
        "top_k": top_k_of(store.config),
        "record_bytes": max(pool.layout.record_bytes for pool in store.pools),
        "dense_bytes": store.dense_bytes,
        "expert_bytes": store.expert_bytes,
    }
    return config, about


def _sessions(request: Request, vocabulary: int) -> tuple[Session, ...]:
    if request.ids is not None:
        return given_sessions(request.ids, request.warmup, vocabulary, preload=request.preload)
    counts = (request.prompt, request.decode, request.warmup)
    return random_sessions(*counts, vocabulary, request.seed, preload=request.preload)


def _ctx_size(request: Request, sessions: tuple[Session, ...], longest: int | None) -> int:
    """As given, else what `stoker run` holds and no less than the sessions need."""
    needed = max(session.tokens for session in sessions)
    size = request.ctx_size or max(needed, min(DEFAULT_CTX_TOKENS, longest or DEFAULT_CTX_TOKENS))
    if needed > size or (longest and size > longest):
        raise OptionError(
            "the sessions do not fit the context",
            where="--ctx-size",
            expected=f"{needed} tokens or more" + (f", at most {longest}" if longest else ""),
            got=size,
            remedy="give fewer --prompt and --decode tokens",
        )
    return size


def _check_routes(request: Request, about: dict[str, Any], sessions: tuple[Session, ...]) -> None:
    if request.routes is None:
        return
    from stoker.routing.replay import RouteReplay

    weights: Any = request.route_weights
    replay = RouteReplay.open(request.routes, weights=weights)
    replay.check_shape(about["moe_layers"], about["experts"], about["top_k"])
    about["routes"] = {
        "file": str(request.routes),
        "tokens": replay.tokens,
        "repeated": max(1.0, max(session.tokens for session in sessions) / replay.tokens),
        "weights": replay.weights,
        "look_ahead_recall": replay.look_ahead_recall,
    }


def _check_names(request: Request, variants: tuple[Variant, ...]) -> None:
    """Paths, policies and routing are refused by name before the first variant runs, not when their turn comes."""
    from stoker.residency.policies import make_policy
    from stoker.runtime.modes import MODES
    from stoker.runtime.plan import Options

    if request.routing is not None and request.routing not in MODES:
        raise OptionError("unknown routing mode", where="--routing", expected=", ".join(MODES), got=request.routing)
    for variant in variants:
        try:
            Options(**variant.options)
        except OptionError as error:
            if variant.options["path"] in request.vs_paths and variant.options["path"] != request.path:
                raise OptionError(
                    error.what, where="--vs-path", expected=error.expected, got=error.got, remedy=error.remedy
                ) from error
            raise
        if variant.options["policy"] != "static":
            make_policy(variant.options["policy"], 8)


def _refuse_without_effect(request: Request) -> None:
    """Raises OptionError for an option that was given and would do nothing, or that contradicts another."""
    given = set(request.given)
    clashes = [
        (
            request.routes and (request.routing or request.adapter),
            "--routes",
            "recorded routes leave no other a say",
            "drop --routes, or --routing and --adapter",
        ),
        (request.peer and request.routes, "--routes", "the peer chooses its own experts", "drop --vs or --routes"),
        (
            request.peer and peer_variant(request.peer, mmap=True) and not request.peer_python,
            "--vs",
            "the peer needs an interpreter",
            "give --llama-python PY",
        ),
        (not request.peer and request.peer_python, "--llama-python", "has no effect without --vs", "add --vs"),
        (not request.peer and request.peer_in_memory, "--no-mmap", "has no effect without --vs", "add --vs"),
        (
            not request.routes and "route_weights" in given,
            "--route-weights",
            "has no effect without --routes",
            "add --routes TRACE",
        ),
        (
            request.read_ahead_kib is not None and not request.peer and not request.buffered,
            "--read-ahead",
            "has no effect on direct reads",
            "add --vs or --buffered",
        ),
        (request.ids and {"prompt", "decode", "seed"} & given, "--ids", "the ids say how many there are", ""),
        (
            request.trace and (request.peer or request.vs_paths or request.vs_policies),
            "--trace",
            "records one variant",
            "drop the --vs options",
        ),
    ]
    for wrong, where, what, remedy in clashes:
        if wrong:
            raise OptionError(what, where=where, remedy=remedy or "drop one of the two")
    if request.peer_python and shutil.which(request.peer_python) is None:
        raise OptionError("there is no such interpreter", where="--llama-python", got=request.peer_python)
    if request.trace is not None:
        from stoker.trace.writer import check_new

        try:
            check_new(request.trace)
        except TraceError as error:
            raise OptionError(error.what, where=f"--trace {error.where}", got=error.got, remedy=error.remedy) from None
