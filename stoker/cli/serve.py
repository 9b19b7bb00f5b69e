"""`stoker serve MODEL ...`: models behind HTTP, in one budget, until a signal ends it.

The port is taken before a model is loaded; results of thinking about memory are shown before the first request comes.
Everything about the run goes to stderr.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import common
from stoker.cli.common import note
from stoker.errors import OptionError, StoreError

if TYPE_CHECKING:
    from stoker.server.loading import Batching
    from stoker.server.registry import Registry, Spec
    from stoker.server.service import Service
    from stoker.server.settings import Settings

_SERVER = "Server"
_CACHE = "Prefix cache"
KEEP_ALIVE_MIN = 10.0

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Packed stores (see `stoker pack`).")]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=_SERVER)]
Port = Annotated[int, typer.Option("--port", "-p", help="0 takes a free one.", rich_help_panel=_SERVER)]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="KEY", envvar="STOKER_API_KEY", show_envvar=True, rich_help_panel=_SERVER,
        help="Demand this key from every request.",
    ),
]  # fmt: skip
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "--alias", metavar="NAME", rich_help_panel=_SERVER,
        help="Another name for the model; NAME=MODEL where there are several. May be repeated.",
    ),
]  # fmt: skip
Parallel = Annotated[
    int, typer.Option("--parallel", "-np", min=1, max=64, help="Answers at one time.", rich_help_panel=_SERVER)
]
Queue = Annotated[
    int, typer.Option(min=0, max=10_000, help="Requests that may wait; more get 429.", rich_help_panel=_SERVER)
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-tokens", min=64, rich_help_panel=common._LOADING,
        help="Tokens of KV cache that all answers and the prefix cache share (default: the context's length).",
    ),
]  # fmt: skip
KeepAlive = Annotated[
    float | None,
    typer.Option(
        "--keep-alive", metavar="MINUTES", min=0, rich_help_panel=_SERVER,
        help="Let go of a model after so long without a request (default: one model stays, several go after 10).",
    ),
]  # fmt: skip
Cors = Annotated[
    list[str] | None,
    typer.Option(
        "--cors", metavar="ORIGIN", rich_help_panel=_SERVER,
        help="Let scripts of this site use the server, such as http://localhost:3000; * for all. May be repeated.",
    ),
]  # fmt: skip
StrictModel = Annotated[
    bool,
    typer.Option(
        "--strict-model", rich_help_panel=_SERVER,
        help="Refuse unknown model names; else a server with one model answers to any name.",
    ),
]  # fmt: skip
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Log what is asked, in full.", rich_help_panel=_SERVER)]
PrefixCache = Annotated[
    Path | None,
    typer.Option("--prefix-cache", metavar="DIR", help="Keep prefixes on disk here too.", rich_help_panel=_CACHE),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora", metavar="NAME=DIR", rich_help_panel=common._ROUTING,
        help="A LoRA that a request may ask for, as model MODEL:NAME. May be repeated.",
    ),
]  # fmt: skip
PrefixCacheSize = Annotated[
    str | None,
    typer.Option(
        "--prefix-cache-size", metavar="SIZE", help="Most bytes on disk (default: 8GiB).", rich_help_panel=_CACHE
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    models: Models,
    memory: common.Memory = "auto",
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: ApiKey = None,
    alias: Alias = None,
    ctx_size: common.CtxSize = None,
    parallel: Parallel = 4,
    queue: Queue = 64,
    kv_tokens: KvTokens = None,
    prefix_cache: PrefixCache = None,
    prefix_cache_size: PrefixCacheSize = None,
    keep_alive: KeepAlive = None,
    cors: Cors = None,
    strict_model: StrictModel = False,
    log_prompts: LogPrompts = False,
    path: common.PathOption = "auto",
    policy: common.Policy = "auto",
    threads: common.Threads = None,
    activation_bits: common.ActivationBits = 16,
    routing: common.Routing = None,
    adapter: common.Adapter = None,
    roster_size: common.RosterSize = None,
    pin_after: common.PinAfter = None,
    delta: common.Delta = None,
    shift: common.ShiftOption = None,
    cache_lambda: common.CacheLambda = None,
    keep_best: common.KeepBest = None,
    own_slots: common.OwnSlots = None,
    lora: Lora = None,
    quality: common.Quality = None,
    trace: common.Trace = None,
    max_tokens: common.MaxTokens = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    repetition_penalty: common.RepetitionPenalty = None,
) -> None:
    """Serve models over HTTP: OpenAI and Anthropic APIs, live page, metrics.

    Sampling options are defaults: a request's own come first, the model's generation_config.json after.
    """
    from stoker.runtime.budget import parse_bytes, resolve
    from stoker.server import wire
    from stoker.server.memory import share_arenas
    from stoker.server.settings import Settings

    settings = Settings(
        host=host,
        port=port,
        api_key=api_key,
        cors=tuple(cors or ()),
        strict_model=strict_model,
        sampling=common.sampling_options(temperature, top_k, top_p, min_p, repetition_penalty, None),
        max_tokens=max_tokens,
        log_prompts=log_prompts,
    )
    if trace is not None and (len(models) > 1 or keep_alive is not None):
        what = "one trace holds one model from its start to its end"
        raise OptionError(what, where="--trace", remedy="serve one model, without --keep-alive")
    loras = named_loras(lora or [])
    if (adapter is not None or loras) and len(models) > 1:
        what = "an adapter belongs to one model"
        raise OptionError(what, where="--adapter, --lora", remedy="serve one model, or leave them out")
    if prefix_cache_size is not None and prefix_cache is None:
        what = "there is no directory to which it could apply"
        raise OptionError(what, where="--prefix-cache-size", remedy="give --prefix-cache DIR too")
    names = model_names(models, alias or [])
    for model in models:
        if not Path(model).exists():
            raise StoreError("there is no such store", where=model, remedy="make one with `stoker pack SRC DST`")
    sock = wire.bind(host, port)
    share_arenas()
    _log_to_stderr()
    loading: dict[str, Any] = {"path": path, "policy": policy, "threads": threads, "ctx_size": ctx_size, "trace": trace}
    loading |= {"activation_bits": activation_bits, "kv_tokens": kv_tokens, "routing": routing, "adapter": adapter}
    loading |= common.rule_options(roster_size, pin_after, delta, shift, cache_lambda, keep_best, own_slots)
    loading["loras"] = loras
    loading["quality"] = quality
    size_bytes = parse_bytes(prefix_cache_size or "8GiB", option="--prefix-cache-size")
    common.quiet_transformers()
    # Everything that will be imported counts as the process's own when the budget is divided.
    from stoker.server.app import create_app
    from stoker.server.loading import Batching

    batching = Batching(parallel, queue, prefix_cache, size_bytes)
    limit = resolve(memory)
    specs = _specs(models, names, loading, batching, alone=len(models) == 1 and keep_alive is None)
    with _directory_of(batching):
        registry = _registry(specs, limit, keep_alive, settings, loading, batching)
        _serve(create_app(registry, settings), registry, settings, sock)


def model_names(models: list[str], aliases: list[str]) -> list[tuple[str, ...]]:
    """For each model its directory's name, then its aliases. Raises OptionError for a name that means two."""
    names = [[Path(model).name or Path(model).resolve().name] for model in models]
    for alias in aliases:
        name, given, target = alias.partition("=")
        if not name or (given and not target) or (not given and len(models) > 1):
            raise OptionError(
                "not an alias", where="--alias", expected="NAME, or NAME=MODEL where there are several", got=alias
            )
        places = [i for i, model in enumerate(models) if not given or target in (model, names[i][0])]
        if len(places) != 1:
            raise OptionError("it names no one model", where="--alias", expected=", ".join(models), got=target)
        names[places[0]].append(name)
    flat = [name for one in names for name in one]
    for name in flat:
        if flat.count(name) > 1:
            raise OptionError(
                f"two models have the name {name}", where="MODEL",
                remedy="rename a directory: aliases add a name and take none away",
            )  # fmt: skip
    return [tuple(one) for one in names]


def named_loras(given: list[str]) -> tuple[tuple[str, str], ...]:
    """NAME=DIR as pairs. Raises OptionError for another form and for a name that comes twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, directory = text.partition("=")
        if not name or not equals or not directory or ":" in name or name in found:
            raise OptionError("not a LoRA", where="--lora", expected="NAME=DIR, each name once, no colon", got=text)
        found[name] = directory
    return tuple(found.items())


def _specs(
    models: list[str], names: list[tuple[str, ...]], loading: dict[str, Any], batching: "Batching", *, alone: bool
) -> "list[Spec]":
    """What is known of the models before one is loaded. alone: the only one, with the budget to itself."""
    from stoker.generate.prefix import check_size
    from stoker.generate.price import price
    from stoker.server.loading import model_options
    from stoker.server.registry import Spec

    specs = []
    for model, own in zip(models, names, strict=True):
        cost = None
        if not alone or batching.directory is not None:
            cost = price(model, **_priced(model_options(loading, batching)))
        if cost is not None and batching.directory is not None:
            check_size(batching.size_bytes, cost.block_bytes, own[0])
        adapters = tuple(name for name, _ in loading["loras"])
        specs.append(Spec(own, model, None if alone else cost, _about(model, cost), adapters))
    return specs


@contextmanager
def _directory_of(batching: "Batching") -> Iterator[None]:
    """The directory of the prefix cache is this process's from before a model is loaded to the end."""
    from stoker.generate.prefix.disk import borrow, give_back

    if batching.directory is None:
        yield
        return
    directory = borrow(batching.directory, batching.size_bytes)
    try:
        yield
    finally:
        give_back(directory)


def _registry(
    specs: "list[Spec]",
    limit: int,
    keep_alive: float | None,
    settings: "Settings",
    loading: dict[str, Any],
    batching: "Batching",
) -> "Registry":
    """Everything that is known before the first request. A model that is alone is loaded here."""
    from stoker.server.loading import loader
    from stoker.server.registry import Registry

    keep_alive_min = KEEP_ALIVE_MIN if keep_alive is None and len(specs) > 1 else keep_alive
    load = loader(settings, loading, batching)
    registry = Registry(
        specs, load, settings, budget_bytes=limit, keep_alive_s=None if keep_alive_min is None else 60 * keep_alive_min
    )
    if len(specs) == 1 and keep_alive is None:
        _show_loaded(registry.adopt(registry.entries[0]), batching)
    else:
        registry.check_budget()
        _show_waiting(registry, keep_alive_min)
    return registry


def _priced(options: dict[str, Any]) -> dict[str, Any]:
    """The options that change what a model costs."""
    sizes = ("ctx_size", "kv_tokens", "activation_bits", "parallel", "prefix_ram", "grammars")
    rules = ("routing", "adapter", "loras", "roster_size", "pin_after", "delta", "shift", "cache_lambda", "keep_best")
    return {name: options[name] for name in (*sizes, *rules, "own_slots") if name in options}


def _about(model: str, cost: Any) -> dict[str, Any]:
    """What /v1/models tells of a model that is not loaded."""
    from stoker.store.describe import describe

    described = describe(model)
    sizes = described.sizes["as stored"]
    return {
        "context_length": cost.ctx_tokens if cost is not None else None,
        "formats": [] if isinstance(sizes, str) else sizes.formats,
        "model_type": described.model_type,
        "fingerprint": described.fingerprint,
    }


def _show_loaded(service: "Service", batching: "Batching") -> None:
    from stoker.generate.prefix import why_not

    for line in service.model.ledger_lines():
        note(line)
    note(f"{service.name}: {common.effective_mode(service.model)}")
    reason = why_not(service.model.runtime)
    where = "in memory" if batching.directory is None else f"in memory and in {batching.directory}"
    note(f"prefixes are kept {where}" if reason is None else f"prefixes are not kept: {reason}")


def _show_waiting(registry: "Registry", keep_alive_min: float | None) -> None:
    from stoker.runtime.budget import format_bytes

    limit, base = registry.budget_bytes, registry.base_bytes
    for spec in (entry.spec for entry in registry.entries):
        if spec.price is not None:
            least, most = registry.least_bytes(spec.price), format_bytes(spec.price.full_bytes + base)
            note(f"{spec.name}: takes {format_bytes(least)} at least, {most} with all experts in memory")
    note(f"{format_bytes(base)} of each are the process with its libraries, which models share")
    stays = "until its memory is needed" if keep_alive_min is None else f"for {keep_alive_min:g} idle minutes"
    note(f"budget {format_bytes(limit)} for all; a model is loaded at its first request and stays {stays}")


def _serve(app: Any, registry: "Registry", settings: "Settings", sock: Any) -> None:
    from stoker.server import wire

    url = wire.url_of(sock)

    def ready() -> None:
        name = registry.entries[0].spec.name
        if not settings.loopback and settings.api_key is None:
            note(f"WARNING: everybody who can reach {settings.host} may use this server; give --api-key KEY")
        note(f"page     {url}/\nOpenAI   {url}/v1\nmetrics  {url}/metrics")
        key = ' -H "Authorization: Bearer $STOKER_API_KEY"' if settings.api_key is not None else ""
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        note(f"try      curl {url}/v1/chat/completions{key} -d '{body}'")
        note("Ctrl-C ends it; running answers may finish")

    wire.serve(app, registry, settings, sock, ready=ready)


def _log_to_stderr() -> None:
    """One line an event. uvicorn's own lines come only where something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in (("stoker", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
