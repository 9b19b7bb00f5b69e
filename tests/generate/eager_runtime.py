"""The runtime's contract on transformers' own eager model: real logits, a real cache, nothing of stoker's engine.

Lets generation be tested by itself, and gives the end-to-end tests something independent to agree with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stoker.errors import OptionError, StokerError
from stoker.runtime.modes import Mode
from stoker.runtime.step import StepContext

CONFIG: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def random_model(vocab_tokens: int, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A small random MoE in float32 whose greedy output is varied (weights large enough to matter)."""
    torch.set_num_threads(1)  # more only wait for each other at this size
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab_tokens, **CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
    return model


class EagerSequence:
    """Token ids and their transformers cache."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.routing = self.prompt_tokens = None
        self.cache = DynamicCache()
        self.closed = False

    @property
    def length(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> int:
        if length < len(self.ids):
            self.cache.crop(length - len(self.ids)) if length else self._clear()
            del self.ids[length:]
        return len(self.ids)

    def _clear(self) -> None:
        self.cache = DynamicCache()

    def close(self) -> None:
        self.truncate(0)
        self.closed = True


class EagerRuntime:
    """`Runtime` without stoker; counts tokens, so that tests can see what was computed and what was reused."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, ctx_size: int = 256, chunk: int = 16) -> None:
        self.model, self.tokenizer, self.ctx_size, self.chunk = model, tokenizer, ctx_size, chunk
        self.vocab_size = int(model.config.vocab_size)
        self.eos_token_ids = (2,)
        self.generation_config: dict[str, Any] = {}
        self.kv, self.kv_tokens, self.prefill_chunk = None, 4 * ctx_size, chunk
        self.fail_on_token: int | None = None
        self.step, self.mode = StepContext(), Mode("gate")
        self.prefilled_tokens = self.decoded_tokens = self.closed = 0
        self.sequences: list[EagerSequence] = []
        self.fail_decode_at: int | None = None

    def new_sequence(self) -> EagerSequence:
        self.sequences.append(EagerSequence())
        return self.sequences[-1]

    def prefill(
        self, sequence: EagerSequence, ids: Sequence[int], on_chunk: Callable[[int], None] | None = None
    ) -> Tensor:
        assert len(ids) > 0
        logits = torch.empty(0)
        for first in range(0, len(ids), self.chunk):
            part = list(ids[first : first + self.chunk])
            logits = self._append(sequence, part)
            self.prefilled_tokens += len(part)
            if on_chunk is not None and first + len(part) < len(ids):
                on_chunk(first + len(part))
        return logits

    def decode(self, sequences: Sequence[EagerSequence], ids: Sequence[int]) -> Tensor:
        if self.fail_decode_at is not None and self.decoded_tokens >= self.fail_decode_at:
            raise OSError("the disk went away")
        self.decoded_tokens += len(ids)
        return torch.stack([self._append(s, [token]) for s, token in zip(sequences, ids, strict=True)])

    def advance(self, parts: Sequence[Any]) -> Tensor:
        rows = [torch.empty(0, self.vocab_size)]
        for part in parts:
            if self.fail_on_token in part.ids:
                raise StokerError("a read failed", where=f"token {self.fail_on_token}")
            if part.decode:
                self.decoded_tokens += len(part.ids)
            else:
                self.prefilled_tokens += len(part.ids)
            logits = self._append(part.sequence, list(part.ids))
            rows += [logits[None]] if part.wants_logits else []
        return torch.cat(rows)

    @torch.inference_mode()
    def _append(self, sequence: EagerSequence, ids: list[int]) -> Tensor:
        if sequence.length + len(ids) > self.ctx_size:
            raise OptionError("the context is full")
        logits = self.model(torch.tensor([ids]), cache=sequence.cache, use_cache=True).logits
        sequence.ids.extend(ids)
        return logits[0, -1].float()

    @torch.inference_mode()
    def logits(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(ids, attention_mask=mask).logits

    def reusable(self, sequence: EagerSequence, tokens: int) -> int:
        return tokens

    def ledger(self) -> dict[str, Any]:
        return {"budget_bytes": 1, "resident_share": 1.0}

    def counters(self) -> dict[str, Any]:
        return self.stats()

    def stats(self) -> dict[str, Any]:
        return {"hits": 0, "misses": 0, "dropped_experts": 0, "stall_ns": 0}

    def close(self) -> None:
        self.closed += 1
