"""Memory and arithmetic as the engine uses them: plain reads, one token, many tokens, attention, the weighted sum.

Weights lie in a huge-page arena several times the last-level cache and are walked through, so that no call finds them
cached. Knows shapes that are typical (2048 wide), no model.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from stoker.native import kernels
from stoker.native.attention import Attention, kv_block_bytes
from stoker.native.io import Arena
from stoker.plan.profile import Kernels
from stoker.quant.formats import ExpertLayout, MatrixSpec, PlacedMatrix, WeightFormat

WORKING_SET_BYTES = 256 << 20
HIDDEN, WIDTH = 2048, 768
A4 = WeightFormat("affine", 4, 64)
DENSE = MatrixSpec(4096, HIDDEN, A4)
EXPERT = ExpertLayout.plan(MatrixSpec(WIDTH, HIDDEN, A4), MatrixSpec(WIDTH, HIDDEN, A4), MatrixSpec(HIDDEN, WIDTH, A4))
EXPERT_MACS, DENSE_MACS = 3 * HIDDEN * WIDTH, 4096 * HIDDEN
DENSE_TOKENS = (1, 8, 32, 128, 512)
EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
EXPERTS_A_CALL = 8
DENSE_BITS, EXPERT_BITS = 16, 16  # how finely the engine rounds activations
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
SHORT, LONG, PREFILL = 64, 8192, 256


def measure(threads: int) -> Kernels:
    """All of it in about four seconds with `threads` threads."""
    before = kernels.threads()
    with torch.inference_mode(), Arena(WORKING_SET_BYTES) as arena:
        fill(arena)
        try:
            reads = {n: _read_rate(arena, n) for n in sorted({1, threads})}
            kernels.set_threads(threads)
            dense, experts = SomeDense(arena), SomeExperts(arena)
            dense_macs = {tokens: dense.macs_s(tokens) for tokens in DENSE_TOKENS}
            expert_macs = {rows: experts.macs_s(EXPERTS_A_CALL, rows) for rows in EXPERT_ROWS}
            return Kernels(
                isa=kernels.isa(),
                read_bytes_s=reads,
                matvec_bytes_s=dense_macs[1] / DENSE_MACS * DENSE.total_bytes,
                experts_bytes_s=expert_macs[1] / EXPERT_MACS * EXPERT.record_bytes,
                dense_macs_s=dense_macs,
                expert_macs_s=expert_macs,
                attention_macs_s=_attention(),
                pair_bytes_s=_combine(),
            )
        finally:
            kernels.set_threads(before)


def median_s(work: Callable[[], object], least: int = 3, seconds: float = 0.12) -> float:
    """Median seconds of a call: at least `least` calls after one that is not counted, until `seconds` are over."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def fill(arena: Arena) -> None:
    """Random codes; the parts that hold scales are sound numbers."""
    memory = arena.tensor(0, arena.nbytes)
    chunk = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    for start in range(0, arena.nbytes, chunk.numel()):
        memory[start : start + chunk.numel()] = chunk[: arena.nbytes - start]


def _scale(memory: torch.Tensor, placed: PlacedMatrix, base: int) -> None:
    for offset, value in ((placed.scales, 0.01), (placed.biases, -0.08)):
        part = memory[base + offset : base + offset + placed.spec.scales_bytes]
        part.view(torch.bfloat16).fill_(value)


def _read_rate(arena: Arena, threads: int) -> float:
    kernels.set_threads(threads)
    return WORKING_SET_BYTES / median_s(lambda: kernels.read_once(arena.address, WORKING_SET_BYTES), seconds=0.2)


class SomeDense:
    """Dense matrices back to back, each multiplied once a pass."""

    def __init__(self, arena: Arena) -> None:
        memory, self.matrices = arena.tensor(0, arena.nbytes), []
        codes, scales = DENSE.codes_bytes, DENSE.scales_bytes
        for i in range(arena.nbytes // DENSE.total_bytes):
            base = i * DENSE.total_bytes
            _scale(memory, PlacedMatrix(DENSE, 0, codes, codes + scales), base)
            ends = [base, base + codes, base + codes + scales, base + codes + 2 * scales]
            parts = [memory[a:b] for a, b in itertools.pairwise(ends)]
            self.matrices.append(kernels.Matrix(DENSE, *parts, activation_bits=DENSE_BITS))
        self.next = 0

    def macs_s(self, tokens: int) -> float:
        x, out, calls = torch.randn(tokens, HIDDEN), torch.empty(tokens, DENSE.rows), max(1, 64 // tokens)

        def work() -> None:
            for _ in range(calls):
                self.product(x, out)

        return calls * tokens * DENSE_MACS / median_s(work)

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The next matrix times [T, HIDDEN]."""
        kernels.matmul(self.matrices[self.next % len(self.matrices)], x, out)
        self.next += 1


class SomeExperts:
    """Experts that follow each other through the arena."""

    def __init__(self, arena: Arena) -> None:
        memory, self.base = arena.tensor(0, arena.nbytes), arena.address
        self.count, self.next = arena.nbytes // EXPERT.record_bytes, 0
        for i in range(self.count):
            for placed in (EXPERT.gate, EXPERT.up, EXPERT.down):
                _scale(memory, placed, i * EXPERT.record_bytes)
        self.kernel = kernels.Experts(EXPERT, "silu", activation_bits=EXPERT_BITS)

    def macs_s(self, n_experts: int, rows: int) -> float:
        total = n_experts * rows
        order = torch.arange(total, dtype=torch.int32)
        starts = torch.arange(0, total + 1, rows, dtype=torch.int32)
        x, out, calls = torch.randn(max(rows, 8), HIDDEN), torch.empty(total, HIDDEN), max(1, 64 // total)
        token = order % x.shape[0]

        def work() -> None:
            for _ in range(calls):
                slots = [self.base + (self.next + i) % self.count * EXPERT.record_bytes for i in range(n_experts)]
                self.next += n_experts
                self.kernel.forward(torch.tensor(slots), starts, token, order, x, out)

        return calls * total * EXPERT_MACS / median_s(work)

    def one_token(self, n_experts: int) -> None:
        """The next experts, each once for one token, in one call."""
        slots = [self.base + (self.next + i) % self.count * EXPERT.record_bytes for i in range(n_experts)]
        self.next += n_experts
        order, starts = torch.arange(n_experts, dtype=torch.int32), torch.arange(n_experts + 1, dtype=torch.int32)
        x, out = torch.zeros(1, HIDDEN), torch.empty(n_experts, HIDDEN)
        self.kernel.forward(torch.tensor(slots), starts, torch.zeros_like(order), order, x, out)


def _attention() -> dict[str, float]:
    """Scores and values alone: what a longer context, or a longer prompt, adds to the projections."""
    with Arena(LONG // 64 * kv_block_bytes(1, KV_HEADS, HEAD_DIM)) as cache:
        block = _Block(cache)
        decode_s = block.seconds(LONG - 1, 1) - block.seconds(SHORT - 1, 1)
        late_s, early_s = block.seconds(LONG - PREFILL, PREFILL), block.seconds(0, PREFILL)
    width = HEADS * HEAD_DIM
    more = PREFILL * (LONG - PREFILL)
    return {
        "decode": 2 * width * (LONG - SHORT) / max(decode_s, 1e-6),
        "prefill": 2 * width * more / max(late_s - early_s, 1e-6),
    }


class _Block:
    """One attention layer over a cache of LONG positions that is all zeros but for what is appended."""

    def __init__(self, cache: Arena) -> None:
        def matrix(rows: int, cols: int) -> kernels.Matrix:
            spec = MatrixSpec(rows, cols, A4)
            parts = [torch.zeros(spec.codes_bytes, dtype=torch.uint8)]
            parts += [torch.full((spec.scales_bytes // 2,), v, dtype=torch.bfloat16) for v in (0.01, -0.08)]
            return kernels.Matrix(spec, *parts, activation_bits=DENSE_BITS)

        self.cache = cache
        width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.layer = Attention(
            matrix(width, HIDDEN), matrix(kv_width, HIDDEN), matrix(kv_width, HIDDEN), matrix(HIDDEN, width),
            n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM, layer=0, n_layers=1,
        )  # fmt: skip

    def seconds(self, first: int, tokens: int) -> float:
        x, out = torch.randn(tokens, HIDDEN), torch.empty(tokens, HIDDEN)
        cos, sin = torch.ones(tokens, HEAD_DIM), torch.zeros(tokens, HEAD_DIM)
        table = torch.arange(LONG // 64, dtype=torch.int32)[None]
        zeros = torch.zeros(tokens, dtype=torch.int32)
        positions = torch.arange(first, first + tokens, dtype=torch.int32)
        start = torch.zeros(1, dtype=torch.int32)
        return median_s(
            lambda: self.layer.forward(x, cos, sin, self.cache.address, table, zeros, positions, start, out), least=2
        )


def _combine() -> float:
    """Bytes of experts' outputs that the weighted sum reads a second."""
    tokens, k = 256, 8
    pairs, weights, out = torch.randn(tokens * k, HIDDEN), torch.rand(tokens, k), torch.empty(tokens, HIDDEN)
    return pairs.numel() * 4 / median_s(lambda: kernels.combine(pairs, weights, out))
