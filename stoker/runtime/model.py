"""A loaded model: a transformers skeleton, dense weights in memory, experts on the SSD, one budget over all.

`load` draws up the ledger before anything heavy is read. `Runtime` turns tokens into logits and owns every resource;
it chooses neither experts nor tokens.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from stoker.errors import OptionError, StokerError
from stoker.native import kernels
from stoker.native.io import ReadQueue
from stoker.residency import Residency
from stoker.routing.rule import RoutingRule, Rows
from stoker.runtime import budget, dense
from stoker.runtime.depth import FOR_MANY, measured_depth
from stoker.runtime.experts import Scratch, StreamedExperts, activation_of
from stoker.runtime.forced import forced_logits
from stoker.runtime.fuse import FusionReport, fuse, kv_shape
from stoker.runtime.kv import KVPool, PagedSequence
from stoker.runtime.lora import install_lora
from stoker.runtime.modes import DEFAULT_LORA, Mode, resolve_mode, rule_of
from stoker.runtime.plan import Options, Plan, plan_run
from stoker.runtime.routing import attach_rule, detach_rule, lora_rows, rows_of
from stoker.runtime.sequence import CacheSequence
from stoker.runtime.skeleton import build_skeleton, moe_blocks
from stoker.runtime.step import Part, StepContext
from stoker.runtime.uses import LayerUses, as_array
from stoker.store.reader import Store, open_store
from stoker.trace.events import Phase

RSS_EVERY_NS = 50_000_000  # the system takes a while to say it
FEW_TOKENS = 64  # up to here waking torch's threads costs more than they do, where attention is not torch's


def load(directory: str | FilePath, options: Options | None = None, recorder: Any = None) -> Runtime:
    """Open a store and make it ready. Raises StoreError, BudgetError or OptionError before any weight is read."""
    options = options or Options()
    store = open_store(FilePath(directory))
    limit = budget.resolve(options.memory)
    model = build_skeleton(store.path)
    tokenizer = _tokenizer(store.path)
    mode = resolve_mode(store, options)
    plan = plan_run(store, model, options, limit, kv_shape(model) if options.fuse else None, mode.nbytes)
    runtime = Runtime(store, model, tokenizer, options, plan, recorder)
    try:
        runtime.mode = mode
        install_lora(model, runtime.step, mode.loras)
        rule = rule_of(mode, store)
        if rule is not None:
            runtime.follow(rule)
    except BaseException:
        runtime.close()
        raise
    return runtime


def _tokenizer(directory: FilePath) -> Any:
    """The store's tokenizer, or None when it has none (synthetic models speak in token ids)."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


class Runtime:
    """Tokens in, logits out. Not thread-safe: one step at a time."""

    def __init__(
        self,
        store: Store,
        model: PreTrainedModel,
        tokenizer: Any,
        options: Options,
        plan: Plan,
        recorder: Any = None,
    ) -> None:
        self.store, self.model, self.tokenizer, self.options = store, model, tokenizer, options
        ledger = plan.ledger
        self.budget, self.prefill_chunk, self.recorder = ledger, plan.prefill_chunk, recorder
        self.config = model.config.get_text_config()
        self.step = StepContext()
        self.mode = Mode("gate")
        self.rule: RoutingRule | None = None
        threads = options.threads or budget.default_threads()
        kernels.set_threads(threads)
        torch.set_num_threads(threads)
        self._threads = threads
        started = time.perf_counter()
        if options.depth is None:
            self.depth, self.device_bytes_per_s = measured_depth(
                store, backend=options.io_backend, direct=options.direct
            )
        else:
            self.depth, self.device_bytes_per_s = options.depth, 0.0
        many = self.depth if options.depth or options.parallel == 1 else max(self.depth, FOR_MANY)
        self.queue = ReadQueue(depth=many, backend=options.io_backend, direct=options.direct)
        self.residency = Residency(
            store,
            slots=list(ledger.slots),
            ring_records=ledger.ring_records,
            queue=self.queue,
            path=options.path,
            policy=options.policy,
            recorder=recorder,
        )
        if options.populate:
            self.residency.touch_ahead()
        self._attach_experts()
        self.weights = dense.load_dense(model, store, options.activation_bits)
        self.fusion = fuse(model, self.step) if options.fuse else FusionReport()
        self._attach_routers()
        self.kv = KVPool(plan.kv_shape, options.kv_tokens or options.ctx_size) if plan.kv_shape else None
        self._no_mask = torch.zeros(1, 1, 1, 1)
        self.load_seconds = time.perf_counter() - started
        self.generation_config = _generation_config(store.path)
        self._decode_ns = self._prefill_ns = self._rss_due_ns = 0
        self._decode_tokens = self._prefill_tokens = 0

    def _attach_experts(self) -> None:
        blocks = moe_blocks(self.model)
        pool_of_layer = {layer: pool for pool in self.store.pools for layer in pool.layers}
        scratch, previous = Scratch(), None
        self._uses: list[LayerUses] = []
        self._streamed: list[StreamedExperts] = []
        for block in blocks:
            pool = pool_of_layer.get(block.layer)
            if pool is None:
                raise StokerError("the store has no experts for this layer", where=f"{self.store.path}: {block.path}")
            name, alpha, limit = activation_of(block.experts, block.path)
            streamed = StreamedExperts(
                layer=block.layer,
                pool=pool.id,
                pool_experts=pool.experts,
                kernel=kernels.Experts(
                    pool.layout, name, alpha=alpha, limit=limit, activation_bits=self.options.activation_bits
                ),
                residency=self.residency,
                path=self.options.path,
                step=self.step,
                scratch=scratch,
                prefetch=self.options.prefetch,
                recorder=self.recorder,
            )
            for parameter in list(block.experts._parameters):
                block.experts._parameters[parameter] = None
            block.experts.streamed = streamed
            self._streamed.append(streamed)
            self._uses.append(streamed.uses)
            if previous is not None:
                previous.next = streamed
            previous = streamed

    def _attach_routers(self) -> None:
        """Let each layer's gate be asked early, where it needs the hidden state alone."""
        for block in moe_blocks(self.model):
            if block.router is not None and len(inspect.signature(block.router.forward).parameters) == 1:
                block.experts.streamed.router = block.router

    def follow(self, rule: RoutingRule) -> None:
        """Let `rule` change the gates' routes from now on; once, before the first sequence. Raises OptionError where it
        does not fit the model."""
        assert self.rule is None, "a model follows one rule"
        attach_rule(self.model, self.residency, rule)
        self.rule = rule

    def fall_back(self) -> None:
        """Give the rule up: all sequences, running ones too, keep the gates' own routes from the next step on."""
        detach_rule(self.model)
        self.rule, self.mode = None, self.mode.fall_back()

    # ---- sequences -------------------------------------------------------------------------------------------------

    def new_sequence(self, adapter: str | None = None, *, gate: bool = False) -> PagedSequence | CacheSequence:
        """An empty sequence; close it to return its cache. adapter: of `Options.loras`; None: the model's own. gate:
        the plain model, its gates' routes and no LoRA, whatever rule and adapter there are."""
        own = DEFAULT_LORA if DEFAULT_LORA in self.mode.loras and not gate else None
        routing = None if self.rule is None or gate else self.rule.new_state()
        more: dict[str, Any] = {"routing": routing, "adapter": own if adapter is None else adapter}
        return CacheSequence(self.config, **more) if self.kv is None else PagedSequence(self.kv, **more)

    def prefill(
        self, sequence: PagedSequence | CacheSequence, ids: Sequence[int], on_chunk: Callable[[int], None] | None = None
    ) -> Tensor:
        """Append `ids` (at least one) to the sequence; float32 logits [V] after the last of them.

        `on_chunk(tokens done)` is called between chunks; what it raises ends the prefill; the sequence stays usable.
        Without the paged cache chunks end at multiples of `prefill_chunk` in the sequence: other cuts would change the
        last bits of the numbers.
        """
        if not ids:
            raise OptionError("there is no token to process", remedy="give a prompt")
        self._check_room(sequence, len(ids))
        logits = torch.empty(0)
        done = 0
        while done < len(ids):
            past_cut = 0 if self.kv is not None else sequence.length % self.prefill_chunk
            chunk = ids[done : done + self.prefill_chunk - past_cut]
            done += len(chunk)
            logits = self.advance([Part(sequence, chunk, wants_logits=done == len(ids))])
            if on_chunk is not None and done < len(ids):
                on_chunk(done)
        return logits[0]

    def decode(self, sequences: Sequence[PagedSequence | CacheSequence], ids: Sequence[int]) -> Tensor:
        """One token for each sequence: ids [B] -> float32 logits [B, V]."""
        return self.advance([Part(s, [token], decode=True) for s, token in zip(sequences, ids, strict=True)])

    def gate_logits(self, sequence: PagedSequence, token: int) -> Tensor:
        """What the gates' own routes would say after one more token of a sequence under a rule: float32 [V].

        A whole forward pass, of which nothing remains: the sequence does not grow, no rule is asked, no use is counted,
        and the experts that it lacks pass through the ring. Needs the paged cache.
        """
        assert self.kv is not None, "only the paged cache can be written twice"
        self._check_room(sequence, 1)
        sequence.reserve(1)
        self._begin([Part(sequence, [token], decode=True)], asks_rule=False)
        self.step.rows, self.step.passing = Rows(self.step.index + 1), True
        try:
            return self._paged_step([sequence], [[token]], [0])[0]
        finally:
            self.step.passing = False

    def advance(self, parts: Sequence[Part]) -> Tensor:
        """Append the tokens of several sequences in one step: float32 logits [W, V] of the W parts that want them, in
        order. Logits do not depend on what else is in the step.

        With the paged cache it is one forward pass, which asks for the union of its experts once; when it raises, no
        sequence has grown and the same step may be tried again. With transformers' own caches the parts run one after
        another; when that raises, earlier parts have grown and the failed part's sequence must be closed.
        """
        for part in parts:
            self._check_room(part.sequence, len(part.ids))
        started = time.perf_counter_ns()
        logits = self._flat(parts) if self.kv is not None else self._in_turn(parts)
        self._account(parts, time.perf_counter_ns() - started)
        return logits

    def _flat(self, parts: Sequence[Part]) -> Tensor:
        """All parts as one paged step, answers first."""
        order = sorted(range(len(parts)), key=lambda index: not parts[index].decode)
        flat = [parts[index] for index in order]
        for part in flat:
            part.sequence.reserve(len(part.ids))
        ends = list(accumulate(len(part.ids) for part in flat))
        wanting = [row for row, part in enumerate(flat) if part.wants_logits]
        self._begin(flat)
        logits = self._paged_step(
            [part.sequence for part in flat], [part.ids for part in flat], [ends[row] - 1 for row in wanting]
        )
        for part in flat:
            part.sequence.append(list(part.ids))
        self._end()
        asked = [order[row] for row in wanting]
        if asked != sorted(asked):
            logits = logits[torch.tensor(asked).argsort()]
        return logits

    def _in_turn(self, parts: Sequence[Part]) -> Tensor:
        rows = [torch.empty(0, self.vocab_size)]
        for part in parts:
            self._begin([part])
            ids, keep = torch.tensor([list(part.ids)]), [len(part.ids) - 1]
            logits = self._forward(ids, None, keep, cache=part.sequence.cache, use_cache=True)
            part.sequence.append(list(part.ids))
            self._end()
            if part.wants_logits:
                rows.append(logits)
        return torch.cat(rows)

    def _begin(self, parts: Sequence[Part], asks_rule: bool = True) -> None:
        self.step.decode_tokens = sum(len(part.ids) for part in parts if part.decode)
        self.step.phase = "decode" if all(part.decode for part in parts) else "prefill"
        self.queue.allow(self.depth if len(parts) == 1 else self.queue.depth)
        if self.rule is not None and asks_rule:
            self.step.rows = rows_of(parts, self.step.index + 1)
            if self.rule.wants_tokens:
                self._show_tokens(torch.tensor([t for part in parts for t in part.ids], dtype=torch.int64))
            for layer, experts in self.rule.before_step(self.step.rows):
                self._streamed[layer].stage(experts)
        if self.mode.loras:
            self.step.lora = lora_rows(parts)

    @torch.inference_mode()
    def _show_tokens(self, ids: Tensor) -> None:
        """To the rule: the step's tokens, flat, as the model's embedding gives them."""
        embed = self.model.get_input_embeddings()
        assert isinstance(embed, nn.Module)
        self.step.rows = replace(self.step.rows, embedded=embed(self._checked(ids)).float())

    def _end(self) -> None:
        """The step is done and its sequences have grown."""
        if self.rule is None:
            return
        self.rule.after_step(self.step.rows)
        for streamed in self._streamed:
            if streamed.waits:
                streamed.stage_coming()

    def _account(self, parts: Sequence[Part], spent_ns: int) -> None:
        """Time of a mixed step goes to prefill and decode by their tokens."""
        tokens = sum(len(part.ids) for part in parts)
        decoded = sum(len(part.ids) for part in parts if part.decode)
        decode_ns = spent_ns * decoded // tokens
        self._decode_ns, self._decode_tokens = self._decode_ns + decode_ns, self._decode_tokens + decoded
        self._prefill_ns += spent_ns - decode_ns
        self._prefill_tokens += tokens - decoded

    def _check_room(self, sequence: PagedSequence | CacheSequence, tokens: int) -> None:
        if sequence.length + tokens > self.options.ctx_size:
            raise OptionError(
                "the prompt does not fit the context",
                where="--ctx-size",
                expected=f"at most {self.options.ctx_size} tokens",
                got=sequence.length + tokens,
                remedy="give a larger --ctx-size, or a shorter prompt",
            )

    def _paged_step(
        self,
        sequences: Sequence[Any],
        parts: Sequence[Sequence[int]],
        keep: list[int] | None,
        starts: list[int] | None = None,
    ) -> Tensor:
        """Run the tokens of several sequences flat; their blocks must be reserved. Logits of the rows in `keep`."""
        step, count = self.step, len(sequences)
        assert self.kv is not None
        step.kv_base = self.kv.base
        widest = max(len(s.blocks) for s in sequences)
        table = torch.zeros(count, widest, dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
        step.block_table = table
        positions = [s.length + i for s, part in zip(sequences, parts, strict=True) for i in range(len(part))]
        owners = [row for row, part in enumerate(parts) for _ in part]
        step.pos_of_token = torch.tensor(positions, dtype=torch.int32)
        step.seq_of_token = torch.tensor(owners, dtype=torch.int32)
        step.start_of_seq = torch.tensor(starts or [0] * count, dtype=torch.int32)
        ids = torch.tensor([[token for part in parts for token in part]])
        return self._forward(ids, torch.tensor([positions]), keep, attention_mask=self._no_mask, use_cache=False)

    @torch.inference_mode()
    def _forward(self, ids: Tensor, positions: Tensor | None, keep: list[int] | None, **kwargs: Any) -> Tensor:
        self._checked(ids)
        self.step.index += 1
        started = time.monotonic_ns()
        rows: Any = 0 if keep is None else torch.tensor(keep, dtype=torch.int64)
        torch.set_num_threads(1 if self.kv is not None and ids.numel() <= FEW_TOKENS else self._threads)
        try:
            logits = self.model(input_ids=ids, position_ids=positions, logits_to_keep=rows, **kwargs).logits
        finally:
            torch.set_num_threads(self._threads)
        if self.recorder is not None and not self.step.passing:
            phase = Phase.DECODE if self.step.phase == "decode" else Phase.PREFILL
            now, rss = time.monotonic_ns(), 0
            if now > self._rss_due_ns:
                rss, self._rss_due_ns = budget.resident_bytes_now(), now + RSS_EVERY_NS
            self.recorder.step(self.step.index, phase, ids.numel(), started, now, rss)
        return logits.squeeze(0) if keep is not None else logits

    def _checked(self, ids: Tensor) -> Tensor:
        vocabulary = self.config.vocab_size
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
            raise OptionError(
                "a token id is outside the vocabulary",
                expected=f"0 to {vocabulary - 1}",
                got=(int(ids.min()), int(ids.max())),
            )
        return ids

    # ---- whole-sequence logits ---------------------------------------------------------------------------------------

    def logits(
        self,
        ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        prompt_tokens: int | None = None,
        *,
        gate: bool = False,
    ) -> Tensor:
        """Teacher-forced logits: ids int64 [B, T] -> float32 [B, T, V].

        attention_mask: 1 for real tokens; padding may stand on either side. Positions count from the left edge, as
        transformers does when it is given a mask alone. Rows of padding tokens mean nothing. prompt_tokens: how many
        of each row's real tokens are prompt to a routing rule, the others answer; None: all. gate: by the
        gates' own routes, whatever rule there is.
        """
        return forced_logits(self, ids_BT, attention_mask_BT, prompt_tokens, gate)

    # ---- account -----------------------------------------------------------------------------------------------------

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.generation_config.get("eos_token_id")
        if eos is None:
            eos = self.config.eos_token_id
        return tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (eos,))

    @property
    def adapter_fingerprint(self) -> str | None:
        return None if self.mode.adapter is None else self.mode.adapter.fingerprint

    def reusable(self, sequence: PagedSequence | CacheSequence, tokens: int) -> int:
        """How many of a sequence's first tokens a prompt that begins with `tokens` of them may keep."""
        return tokens if self.rule is None else self.rule.reusable(sequence.routing, tokens)

    @property
    def ctx_size(self) -> int:
        return self.options.ctx_size

    @property
    def kv_tokens(self) -> int:
        """How many tokens all sequences together may hold."""
        return self.options.kv_tokens or self.options.ctx_size

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def ledger(self) -> dict[str, Any]:
        """The division of the budget, in bytes."""
        return self.budget.as_dict()

    def counters(self) -> dict[str, Any]:
        """The counters of residency and routing rule: cheap enough to be asked at every step."""
        return self.residency.counters() | ({} if self.rule is None else self.rule.counters())

    def expert_uses(self) -> NDArray[np.int64]:
        """How often each MoE layer chose each expert since loading, one count a (token, choice): int64 [L, E]."""
        return as_array(self._uses)

    def stats(self) -> dict[str, Any]:
        """Counters since loading, with the names of DESIGN section 8, and the process's peak RSS in bytes."""
        return self.counters() | {
            "prefill_tokens": self._prefill_tokens,
            "prefill_ns": self._prefill_ns,
            "decode_tokens": self._decode_tokens,
            "decode_ns": self._decode_ns,
            "load_seconds": self.load_seconds,
            "prefill_chunk": self.prefill_chunk,
            "path": self.options.path,
            "depth": self.depth,
            "device_bytes_per_s": self.device_bytes_per_s,
            "peak_rss_bytes": budget.peak_resident_bytes(),
            "fused": {
                "attention": self.fusion.attention,
                "norms": self.fusion.norms,
                "routers": self.fusion.routers,
                "layers": self.fusion.layers,
                "left": self.fusion.left,
            },
            **({} if self.rule is None else self.rule.about() | {"route_meters": self.rule.figures()}),
        }

    def note_counters(self) -> None:
        """Tell the trace what the rule counted."""
        if self.rule is not None and hasattr(self.recorder, "describe"):
            self.recorder.describe(routing_counters=self.rule.counters() | self.rule.figures())

    def close(self) -> None:
        """Give everything back; the object is of no use afterwards."""
        self.residency.close()
        self.queue.close()
        if self.kv is not None:
            self.kv.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _generation_config(directory: FilePath) -> dict[str, Any]:
    file = directory / "generation_config.json"
    return json.loads(file.read_text()) if file.exists() else {}
