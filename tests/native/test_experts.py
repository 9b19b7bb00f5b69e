"""The gated MLP over gathered records, combine, threads, fork and STOKER_ISA, against f64 on dequantised weights."""

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from isas import available
from tile16 import random_matrix, random_record, relative_error, worst_element

from stoker.errors import OptionError
from stoker.native import kernels
from stoker.quant.formats import ExpertLayout, MatrixSpec, WeightFormat

A4 = WeightFormat("affine", 4, 64)
FORMATS = [
    A4,
    WeightFormat("affine", 4, 32, "f16"),
    WeightFormat("affine", 4, 128),
    WeightFormat("affine", 8, 64),
    WeightFormat("bf16"),
    WeightFormat("f32"),
]


def make_layout(
    width: int, hidden: int, fmt: WeightFormat, down: WeightFormat | None = None, *, row_bias: bool = False
) -> ExpertLayout:
    gate = MatrixSpec(hidden, width, fmt)
    return ExpertLayout.plan(gate, gate, MatrixSpec(width, hidden, down or fmt), row_bias=row_bias)


def activate(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    g, u = torch.from_numpy(gate), torch.from_numpy(up)
    if name == "swiglu_oai":
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        return (g * torch.sigmoid(1.702 * g) * (u + 1)).numpy()
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": torch.relu,
    }
    return (functions[name](g) * u).numpy()


class Pool:
    """Random experts of one layout, with their f64 forward."""

    def __init__(
        self, layout: ExpertLayout, activation: str, n: int, seed: int = 0, *, activation_bits: int = 8
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.layout, self.activation = rng, layout, activation
        self.records, self.values = zip(*(random_record(layout, rng) for _ in range(n)), strict=True)
        self.native = kernels.Experts(layout, activation, activation_bits=activation_bits)

    def expected(self, expert: int, x: np.ndarray) -> np.ndarray:
        (gate, gate_b), (up, up_b), (down, down_b) = [(w.astype(np.float64), b) for w, b in self.values[expert]]
        x = x.astype(np.float64)
        return activate(self.activation, x @ gate.T + gate_b, x @ up.T + up_b) @ down.T + down_b

    def run(self, rows: list[tuple[int, int]], x: torch.Tensor) -> torch.Tensor:
        """rows: (expert, token), sorted by expert; the result is in the same order."""
        experts = sorted({e for e, _ in rows})
        counts = [sum(e == want for e, _ in rows) for want in experts]
        out = torch.full((len(rows), x.shape[1]), 7.0)
        self.native.forward(
            torch.tensor([self.records[e].data_ptr() for e in experts], dtype=torch.int64),
            torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            torch.tensor([t for _, t in rows], dtype=torch.int32),
            torch.arange(len(rows), dtype=torch.int32),
            x,
            out,
        )
        return out

    def check(self, rows: list[tuple[int, int]], x: torch.Tensor, limit: float) -> None:
        got = self.run(rows, x).numpy()
        want = np.stack([self.expected(e, x[t].numpy()) for e, t in rows])
        assert relative_error(got, want) < limit, (relative_error(got, want), worst_element(got, want))


LIMIT = {"affine": 1e-2, "bf16": 6e-3, "f32": 3e-6}
FINE_LIMIT = {"affine": 1e-4, "bf16": 1e-6, "f32": 3e-6}  # activation_bits=16


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_expert_equals_the_dequantised_mlp(isa: str, fmt: WeightFormat, activation: str) -> None:
    pool = Pool(make_layout(128, 256, fmt, row_bias=activation == "swiglu_oai"), activation, 2)
    x = torch.from_numpy(pool.rng.standard_normal((9, 128)).astype(np.float32))
    pool.check([(0, t) for t in range(9)] + [(1, 4)], x, LIMIT[fmt.kind])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
def test_sixteen_bit_activations(isa: str, fmt: WeightFormat) -> None:
    pool = Pool(make_layout(128, 256, fmt, row_bias=True), "silu", 2, activation_bits=16)
    x = torch.from_numpy(pool.rng.standard_normal((9, 128)).astype(np.float32))
    pool.check([(0, t) for t in range(9)] + [(1, 4)], x, FINE_LIMIT[fmt.kind])


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("n_experts", "rows"),
    [
        (1, [(0, 0)]),
        (8, [(e, 0) for e in range(8)]),
        (1, [(0, t) for t in range(32)]),
        (40, [(e, t) for e in range(40) for t in range(e % 4)]),
        (2, [(0, t % 40) for t in range(700)] + [(1, t % 40) for t in range(900)]),
    ],
    ids=["one", "decode", "many rows", "many experts", "several batches"],
)
def test_shapes_of_work(n_threads: int, n_experts: int, rows: list[tuple[int, int]]) -> None:
    before = kernels.threads()
    kernels.set_threads(n_threads)
    try:
        pool = Pool(make_layout(64, 128, A4), "silu", n_experts)
        x = torch.from_numpy(pool.rng.standard_normal((40, 64)).astype(np.float32))
        pool.check(rows, x, 1e-2)
    finally:
        kernels.set_threads(before)


def test_ragged_and_mixed_formats(isa: str) -> None:
    rows = [(0, 0), (0, 1), (1, 2)]
    bf16, f32, a8 = WeightFormat("bf16"), WeightFormat("f32"), WeightFormat("affine", 8, 32)
    for layout in (make_layout(51, 37, bf16), make_layout(64, 96, A4, a8), make_layout(64, 41, A4, f32)):
        pool = Pool(layout, "silu", 2)
        x = torch.from_numpy(pool.rng.standard_normal((3, layout.gate.spec.cols)).astype(np.float32))
        pool.check(rows, x, 1e-2)
    gate, up = MatrixSpec(64, 128, A4), MatrixSpec(64, 128, a8)
    mixed = Pool(ExpertLayout.plan(gate, up, MatrixSpec(128, 64, A4)), "silu", 2)
    mixed.check(rows, torch.from_numpy(mixed.rng.standard_normal((3, 128)).astype(np.float32)), 1e-2)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label())
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_a_row_does_not_depend_on_its_company(isa: str, fmt: WeightFormat, activation_bits: int) -> None:
    pool = Pool(make_layout(256, 128, fmt), "silu", 3, activation_bits=activation_bits)
    x = torch.from_numpy(pool.rng.standard_normal((37, 256)).astype(np.float32))
    rows = [(e, t) for e in range(3) for t in range(37) if (e + t) % 2 or e == 1]
    before = kernels.threads()
    together = pool.run(rows, x)
    try:
        for n_threads in (1, 2):
            kernels.set_threads(n_threads)
            assert torch.equal(pool.run(rows, x), together)
            for i, (e, t) in enumerate(rows):
                assert torch.equal(pool.run([(e, 0)], x[t : t + 1].clone())[0], together[i])
    finally:
        kernels.set_threads(before)


def test_out_row_scatters_and_leaves_the_rest_alone() -> None:
    pool = Pool(make_layout(64, 64, A4), "silu", 1)
    x = torch.from_numpy(pool.rng.standard_normal((2, 64)).astype(np.float32))
    plain = pool.run([(0, 0), (0, 1)], x)
    out = torch.full((5, 64), 3.0)
    address = torch.tensor([pool.records[0].data_ptr()])
    i32 = torch.int32
    pool.native.forward(
        address,
        torch.tensor([0, 2], dtype=i32),
        torch.tensor([0, 1], dtype=i32),
        torch.tensor([4, 1], dtype=i32),
        x,
        out,
    )
    assert torch.equal(out[4], plain[0])
    assert torch.equal(out[1], plain[1])
    assert torch.equal(out[[0, 2, 3]], torch.full((3, 64), 3.0))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_reported(isa: str, value: float) -> None:
    for fmt in FORMATS:
        pool = Pool(make_layout(128, 128, fmt), "silu", 1)
        x = torch.from_numpy(pool.rng.standard_normal((4, 128)).astype(np.float32))
        clean = pool.run([(0, t) for t in range(4)], x)
        x[2, 5] = value
        dirty = pool.run([(0, t) for t in range(4)], x)
        assert not torch.isfinite(dirty[2]).any()
        assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


def test_experts_refuse_what_does_not_fit() -> None:
    pool = Pool(make_layout(64, 128, A4), "silu", 1)
    i32 = torch.int32
    good = {
        "addresses": torch.tensor([pool.records[0].data_ptr()]),
        "row_start": torch.tensor([0, 1], dtype=i32),
        "token_of_row": torch.tensor([0], dtype=i32),
        "out_row": torch.tensor([0], dtype=i32),
        "x_TD": torch.zeros(1, 64),
        "out_PD": torch.zeros(1, 64),
    }
    pool.native.forward(**good)
    for name, bad in {
        "addresses": torch.tensor([0]),
        "row_start": torch.tensor([0, 2], dtype=i32),
        "token_of_row": torch.tensor([1], dtype=i32),
        "out_row": torch.tensor([-1], dtype=i32),
    }.items():
        with pytest.raises(IndexError):
            pool.native.forward(**{**good, name: bad})
    for name, bad in {
        "row_start": torch.tensor([0, 1]),
        "x_TD": torch.zeros(1, 63),
        "out_PD": torch.zeros(1, 64, dtype=torch.float16),
    }.items():
        with pytest.raises(ValueError, match="expected contiguous"):
            pool.native.forward(**{**good, name: bad})
    with pytest.raises(OptionError, match="unknown activation"):
        kernels.Experts(pool.layout, "swish")
    with pytest.raises(ValueError, match="activation_bits must be 8 or 16"):
        kernels.Experts(pool.layout, "silu", activation_bits=4)
    gate = MatrixSpec(128, 64, A4)
    with pytest.raises(ValueError, match="gate and up"):
        kernels.Experts(ExpertLayout.plan(gate, gate, MatrixSpec(128, 64, A4)), "silu")


@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 8, 64), (300, 4, 200), (3, 1, 5)])
def test_combine_adds_in_order(tokens: int, k: int, width: int) -> None:
    rng = np.random.default_rng(0)
    pairs = rng.standard_normal((tokens * k, width)).astype(np.float32)
    weights = rng.random((tokens, k)).astype(np.float32)
    want = np.zeros((tokens, width), np.float32)
    for j in range(k):
        want += weights[:, j, None] * pairs[j::k]
    out = torch.empty(tokens, width)
    kernels.combine(torch.from_numpy(pairs), torch.from_numpy(weights), out)
    np.testing.assert_array_equal(out.numpy(), want)


def test_calls_from_several_threads_at_once() -> None:
    rng = np.random.default_rng(0)
    m, _, _ = random_matrix(300, 512, A4, rng)
    pool = Pool(make_layout(64, 128, A4), "silu", 2)
    inputs = [torch.from_numpy(rng.standard_normal((4, 512)).astype(np.float32)) for _ in range(4)]
    x = torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32))
    want, want_rows = [kernels.matmul(m, i) for i in inputs], pool.run([(0, 1), (1, 2)], x)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            if not torch.equal(kernels.matmul(m, inputs[i]), want[i]):
                wrong.append(i)
            if not torch.equal(pool.run([(0, 1), (1, 2)], x), want_rows):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _child_product(queue: "multiprocessing.Queue[float]", m: kernels.Matrix, x: torch.Tensor) -> None:
    queue.put(float(kernels.matmul(m, x).sum()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_compute() -> None:
    m, _, _ = random_matrix(300, 512, A4, np.random.default_rng(0))
    x = torch.ones(4, 512)
    want = float(kernels.matmul(m, x).sum())  # the parent's threads run before the fork
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[float] = context.Queue()
    child = context.Process(target=_child_product, args=(queue, m, x))
    child.start()
    assert queue.get(timeout=30) == want
    child.join(30)
    assert child.exitcode == 0


@pytest.mark.parametrize("name", [*available(), "sse9"])
def test_the_environment_forces_an_instruction_set(name: str) -> None:
    code = "from stoker.native import kernels; print(kernels.isa())"
    environment = {**os.environ, "STOKER_ISA": name, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    if name == "sse9":
        assert done.returncode != 0
        assert "STOKER_ISA=sse9 is unknown" in done.stderr
    else:
        assert done.stdout.strip() == name


def test_scratch_is_counted() -> None:
    m, _, _ = random_matrix(16, 512, A4, np.random.default_rng(0))
    kernels.matmul(m, torch.zeros(5000, 512))
    assert kernels.scratch_bytes() >= 5000 * 512
