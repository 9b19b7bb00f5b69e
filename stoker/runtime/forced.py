"""Teacher-forced logits of whole sequences: how `Runtime.logits` walks through its rows.

Knows padding, and which of a row's tokens are prompt to a routing rule; the steps themselves are the runtime's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.routing.rule import Rows, Span
from stoker.runtime.kv import PagedSequence
from stoker.runtime.modes import DEFAULT_LORA
from stoker.runtime.step import ALL_ROWS, Part

if TYPE_CHECKING:
    from stoker.runtime.model import Runtime

Masks = list[Tensor | None]


def forced_logits(
    runtime: Runtime, ids_BT: Tensor, mask_BT: Tensor | None, prompt_tokens: int | None, gate: bool
) -> Tensor:
    """See Runtime.logits."""
    if ids_BT.dim() != 2:
        raise OptionError("logits needs ids of shape [B, T]", got=tuple(ids_BT.shape))
    runtime._begin([])
    runtime.step.phase = "prefill"
    masks: Masks = [None] * len(ids_BT) if mask_BT is None else list(mask_BT)
    if runtime.kv is None:
        return _together(runtime, ids_BT, masks, prompt_tokens, gate)
    rows = zip(ids_BT.tolist(), masks, strict=True)
    return torch.stack([_paged(runtime, ids, mask, prompt_tokens, gate) for ids, mask in rows])


def _together(runtime: Runtime, ids_BT: Tensor, masks: Masks, prompt_tokens: int | None, gate: bool) -> Tensor:
    """By transformers' own attention, all rows in one step."""
    if runtime.rule is not None:
        width, spans = ids_BT.shape[1], []
        for row, mask in enumerate(masks):
            first, last = _real_span(mask, width)
            answer_from = last - first if prompt_tokens is None else prompt_tokens
            state = None if gate else runtime.rule.new_state()
            if state is not None:
                state.expect(answer_from, last - first)
            spans.append(Span(row * width + first, row * width + last, 0, answer_from, state))
        runtime.step.rows = Rows(runtime.step.index + 1, tuple(spans))
        if runtime.rule.wants_tokens:
            runtime._show_tokens(ids_BT.flatten())
        list(runtime.rule.before_step(runtime.step.rows))
    if DEFAULT_LORA in runtime.mode.loras and not gate:
        runtime.step.lora = ((0, ALL_ROWS, DEFAULT_LORA),)
    mask_BT = None if masks[0] is None else torch.stack([mask for mask in masks if mask is not None])
    return runtime._forward(ids_BT, None, None, attention_mask=mask_BT, use_cache=False)


def _paged(runtime: Runtime, ids: list[int], mask: Tensor | None, prompt_tokens: int | None, gate: bool) -> Tensor:
    """One row by itself: padding on either side is not computed, its rows are zero."""
    first, last = _real_span(mask, len(ids))
    sequence = runtime.new_sequence(gate=gate)
    assert isinstance(sequence, PagedSequence)
    sequence.prompt_tokens = None if prompt_tokens is None else first + prompt_tokens
    if sequence.routing is not None:
        sequence.routing.expect(last - first if prompt_tokens is None else prompt_tokens, last - first)
    runtime._check_room(sequence, len(ids))
    parts = [torch.zeros(first, runtime.vocab_size)]
    try:
        sequence.reserve(first)
        sequence.append(ids[:first])
        for start in range(first, last, runtime.prefill_chunk):
            part = ids[start : min(start + runtime.prefill_chunk, last)]
            sequence.reserve(len(part))
            runtime._begin([Part(sequence, part)])
            parts.append(runtime._paged_step([sequence], [part], list(range(len(part))), [first]))
            sequence.append(part)
            runtime._end()
    finally:
        sequence.close()
    return torch.cat([*parts, torch.zeros(len(ids) - last, runtime.vocab_size)])


def _real_span(mask: Tensor | None, tokens: int) -> tuple[int, int]:
    """[first, last) of the real tokens; OptionError for a mask with holes or nothing in it."""
    if mask is None:
        return 0, tokens
    real = mask.to(torch.bool).nonzero().flatten().tolist()
    if not real or real[-1] - real[0] + 1 != len(real):
        raise OptionError("a row of the attention mask must be one run of ones", got=mask.tolist())
    return real[0], real[-1] + 1
