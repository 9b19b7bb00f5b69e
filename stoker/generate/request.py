"""What is asked of a generation, as frozen data, checked when it is made: nothing invalid gets further than this file.

Knows neither model nor tokenizer. The precedence of settings is request, then generation_config.json, then built-in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from stoker.errors import ContextError, OptionError

FinishReason = Literal["stop", "length", "cancelled"]

# Fields of generation_config.json that choose a sampling; the rest of that file is not about sampling.
_CONFIG_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingOptions:
    """How one token is drawn from the logits.

    temperature: 0 takes the most likely token (lowest id when equal). top_k: 0 keeps all. top_p, min_p: as in
    transformers. repetition_penalty: over prompt and output (CTRL, arXiv 1909.05858). presence_penalty and
    frequency_penalty: over the output alone, as in the OpenAI API. logit_bias: added to raw logits by token id. seed:
    None draws a fresh one. logprobs: None for none, else how many alternatives to report beside the chosen token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # a smaller one leaves float32
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 1000)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token", token, 0, 2**31)
            _number(f"logit_bias of token {token}", bias, -1000.0, 1000.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def resolve_sampling(asked: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> SamplingOptions:
    """SamplingOptions from what was asked (None: not asked) over the model's generation_config.json over greedy.

    The model's sampling counts only where its config says `do_sample`. Asking for a filter without any temperature
    means sampling at 1.0. Asking for a filter together with temperature 0 is refused: it would do nothing. Unknown
    names are refused, with the nearest known one.
    """
    known = [f.name for f in fields(SamplingOptions)]
    for name in asked:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else None
            raise OptionError(f"unknown sampling option {name}", expected=", ".join(known), got=name, remedy=remedy)
    chosen = {name: value for name, value in asked.items() if value is not None}
    config = generation_config or {}
    if config.get("do_sample"):
        suggested = {name: config[name] for name in _CONFIG_FIELDS if config.get(name) is not None}
        suggested.setdefault("temperature", 1.0)
    else:
        penalty = config.get("repetition_penalty")
        suggested = {} if penalty is None else {"repetition_penalty": penalty}
    if any(name in chosen for name in _FILTERS):
        suggested.setdefault("temperature", 1.0)
    options = SamplingOptions(**{**suggested, **chosen})
    neutral = SamplingOptions()
    idle = [name for name in _FILTERS if name in chosen and chosen[name] != getattr(neutral, name)]
    if options.greedy and idle:
        raise OptionError(
            f"{idle[0]} does nothing at temperature 0",
            got=f"{idle[0]} = {chosen[idle[0]]}, temperature = 0",
            remedy=f"leave out {idle[0]}, or choose a temperature above 0",
        )
    return options


@dataclass(frozen=True)
class Request:
    """One generation: the prompt's token ids and when to stop. max_tokens None: until the context is full."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingOptions
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise OptionError("the prompt is empty", where="prompt", remedy="give at least one token")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise OptionError("a stop string must be text that is not empty", where="stop", got=repr(text))

    def limit_tokens(self, ctx_size: int) -> int:
        """How many tokens may be generated in a context of `ctx_size` tokens; ContextError when the request cannot fit.

        The last generated token is never fed back, so it needs no place in the context.
        """
        room = ctx_size - len(self.prompt_ids) + 1
        wanted = 1 if self.max_tokens is None else self.max_tokens
        if room < wanted:
            needed = len(self.prompt_ids) + wanted - 1
            asked = f"{len(self.prompt_ids)} prompt tokens" + (f" + {wanted} to generate" if self.max_tokens else "")
            error = ContextError(
                "the context is too long",
                where="ctx_size",
                expected=f"at most {ctx_size} tokens",
                got=asked,
                remedy=f"load with ctx_size (--ctx-size) of at least {needed}, or ask for less",
            )
            error.asked_tokens, error.limit_tokens = needed, ctx_size
            raise error
        return room if self.max_tokens is None else self.max_tokens


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= float(value) <= high or (low_open and float(value) == low):  # type: ignore[arg-type]
        expected = f"a number {'above' if low_open else 'from'} {low:g} {'up ' if low_open else ''}to {high:g}"
        raise OptionError("out of range", where=name, expected=expected, got=repr(value))


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise OptionError("out of range", where=name, expected=f"a whole number from {low} to {high}", got=repr(value))
