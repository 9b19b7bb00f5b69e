"""One loaded model as the server sees it: text to tokens inside bounds, whose sampling counts, jobs and their events.

The bridge between asyncio and the engine thread. Knows no API and no HTTP.
"""

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from stoker.errors import Closing, ContextError, StokerError
from stoker.generate.batcher import Batcher
from stoker.generate.job import Done, Event, Failed, Job, Piece, Progress
from stoker.generate.model import Model
from stoker.generate.report import Result
from stoker.generate.request import SamplingOptions, resolve_sampling
from stoker.server.errors import refused
from stoker.server.held import current
from stoker.server.observe import Totals
from stoker.server.settings import Settings

T = TypeVar("T")
Told = Progress | Piece | Done  # what an answer tells; a failure is raised
log = logging.getLogger("stoker.server")

# Tokenizing, templates and grammars of all requests: more threads would take cores from the engine.
_WORKERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="stoker-prepare")
_FILTERS = ("top_k", "top_p", "min_p")


class Service:
    """A model, its engine thread, and the server's settings. active: answers that are not over. ctx_size: tokens of
    prompt and answer together. fingerprint: changes with the weights and with nothing else.
    """

    def __init__(self, name: str, model: Model, batcher: Batcher, settings: Settings, prefix: Any = None) -> None:
        self.name, self.model, self.batcher, self.settings, self.prefix = name, model, batcher, settings, prefix
        self.adapter: str | None = None
        self._active = [0]  # shared with the views of `adapted`
        self.totals = Totals()
        runtime = model.runtime
        self.ctx_size, self.vocab_tokens = int(runtime.ctx_size), int(runtime.vocab_size)
        self.fingerprint = "fp_" + str(runtime.store.manifest.fingerprint())[:12]
        self._generation_config = dict(runtime.generation_config)
        self._longest_token = _longest_token(model.tokenizer)

    @property
    def active(self) -> int:
        return self._active[0]

    def adapted(self, adapter: str) -> "Service":
        """This model as one of its LoRAs makes it: the same engine, another name, prefixes kept apart by not being
        kept."""
        view = copy.copy(self)
        view.name, view.adapter = f"{self.name}:{adapter}", adapter
        return view

    # ---- before the engine ------------------------------------------------------------------------------------------

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what takes a while off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(_WORKERS, function, *arguments)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; `special` adds what the tokenizer puts around a text. Raises ContextError, before the work is
        done, for a text that cannot fit: no token is longer than the vocabulary's longest."""
        least = -(-len(text) // self._longest_token)
        if least > self.ctx_size:
            raise self._too_long(least, at_least=True)
        return list(self.model.tokenizer.encode(text, add_special_tokens=special))

    def sampling(self, asked: Mapping[str, Any]) -> SamplingOptions:
        """What was asked (None: not asked), over the server's flags, over the model's generation_config.json, over
        greedy. At temperature 0 filters are let go of: the most likely token survives every one of them. Raises
        OptionError for what is out of range."""
        chosen = {name: value for name, value in asked.items() if value is not None}
        merged = {**self.settings.sampling, **chosen}
        if merged.get("temperature") == 0:
            merged = {name: value for name, value in merged.items() if name not in _FILTERS}
        options, vocab_tokens = resolve_sampling(merged, self._generation_config), self.vocab_tokens
        outside = next((token for token in options.logit_bias if token >= vocab_tokens), None)
        if outside is not None:
            raise refused(
                "logit_bias", "a token id lies outside the vocabulary", code="invalid_value",
                expected=f"0 to {vocab_tokens - 1}", got=outside,
            )  # fmt: skip
        return options

    def limit_tokens(self, prompt_tokens: int, asked: int | None, *, otherwise: int | None = None) -> int:
        """How many tokens an answer may have: what was asked (else the server's flag, else `otherwise`) is an upper
        bound, so the context's room may be less. Raises ContextError where not even one fits.
        """
        room = self.ctx_size - prompt_tokens + 1
        if room < 1:
            raise self._too_long(prompt_tokens)
        wanted = asked or self.settings.max_tokens or otherwise
        return room if wanted is None else min(wanted, room)

    def _too_long(self, prompt_tokens: int, *, at_least: bool = False) -> ContextError:
        more = "at least " if at_least else ""
        error = ContextError(
            f"the prompt has {more}{prompt_tokens} tokens and the context that it is served with (--ctx-size) is "
            f"{self.ctx_size} tokens",
            remedy="shorten it, or start the server with a larger --ctx-size",
        )
        error.asked_tokens, error.limit_tokens = prompt_tokens, self.ctx_size
        self.totals.watch().refused(error)
        return error

    # ---- in the engine ----------------------------------------------------------------------------------------------

    def run(self, job: Job) -> "Answer":
        """Submit at once. Raises OptionError (ContextError), QueueFull or Closing."""
        if self.adapter is not None:
            job = replace(job, adapter=self.adapter, cache=False)
        return Answer(self, job)

    def began(self) -> None:
        """An answer begins."""
        self._active[0] += 1

    def refused(self) -> None:
        """It did not come to an answer."""
        self._active[0] -= 1

    def over(self, result: Result | None, error: StokerError | None) -> None:
        """An answer has ended; the line that the log gets for it."""
        self._active[0] -= 1
        if result is not None:
            log.info("%s: %s", self.name, request_line(result))
        elif error is not None and not isinstance(error, Closing):  # whoever asked gets that told, and the log with it
            log.warning("%s: answer failed: %s", self.name, error.what)

    def close(self) -> None:
        """End the engine, write what the prefix cache still holds, then give the model's memory back. Blocks."""
        self.batcher.close()
        if self.prefix is not None:
            self.prefix.close()
        self.model.close()


class Answer:
    """The events of one job, once, in order: Progress, Piece, and Done at the end. A job that fails raises its error.

    Cancelled when the iteration is closed early, and at the end of the HTTP request in any case.
    """

    def __init__(self, service: Service, job: Job) -> None:
        self._service, self._loop = service, asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._over = self._cancelled = False
        self._watch = service.totals.watch()
        service.began()
        try:
            self._ticket = service.batcher.submit(job, self._listen)
        except BaseException as error:
            service.refused()
            self._watch.refused(error)
            raise
        if service.settings.log_prompts:
            log.info("%s: prompt %r", service.name, service.model.tokenizer.decode(list(job.request.prompt_ids)))
        holder = current()
        if holder is not None:
            holder.add(self._cancel_at_end)

    def cancel(self) -> None:
        """End the job within one step. Idempotent."""
        if not self._over:
            self._cancelled = True
            self._ticket.cancel()

    def __aiter__(self) -> AsyncIterator[Told]:
        return self.events()

    async def events(self) -> AsyncGenerator[Told, None]:
        """The iteration, as a generator that can be closed."""
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Done) and event.result.finish_reason == "cancelled" and not self._cancelled:
                    raise Closing("the server stopped before the answer was complete")
                yield event
                if isinstance(event, Done):
                    return
        finally:
            self.cancel()

    async def _cancel_at_end(self) -> None:
        self.cancel()

    def _listen(self, event: Event) -> None:
        """On the engine thread."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended without waiting
            self._loop.call_soon_threadsafe(self._arrived, event)

    def _arrived(self, event: Event) -> None:
        self._watch.event(event)
        self._events.put_nowait(event)
        if isinstance(event, Done):
            self._over = True
            self._service.over(event.result, None)
        elif isinstance(event, Failed):
            self._over = True
            self._service.over(None, event.error)


def request_line(result: Result) -> str:
    """What one request cost, in one line for the log."""
    usage, timings, decode = result.usage, result.timings, result.stats["decode"]
    cached = usage.cached_tokens / usage.prompt_tokens
    parts = [f"prompt {usage.prompt_tokens} tokens, {cached:.0%} cached", f"TTFT {timings.ttft_ms / 1e3:.2f} s"]
    if timings.decode_ms:
        parts += [
            f"{usage.completion_tokens} tokens at {timings.decode_tok_s:.2f} tok/s",
            f"hits {decode['hit_rate']:.1%}",
            f"{decode['read_bytes_per_token'] / 1e6:.2f} MB/token read",
            f"stall {decode['stall_share']:.0%}",
        ]
    else:
        parts.append(f"{usage.completion_tokens} tokens")
    return " | ".join([*parts, result.finish_reason])


def _longest_token(tokenizer: Any) -> int:
    """Characters of the vocabulary's longest entry."""
    return max((len(token) for token in tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
