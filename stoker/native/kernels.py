"""The door to the quantised kernels: checks shapes, dtypes and contiguity, then passes raw addresses. Knows no model.

All arithmetic is f32 in and out; weights are in the tile16 layout of stoker/quant/formats.py. An output row is the same
function, bit for bit, of its activation row and the weights, whatever the batch and the number of threads.
The GIL is released inside. Calls must come from one thread at a time to be fast; from several they are safe.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.errors import OptionError
from stoker.native import _kernels
from stoker.quant.formats import ExpertLayout, MatrixSpec, PlacedMatrix

ISAS = ("avx512", "avx2", "portable")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
_SCALE_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_RAW_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32)


def set_threads(n: int) -> None:
    """Threads of every kernel from the next call on, the caller included."""
    if n < 1:
        raise OptionError("the number of threads must be at least 1", expected="1 or more", got=n)
    _kernels.set_threads(n)


def threads() -> int:
    return _kernels.threads()


def isa() -> str:
    """The instruction set in use: "avx512" (with VNNI and BF16), "avx2" or "portable". STOKER_ISA forces one."""
    try:
        return _kernels.isa()
    except RuntimeError as error:
        raise OptionError(
            str(error), where="STOKER_ISA", remedy="unset STOKER_ISA, or name one of " + ", ".join(ISAS)
        ) from None


def force_isa(name: str) -> None:
    """Use another instruction set from now on; the tests and `stoker doctor` compare them."""
    if not _kernels.force_isa(name):
        raise OptionError("unknown or not available on this machine", where="isa", expected=" | ".join(ISAS), got=name)


def scratch_bytes() -> int:
    """Bytes that the kernels hold for encoded activations, for the memory ledger."""
    return _kernels.scratch_bytes()


def read_once(address: int, nbytes: int) -> int:
    """Read `nbytes` (a multiple of 64) with all threads and plain vector loads; time it to know the memory's rate."""
    return _kernels.read_once(address, nbytes)


class Matrix:
    """One weight matrix [rows, cols] in memory; holds its tensors alive.

    codes, scales, biases: contiguous CPU tensors with the exact bytes of `spec`, in raw integers or the natural dtype.
    row_bias: f32 [rows], added to the product. scales and biases are None unless the format is affine.
    activation_bits: how finely x is rounded. affine: 8, or 16 for twice the arithmetic and 1/256 of the rounding;
    bf16: 8 rounds x to bf16, 16 keeps it in f32 for twice the arithmetic; f32 never rounds, so both are the same.
    """

    def __init__(
        self,
        spec: MatrixSpec,
        codes: Tensor,
        scales: Tensor | None,
        biases: Tensor | None,
        row_bias: Tensor | None = None,
        *,
        activation_bits: int = 8,
    ) -> None:
        self.spec, self.rows, self.cols = spec, spec.rows, spec.cols
        affine = spec.format.kind == "affine"
        if affine != (scales is not None) or affine != (biases is not None):
            raise ValueError(
                f"{spec.format.label()}: scales and biases are given for affine weights, and for those alone"
            )
        _check_bytes("codes", codes, spec.codes_bytes, torch.bfloat16 if spec.format.kind == "bf16" else torch.float32)
        for name, part in (("scales", scales), ("biases", biases)):
            if part is not None:
                _check_bytes(name, part, spec.scales_bytes, _SCALE_DTYPES[spec.format.scale_dtype])
        if row_bias is not None:
            _check("row_bias", row_bias, torch.float32, (spec.rows,))
        self.row_bias = row_bias
        self._tensors = (codes, scales, biases, row_bias)
        addresses = [0 if t is None else t.data_ptr() for t in self._tensors]
        self.native = _native_matrix(spec, addresses, activation_bits)


def matmul(m: Matrix, x_TC: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, cols] f32 times the transpose of w [rows, cols]: f32 [T, rows].

    x is rounded as the matrix's activation_bits say: affine to int8 or int16 in blocks of 32, bf16 to bf16 or not at
    all, f32 not at all. Sums are f32.
    """
    _check("x", x_TC, torch.float32, (None, m.cols))
    n_tokens = x_TC.shape[0]
    if out is None:
        out = torch.empty(n_tokens, m.rows)
    else:
        _check("out", out, torch.float32, (n_tokens, m.rows))
    _kernels.matmul(m.native, x_TC.data_ptr(), n_tokens, out.data_ptr())
    return out


def gather_rows(m: Matrix, ids_T: Tensor) -> Tensor:
    """Rows `ids` (int64 [T]) of the weights, dequantised: f32 [T, cols]. IndexError for an id outside [0, rows)."""
    _check("ids", ids_T, torch.int64, (None,))
    out = torch.empty(ids_T.shape[0], m.cols)
    _kernels.gather_rows(m.native, ids_T.data_ptr(), ids_T.shape[0], out.data_ptr())
    return out


class Experts:
    """The experts of one pool: down(act(gate(x)) * up(x)), records at any addresses.

    activation: silu | gelu (erf) | gelu_tanh | relu | swiglu_oai. swiglu_oai (gpt-oss) clamps the gate above at `limit`
    and up both ways, and gives gate * sigmoid(alpha * gate) * (up + 1); alpha and limit apply to it alone.
    activation_bits: as in Matrix, for gate and up. An affine down always gets act(gate) * up in 16 bits (its heavy tail
    would cost 0.9% in 8); a bf16 down follows activation_bits.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        activation: str,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        activation_bits: int = 8,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise OptionError("unknown activation", expected=" | ".join(ACTIVATIONS), got=activation)
        self.layout, self.activation = layout, activation
        self.width = layout.down.spec.rows
        code = ACTIVATIONS.index(activation)  # the order of the native enumeration
        gate, up, down = (_native_placed(placed, activation_bits) for placed in (layout.gate, layout.up, layout.down))
        self._native = _kernels.Experts(gate, up, down, code, alpha, limit)

    def forward(
        self, addresses: Tensor, row_start: Tensor, token_of_row: Tensor, out_row: Tensor, x_TD: Tensor, out_PD: Tensor
    ) -> None:
        """out[out_row[p]] = expert(x[token_of_row[p]]) for the rows p of each expert.

        addresses: int64 [X], record starts, aligned to 64 bytes, valid during the call.
        row_start: int32 [X + 1]: expert e has the rows row_start[e] to row_start[e + 1].
        token_of_row, out_row: int32 [P].
        x: f32 [T, D]; out: f32 [any, D], not x; rows of out that no p names stay as they are.
        IndexError for an index out of range.
        """
        n_experts, n_rows = addresses.shape[0], token_of_row.shape[0]
        _check("addresses", addresses, torch.int64, (None,))
        _check("row_start", row_start, torch.int32, (n_experts + 1,))
        _check("token_of_row", token_of_row, torch.int32, (None,))
        _check("out_row", out_row, torch.int32, (n_rows,))
        _check("x", x_TD, torch.float32, (None, self.width))
        _check("out", out_PD, torch.float32, (None, self.width))
        self._native.forward(
            n_experts,
            addresses.data_ptr(),
            row_start.data_ptr(),
            n_rows,
            token_of_row.data_ptr(),
            out_row.data_ptr(),
            x_TD.data_ptr(),
            x_TD.shape[0],
            out_PD.data_ptr(),
            out_PD.shape[0],
        )

    def forward_token(self, addresses: Sequence[int], x_1D: Tensor, weights_1K: Tensor, residual_1D: Tensor) -> Tensor:
        """One token: residual + sum over k of weights[k] * expert_k(x), f32 [1, D]; the bits of forward, combine, add.

        addresses: K record starts as in `forward`; IndexError for one that is null or not aligned. x, residual: f32
        [1, D]; weights: f32 [1, K].
        """
        _check("x", x_1D, torch.float32, (1, self.width))
        _check("weights", weights_1K, torch.float32, (1, len(addresses)))
        _check("residual", residual_1D, torch.float32, (1, self.width))
        out = torch.empty_like(residual_1D)
        self._native.forward_token(
            addresses, x_1D.data_ptr(), weights_1K.data_ptr(), residual_1D.data_ptr(), out.data_ptr()
        )
        return out


def combine(pairs: Tensor, weights_TK: Tensor, out_TD: Tensor) -> None:
    """out[t] = sum over k of weights[t, k] * pairs[t * K + k], in the order k = 0..K-1. pairs: f32 [T * K, D]."""
    _check("weights", weights_TK, torch.float32, (None, None))
    n_tokens, k = weights_TK.shape
    _check("out", out_TD, torch.float32, (n_tokens, None))
    _check("pairs", pairs, torch.float32, (n_tokens * k, out_TD.shape[1]))
    _kernels.combine(pairs.data_ptr(), weights_TK.data_ptr(), n_tokens, k, out_TD.shape[1], out_TD.data_ptr())


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """ValueError unless `tensor` is a contiguous CPU tensor of this dtype and shape (None: any length)."""
    actual = tensor.shape
    if tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu and len(actual) == len(shape):
        for want, have in zip(shape, actual, strict=True):  # a loop: this runs ten times a layer
            if want is not None and want != have:
                break
        else:
            return
    wanted = f"contiguous cpu {dtype} {['any' if n is None else n for n in shape]}"
    raise ValueError(
        f"{name}: expected {wanted}, got {tensor.device.type} {tensor.dtype} {list(actual)}, {tensor.stride()}"
    )


def _check_bytes(name: str, tensor: Tensor, nbytes: int, natural: torch.dtype) -> None:
    if tensor.dtype not in _RAW_DTYPES and tensor.dtype != natural:
        raise ValueError(f"{name}: expected {natural} or raw integers, got {tensor.dtype}")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: expected a contiguous CPU tensor, got {tensor.device.type} with strides {tensor.stride()}"
        )
    if tensor.numel() * tensor.element_size() != nbytes:
        raise ValueError(
            f"{name}: expected {nbytes} bytes in tile16 layout, got {tensor.numel() * tensor.element_size()}"
        )


def _native_matrix(spec: MatrixSpec, addresses: Sequence[int], activation_bits: int) -> _kernels.Matrix:
    """addresses: of codes, scales, biases and row_bias; 0 for what is absent. OptionError for a wrong STOKER_ISA."""
    isa()
    fmt = spec.format
    half = fmt.scale_dtype == "f16"
    codes, scales, biases, row_bias = addresses
    return _kernels.make_matrix(
        fmt.kind,
        fmt.bits,
        fmt.group_size,
        half,
        spec.rows,
        spec.cols,
        codes,
        scales,
        biases,
        row_bias,
        activation_bits,
    )


def _native_placed(placed: PlacedMatrix, activation_bits: int) -> _kernels.PlacedMatrix:
    shape = _native_matrix(placed.spec, (0, 0, 0, 0), activation_bits)
    row_bias = -1 if placed.row_bias is None else placed.row_bias
    return _kernels.make_placed(shape, placed.codes, placed.scales, placed.biases, row_bias)
