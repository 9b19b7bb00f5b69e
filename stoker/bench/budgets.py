"""What a budget buys for a model that is known by its shape alone: the ledger that the engine would draw up.

Uses the engine's own arithmetic (runtime.ledger, runtime.plan), so that a forecast and a run divide memory alike.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from stoker.errors import BudgetError
from stoker.plan.sizes import ModelShape
from stoker.runtime.ledger import Ledger, Needs, PoolNeed, floor_bytes, plan_memory
from stoker.runtime.plan import CHUNKS, _chunk, scratch_bytes
from stoker.store.manifest import Manifest

GIB, MIB = 1 << 30, 1 << 20
KV_BLOCK_TOKENS = 64
LADDER_GIB = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ROWS = 6
TOKENIZER_BYTES = 450  # of the process, for each entry of the vocabulary
PROCESS_MARGIN = 32 * MIB  # a process may start so much larger than the probe's did: a budget that is named has to work


class Divider:
    """Divides budgets for one model; `process_bytes` is what the interpreter and its libraries take on this machine."""

    def __init__(
        self, config: dict[str, Any], manifest: Manifest, shape: ModelShape, process_bytes: int, ctx_tokens: int
    ) -> None:
        text = config.get("text_config", config)
        self.shape, self.process_bytes, self.ctx_tokens = shape, process_bytes, ctx_tokens
        self._store: Any = SimpleNamespace(pools=manifest.pools)
        self._config = SimpleNamespace(
            hidden_size=shape.hidden if "hidden_size" not in text else int(text["hidden_size"]),
            num_experts_per_tok=shape.top_k,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocabulary,
        )

    def chunk(self, budget: int) -> int:
        """Tokens of one prefill step."""
        return self._chunk(budget)[0]

    def _chunk(self, budget: int) -> tuple[int, int]:
        """(tokens, bytes of scratch) of one prefill step."""
        needs = self.needs()
        room = budget - floor_bytes(needs) + needs.scratch_bytes
        return _chunk(self._store, self._config, budget, room, self.ctx_tokens)

    def needs(self) -> Needs:
        """With the shortest prefill step."""
        pools = tuple(PoolNeed(pool.experts, pool.layout.record_bytes, self.shape.top_k) for pool in self._store.pools)
        blocks = -(-self.ctx_tokens // KV_BLOCK_TOKENS)
        return Needs(
            process_bytes=self.process_bytes + TOKENIZER_BYTES * self.shape.vocabulary,
            dense_bytes=self.shape.dense_bytes,
            kv_bytes=blocks * KV_BLOCK_TOKENS * self.shape.kv_token_bytes,
            scratch_bytes=self._scratch(min(CHUNKS[-1], self.ctx_tokens)),
            pools=pools,
            ctx_tokens=self.ctx_tokens,
            kv_token_bytes=self.shape.kv_token_bytes,
        )

    def divide(self, budget: int) -> Ledger:
        """Raises BudgetError where the budget does not suffice, with the smallest that surely does."""
        try:
            return plan_memory(budget, self.needs(), scratch_bytes=self._chunk(budget)[1])
        except BudgetError:
            return plan_memory(budget, self._careful_needs())

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that surely works: one that is a little smaller may, if the process starts small."""
        return floor_bytes(self._careful_needs())

    def _careful_needs(self) -> Needs:
        needs = self.needs()
        return replace(needs, process_bytes=needs.process_bytes + PROCESS_MARGIN)

    @property
    def whole_bytes(self) -> int:
        """From here on every expert is in memory."""
        longest = self._scratch(min(CHUNKS[0], self.ctx_tokens)) - self.needs().scratch_bytes
        spare = (
            self.floor_bytes
            + longest
            - sum(min(self.shape.top_k, pool.experts) * pool.layout.record_bytes for pool in self._store.pools)
        )
        return spare + self.shape.expert_bytes

    def ladder(self, most_bytes: int | None = None) -> Sequence[int]:
        """A few budgets worth looking at: from the floor up to everything in memory."""
        steps = [gib * GIB for gib in LADDER_GIB if self.floor_bytes <= gib * GIB]
        enough = [step for step in steps if step < self.whole_bytes] + [s for s in steps if s >= self.whole_bytes][:1]
        if not enough or enough[0] > 1.2 * self.floor_bytes:
            enough.insert(0, round_up(self.floor_bytes))
        while len(enough) > ROWS:
            enough.pop(len(enough) // 2)
        if most_bytes is not None and most_bytes >= self.floor_bytes:
            enough = sorted({*enough, most_bytes})
        return enough

    def _scratch(self, tokens: int) -> int:
        return scratch_bytes(self._store, self._config, tokens)


def round_up(nbytes: int) -> int:
    return -(-nbytes // (16 * MIB)) * 16 * MIB
