"""One evaluation from end to end: text into windows, a store and its reference side by side, figures as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import OptionError
from stoker.evaluate.measure import Progress, measure
from stoker.evaluate.models import Feed, Scorer, StoreScorer
from stoker.evaluate.results import FORMAT, VERSION, summarise
from stoker.evaluate.text import WINDOW_TOKENS, Passage, Window, text_hash, windows

PROMPT_TOKENS = 64  # of a window, where a mode acts on answers alone


@dataclass(frozen=True)
class Text:
    """What is measured on. name: for people; windows: at most so many of each domain; prompt_tokens: how many of a
    window's first tokens are prompt to a routing mode and not scored (without a mode nothing is left out)."""

    name: str
    passages: Sequence[Passage]
    windows: int | None = None
    window_tokens: int = WINDOW_TOKENS
    prompt_tokens: int = PROMPT_TOKENS


def feed_of(rule: Any) -> Feed:
    """How a mode's windows are fed: at once where a token's route follows from the tokens alone, else one by one."""
    if rule is None:
        return "prompt"
    return "token by token" if rule.asks_residency else "answer"


def evaluate(
    runtime: Any,
    text: Text,
    *,
    reference: Scorer | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a loaded store; with a routing mode and no `reference`, against the same store's exact routes.

    Raises OptionError for a store without a tokenizer, windows longer than its context, and too little text.
    """
    rule = runtime.rule
    chosen = tokenised(runtime, text)
    feed = feed_of(rule)
    first = text.prompt_tokens if rule is not None else 0
    if reference is None and rule is not None:
        reference = StoreScorer(runtime, gate=True)
    model = StoreScorer(runtime, feed=feed, prompt_tokens=text.prompt_tokens)
    measured = measure(model, chosen, reference=reference, first=first, progress=progress)
    if not measured.documents:
        raise OptionError("no window is longer than its prompt", where="--prompt-tokens", got=text.prompt_tokens)
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model.about(),
        "reference": None if reference is None else reference.about(),
        "text": {"name": text.name, "sha256": text_hash(text.passages), "windows": len(chosen)},
        "fed": feed,
        "prompt_tokens": first,
        **summarise(measured),
    }


def tokenised(runtime: Any, text: Text) -> list[Window]:
    """The windows of a text for a model."""
    if runtime.tokenizer is None:
        raise OptionError("this model has no tokenizer", where="eval", remedy="evaluate a model that has one")
    if text.window_tokens > runtime.ctx_size:
        raise OptionError(
            "a window does not fit the context",
            where="--window-tokens",
            expected=f"at most --ctx-size {runtime.ctx_size}",
            got=text.window_tokens,
        )
    return windows(text.passages, runtime.tokenizer.encode, window_tokens=text.window_tokens, most=text.windows)
