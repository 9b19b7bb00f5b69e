"""`stoker.load` and the Model that it returns: prompts or messages in, text out. The Python door of stoker.

Resolves what a caller gives (text, messages, token ids, options) into Requests; engine.py runs them. Imports torch only
when a model is loaded.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from stoker import __version__
from stoker.errors import OptionError, StokerError, StoreError
from stoker.generate.chat_template import Message, chat_ids, has_chat_template
from stoker.generate.engine import Generation
from stoker.generate.report import Result
from stoker.generate.request import Request, resolve_sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from stoker.generate.quality import Promise
    from stoker.trace.events import Recorder

__all__ = ["GenerateOptions", "Model", "Prompt", "Result", "Session", "Stream", "load"]

DEFAULT_CTX_TOKENS = 4096
Prompt = str | Sequence[Message] | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Options of `stream` and `generate`. Sampling: see SamplingOptions; what is not given comes from the model's
    generation_config.json, then from greedy.

    max_tokens: None until the context is full. stop: one or more strings that end the output and are not part of it.
    session: keep and reuse the KV of the common prefix. template: variables for the chat template. on_prefill(done,
    total): prompt tokens as they are computed.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    session: "Session | None"
    template: Mapping[str, Any]
    on_prefill: Callable[[int, int], None] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    logprobs: int | None


def load(
    model: str | Path,
    *,
    memory: str | int = "auto",
    path: str = "auto",
    threads: int | None = None,
    ctx_size: int | None = None,
    policy: str = "auto",
    routing: str | None = None,
    adapter: str | Path | None = None,
    quality: str | None = None,
    trace: str | Path | None = None,
    **more: Any,
) -> "Model":
    """Open the store `model` inside a budget and make it ready.

    memory: bytes, or text such as "3GiB" or "auto", for the whole process. path: how experts get into memory (auto,
    exact, staged, hot, whole_layer); it never changes the output. threads: None for the physical cores allowed to the
    process. ctx_size: tokens of KV cache; None for 4096, or the model's own length where that is shorter. policy: which
    experts stay; with path and policy auto, what `stoker tune` found for this budget holds, else lru. routing: who
    chooses experts (gate, prerouter); adapter: a directory with heads, LoRA or both (docs/adapters.md). Both change the
    output; without them it is that of the model's gates, and with an adapter that has heads, routing None means
    prerouter. quality: in their place a bound (exact, kl<=0.01, ppl<=+1%): the fastest mode that was measured to keep
    it (docs/quality.md). trace: a new file for routes, reads and waits. `more`: further fields of the Options.

    Raises StoreError for a bad store, AdapterError for a bad adapter, BudgetError (with the smallest budget that works)
    when it does not fit, OptionError for a bad option; all before any weight is read.
    """
    from dataclasses import fields

    from stoker.runtime import budget

    # What a typing error causes is told before torch is imported.
    if not Path(model).exists():
        raise StoreError("there is no such store", where=str(model), remedy="make one with `stoker pack SRC DST`")
    limit = budget.resolve(memory)
    from stoker.generate.quality import promised
    from stoker.generate.tuned import tuned_options
    from stoker.runtime.model import Options
    from stoker.runtime.model import load as load_runtime
    from stoker.trace.writer import TraceWriter

    known = [field.name for field in fields(Options)]
    for name in more:
        if name not in known:
            raise OptionError(f"unknown option {name}", where="load", expected=", ".join(known), got=name)
    for name, value in (("threads", threads), ("ctx_size", ctx_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError("must be a whole number, at least 1", where=name, got=repr(value))
    chosen: dict[str, Any] = {"path": path, "policy": "lru" if policy == "auto" else policy}
    if (path, policy) == ("auto", "auto"):
        chosen |= tuned_options(Path(model), limit, threads)
    chosen |= {"routing": routing, "adapter": None if adapter is None else str(adapter)} | more
    promise = None
    if quality is not None:
        promise = promised(Path(model), quality, limit, chosen)
        chosen |= promise.options
    options = Options(memory=memory, threads=threads, ctx_size=context_tokens(Path(model), ctx_size), **chosen)
    if trace is None:
        return Model(load_runtime(model, options), promise=promise)
    recorder = TraceWriter(trace, about={"model": str(model), "stoker": __version__, **vars(options)})
    try:
        runtime = load_runtime(model, options, recorder)
        recorder.describe(
            experts=max(pool.experts for pool in runtime.store.pools),
            ledger=runtime.ledger(),
            routing=runtime.mode.about(),
        )
        return Model(runtime, recorder, promise)
    except BaseException:
        recorder.close()
        Path(trace).unlink(missing_ok=True)
        raise


def context_tokens(directory: Path, asked: int | None = None) -> int:
    """The context that a store is loaded with: what was asked, else 4096, or the model's length where that is less."""
    return asked or min(DEFAULT_CTX_TOKENS, _model_length(directory))


def _model_length(directory: Path) -> int:
    """The longest context that the model's config.json allows; no bound where it names none or cannot be read (what is
    wrong with it is for the store's reader to say)."""
    try:
        config = json.loads((directory / "config.json").read_text())
        length = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        length = None
    return length if isinstance(length, int) and length > 0 else DEFAULT_CTX_TOKENS


class Session:
    """The KV of one conversation: a later prompt that begins like an earlier one computes only what is new.

    Made by `Model.session()`; one stream at a time. Holds part of the context's KV until closed.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._sequence: Any = None
        self._busy = False

    @property
    def cached_tokens(self) -> int:
        return int(self._sequence.length) if self._sequence is not None else 0

    def borrow(self) -> Any:
        """The sequence, for one stream; give it back with `give_back`."""
        if self._busy:
            raise OptionError("the session is in use", where="session", remedy="finish or close the other stream first")
        if self._sequence is None:
            self._sequence = self._runtime.new_sequence()
        self._busy = True
        return self._sequence

    def give_back(self, *, sound: bool) -> None:
        """End the loan; a sequence that an error may have left half-written is dropped."""
        self._busy = False
        if not sound:
            self.close()

    def close(self) -> None:
        """Forget everything and return the KV."""
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(Iterator[str]):
    """Text pieces of one generation; `result` when they are exhausted or the stream is closed."""

    def __init__(self, generation: Generation, pieces: Iterator[str]) -> None:
        self._generation = generation
        self._pieces = pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def cancel(self) -> None:
        """Ask the generation to end after the token in progress; safe from another thread or a signal handler."""
        self._generation.cancelled.set()

    def close(self) -> None:
        """End now, at a token boundary. Idempotent."""
        self._pieces.close()  # type: ignore[attr-defined]

    @property
    def result(self) -> Result:
        if self._generation.result is None:
            raise StokerError("the stream is not finished", remedy="read it to the end, or close it, before its result")
        return self._generation.result

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model:
    """A loaded model. Safe to use from several threads: steps take turns. Close it, or use it as a context manager."""

    def __init__(self, runtime: Any, recorder: "Recorder | None" = None, promise: "Promise | None" = None) -> None:
        self._runtime, self._recorder = runtime, recorder
        self.promise = promise
        if promise is not None:
            promise.check_adapter(runtime.adapter_fingerprint)
        self._lock = threading.RLock()
        self._closed = False

    @property
    def runtime(self) -> Any:
        self._check_open()
        return self._runtime

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None for a model that speaks in token ids alone."""
        return self.runtime.tokenizer

    @property
    def has_chat_template(self) -> bool:
        return has_chat_template(self.tokenizer)

    def logits(self, ids: Any, attention_mask: Any = None) -> "Tensor":
        """Logits of every position: ids int64 [B, T] (tensor, array or nested lists) -> float32 [B, T, V]."""
        import torch

        ids_BT = torch.as_tensor(ids)
        if ids_BT.dim() != 2 or ids_BT.is_floating_point() or ids_BT.numel() == 0:
            raise OptionError(
                "not token ids",
                where="ids",
                expected="whole numbers [B, T]",
                got=f"{ids_BT.dtype} {list(ids_BT.shape)}",
            )
        mask_BT = None if attention_mask is None else torch.as_tensor(attention_mask)
        if mask_BT is not None and mask_BT.shape != ids_BT.shape:
            raise OptionError(
                "not a mask of these ids", where="attention_mask", expected=list(ids_BT.shape), got=list(mask_BT.shape)
            )
        with self._lock:
            logits_BTV: Tensor = self.runtime.logits(ids_BT.to(torch.int64), mask_BT)
        return logits_BTV

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Generate from text (continued as it is), messages (through the chat template) or token ids.

        Everything is checked here, before any computing: raises OptionError for options that are unknown, out of range
        or without effect, and for a prompt that does not fit the context.
        """
        chosen: dict[str, Any] = dict(options)
        session: Session | None = chosen.pop("session", None)
        on_prefill = chosen.pop("on_prefill", None)
        request = self._request(prompt, chosen)
        generation = Generation(self.runtime, request, lock=self._lock, on_prefill=on_prefill)
        return Stream(generation, self._run(generation, session))

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """`stream` to its end."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def session(self) -> Session:
        """A conversation whose KV is kept between calls: pass it as `session=` to `stream` and `generate`."""
        return Session(self.runtime)

    def encode(self, prompt: Prompt, template: Mapping[str, Any] | None = None) -> list[int]:
        """The token ids that `stream` would begin with."""
        items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(items, str) and all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            return list(items)
        if self.tokenizer is None:
            raise OptionError("this model has no tokenizer", where="prompt", remedy="give token ids instead of text")
        if isinstance(items, str):
            return list(self.tokenizer.encode(items))
        return chat_ids(self.tokenizer, items, **(template or {}))

    def ledger(self) -> dict[str, Any]:
        """The account of the budget, in bytes."""
        return dict(self.runtime.ledger())

    def ledger_lines(self) -> list[str]:
        """The account for people, one entry a line."""
        return list(self.runtime.budget.lines())

    def stats(self) -> dict[str, Any]:
        """Counters since loading."""
        return dict(self.runtime.stats())

    def check_quality(self) -> None:
        """Raises StokerError where `exact` was promised and a counter says that an expert was dropped or replaced."""
        if self.promise is not None:
            self.promise.check(self.stats())

    def expert_uses(self) -> "NDArray[np.int64]":
        """How often each MoE layer chose each expert since loading: int64 [L, E]; safe from another thread."""
        uses_LE: NDArray[np.int64] = self.runtime.expert_uses()
        return uses_LE

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._runtime.close()
                if self._recorder is not None:
                    self._runtime.note_counters()
                    self._recorder.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StokerError("the model is closed", remedy="load it again")

    def _request(self, prompt: Prompt, options: dict[str, Any]) -> Request:
        stop = options.pop("stop", None) or ()
        max_tokens, ignore_eos = options.pop("max_tokens", None), bool(options.pop("ignore_eos", False))
        template = options.pop("template", None)
        sampling = resolve_sampling(options, self.runtime.generation_config)
        ids = tuple(self.encode(prompt, template))
        vocab_tokens = self.runtime.vocab_size
        outside = next((token for token in ids if not 0 <= token < vocab_tokens), None)
        if outside is not None:
            raise OptionError(
                "a token id lies outside the vocabulary",
                where="prompt",
                expected=f"0 to {vocab_tokens - 1}",
                got=outside,
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Request(ids, sampling, max_tokens=max_tokens, stop=stops, ignore_eos=ignore_eos)

    def _run(self, generation: Generation, session: Session | None) -> Iterator[str]:
        sequence = self.runtime.new_sequence() if session is None else session.borrow()
        sound = False
        try:
            yield from generation.run(sequence)
            sound = True
        except GeneratorExit:
            sound = True
            raise
        finally:
            if session is None:
                sequence.close()
            else:
                session.give_back(sound=sound)
