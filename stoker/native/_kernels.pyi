from collections.abc import Sequence

# Native kernels. Addresses are integers; use stoker/native/kernels.py and stoker/native/attention.py.
def set_threads(n: int) -> None: ...
def threads() -> int: ...
def isa() -> str: ...
def force_isa(name: str) -> bool: ...
def scratch_bytes() -> int: ...
def read_once(address: int, nbytes: int) -> int: ...

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...

def make_matrix(
    kind: str,
    bits: int,
    group: int,
    scale_is_half: bool,
    rows: int,
    cols: int,
    codes: int,
    scales: int,
    biases: int,
    row_bias: int,
    activation_bits: int,
) -> Matrix: ...
def matmul(matrix: Matrix, x: int, T: int, out: int) -> None: ...

class LowRank:
    pass

def make_low_rank(a: Matrix, b: Matrix) -> LowRank: ...
def low_rank_add(pair: LowRank, x: int, T: int, y: int) -> None: ...
def gather_rows(matrix: Matrix, ids: int, n: int, out: int) -> None: ...

class PlacedMatrix:
    pass

def make_placed(shape: Matrix, codes: int, scales: int, biases: int, row_bias: int) -> PlacedMatrix: ...

class Experts:
    def __init__(
        self, arg0: PlacedMatrix, arg1: PlacedMatrix, arg2: PlacedMatrix, arg3: int, arg4: float, arg5: float, /
    ) -> None: ...
    def forward(
        self,
        n_experts: int,
        addresses: int,
        row_start: int,
        n_rows: int,
        token_of_row: int,
        out_row: int,
        x: int,
        n_tokens: int,
        out: int,
        n_out: int,
    ) -> None: ...
    def forward_token(self, addresses: Sequence[int], x: int, weights: int, residual: int, out: int) -> None: ...

def combine(pairs: int, weights: int, T: int, K: int, D: int, out: int) -> None: ...
def rms_norm(x: int, weight: int, T: int, D: int, eps: float, unit_offset: bool, out: int) -> None: ...
def topk_softmax(logits: int, T: int, E: int, k: int, renormalise: bool, weights: int, experts: int) -> None: ...

class AttentionStep:
    def __init__(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        /,
    ) -> None: ...

class Adapted:
    def __init__(self) -> None: ...
    def append(
        self, first: int, last: int, q: LowRank | None, k: LowRank | None, v: LowRank | None, o: LowRank | None
    ) -> None: ...

class AttentionLayer:
    def forward(self, step: AttentionStep, x: int, out: int, adapted: Adapted | None) -> int: ...
    def scratch_bytes(self, T: int) -> int: ...

class LayerFront:
    def forward(
        self,
        step: AttentionStep,
        x: int,
        hidden: int,
        normed: int,
        logits: int,
        weights: int,
        experts: int,
        adapted: Adapted | None,
    ) -> int: ...

def make_front(
    attention: AttentionLayer,
    before: int,
    before_eps: float,
    before_offset: bool,
    after: int,
    after_eps: float,
    after_offset: bool,
    router: Matrix | None,
    top_k: int,
    renormalise: bool,
) -> LayerFront: ...
def make_attention(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    layer: int,
    n_layers: int,
    scale: float,
    norm: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    unit_offset: bool,
    output_gate: bool,
    window: int,
    sinks: int,
) -> AttentionLayer: ...

class PrerouterHead:
    def logits(self, hidden: int, used: int, before: int, T: int, K: int, logits: int) -> None: ...
    def route(
        self,
        hidden: int,
        used: int,
        before: int,
        T: int,
        K: int,
        top_k: int,
        renormalise: bool,
        weights: int,
        experts: int,
    ) -> None: ...

def make_prerouter_head(dense: Matrix, out: Matrix, table: int, table_is_bf16: bool) -> PrerouterHead: ...

class PinnedRoster:
    def __init__(self, member: int, count: int, last: int, E: int, K: int) -> None: ...

class PinnedStep:
    def __init__(self, rosters: list[list[PinnedRoster | None]], renormalise: list[bool]) -> None: ...
    def experts(self) -> list[int]: ...
    def route(self, layer: int, logits: int, probabilities: int, gate: int, gate_weights: int) -> bool: ...
    def begin(self, used: int, weights: int, free: int) -> None: ...
    def skip(self, layer: int) -> None: ...
    def finish(self, row: int, number: int) -> list[tuple[int, float, float, int]]: ...
    def take_meters(self) -> tuple[int, int, int, float, float]: ...

def held_shares(scores: int, free: int, member: int, T: int, K: int, held: int) -> None: ...
