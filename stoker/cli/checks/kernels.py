"""The compiled kernels against the torch reference on random data, on every instruction set that the machine has.

The contract: relative L2 error below 1% of the dequantised float32 product; a row's result independent of its batch.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.cli.checks import Check
from stoker.errors import StokerError
from stoker.native import kernels
from stoker.quant.formats import ExpertLayout, MatrixSpec, PlacedMatrix, WeightFormat
from stoker.quant.reference import Parts, dequantize, quantize

LIMIT = 0.01
FORMATS = (
    WeightFormat("affine", 4, 64), WeightFormat("affine", 4, 32, "f16"), WeightFormat("affine", 8, 64),
    WeightFormat("bf16"),
)  # fmt: skip
_ROWS, _COLS, _TOKENS = 200, 384, 9
_EXPERTS, _EXPERT_WIDTH = 3, 128


def check_kernels(seed: int = 0) -> list[Check]:
    """One Check: every format, matmul and experts, on every instruction set; the one in use is restored afterwards."""
    chosen, errors = kernels.isa(), []
    worst: dict[str, float] = {}
    try:
        for isa in kernels.ISAS:
            try:
                kernels.force_isa(isa)
            except StokerError:
                continue  # not on this machine
            generator = torch.Generator().manual_seed(seed)
            for fmt in FORMATS:
                found = max(matmul_error(fmt, generator), experts_error(fmt, generator))
                worst[isa] = max(worst.get(isa, 0.0), found)
                if not found < LIMIT:
                    errors.append(f"{isa}, {fmt.label()}: relative error {found:.3%}")
    finally:
        kernels.force_isa(chosen)
    data = {"in_use": chosen, "relative_l2": worst}
    if errors:
        remedy = "the compiled part computes wrongly here: reinstall it, or name a set that passes with STOKER_ISA"
        return [Check("kernels", "FAIL", f"wrong results: {'; '.join(errors)}", remedy, data)]
    told = ", ".join(f"{isa} {error:.2%}" for isa, error in worst.items())
    return [
        Check("kernels", "PASS", f"agree with the reference in every format; worst relative error: {told}", data=data)
    ]


def matmul_error(fmt: WeightFormat, generator: torch.Generator) -> float:
    """Relative L2 error of a product; infinite when a token's row depends on the tokens beside it."""
    spec = MatrixSpec(_ROWS, _COLS, fmt)
    parts = quantize(torch.randn(_ROWS, _COLS, generator=generator), fmt)
    x_TC = torch.randn(_TOKENS, _COLS, generator=generator)
    matrix = kernels.Matrix(spec, parts.codes, parts.scales, parts.biases)
    out_TR = kernels.matmul(matrix, x_TC)
    alone_1R = kernels.matmul(matrix, x_TC[3:4].contiguous())
    if not torch.equal(alone_1R[0], out_TR[3]):
        return float("inf")
    return _relative(out_TR, x_TC @ dequantize(parts, spec).T)


def experts_error(fmt: WeightFormat, generator: torch.Generator) -> float:
    """Relative L2 error of whole experts that lie in records as they do in slots; every token uses every expert."""
    up, down = MatrixSpec(_EXPERT_WIDTH, _COLS, fmt), MatrixSpec(_COLS, _EXPERT_WIDTH, fmt)
    layout = ExpertLayout.plan(up, up, down)
    slots, expected, x_TD = [], [], torch.randn(_TOKENS, _COLS, generator=generator)
    for _ in range(_EXPERTS):
        slot, weights = _random_record(layout, generator)
        gate_FD, up_FD, down_DF = weights
        slots.append(slot)
        expected.append((F.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)) @ down_DF.T)
    pairs = _EXPERTS * _TOKENS
    out_PD = torch.empty(pairs, _COLS)
    kernels.Experts(layout, "silu").forward(
        torch.tensor([slot.data_ptr() for slot in slots]),
        torch.arange(0, pairs + 1, _TOKENS, dtype=torch.int32),
        torch.arange(_TOKENS, dtype=torch.int32).repeat(_EXPERTS),
        torch.arange(pairs, dtype=torch.int32),
        x_TD,
        out_PD,
    )
    return _relative(out_PD, torch.cat(expected))


def _random_record(layout: ExpertLayout, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """A record uint8 [record_bytes] of random weights, aligned to 64 bytes, and the float32 matrices that it holds."""
    whole = torch.zeros(layout.record_bytes + 64, dtype=torch.uint8)
    start = -whole.data_ptr() % 64
    record, weights = whole[start : start + layout.record_bytes], []
    for placed in (layout.gate, layout.up, layout.down):
        spec = placed.spec
        parts = quantize(torch.randn(spec.rows, spec.cols, generator=generator) * spec.cols**-0.5, spec.format)
        _place(record, placed, parts)
        weights.append(dequantize(parts, spec))
    return record, weights


def _place(record: Tensor, placed: PlacedMatrix, parts: Parts) -> None:
    for offset, part in ((placed.codes, parts.codes), (placed.scales, parts.scales), (placed.biases, parts.biases)):
        if part is not None:
            octets = part.contiguous().view(torch.uint8).flatten()
            record[offset : offset + len(octets)] = octets


def _relative(got: Tensor, expected: Tensor) -> float:
    error = float((got - expected).norm() / expected.norm())
    return error if error == error else float("inf")
