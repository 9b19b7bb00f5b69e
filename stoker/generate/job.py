"""What a server asks of the batcher and what it is told: jobs, events and the state of the engine, as frozen data.

Knows requests and results; no threads, no runtime. Events of one job come in this order: Progress*, Piece*, then
exactly one of Done and Failed.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.generate.report import Result
from stoker.generate.request import Request
from stoker.generate.sampler import Sample


class Constraint(Protocol):
    """What the next token of one output may be: a grammar at work. Has state; serves one output."""

    def mask(self) -> NDArray[np.uint32] | None:
        """Packed bits [ceil(V / 32)], low bit first, 1 = allowed; None: every token is."""

    def accept(self, token: int) -> None:
        """`token` was chosen. Not told of the end-of-text token that ends the output."""

    @property
    def ended(self) -> bool:
        """Nothing but the end may follow: the output ends with reason "stop"."""


@dataclass(frozen=True)
class Job:
    """One request with what surrounds it.

    skip_special_tokens: False where marks of tools or reasoning are special tokens that a parser must see. cache:
    whether the prefix cache may be used and fed. adapter: the name of a LoRA that the model was loaded with; None: the
    model's own.
    """

    request: Request
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    cache: bool = True
    adapter: str | None = None


@dataclass(frozen=True)
class Progress:
    """Prompt tokens done, of `total`; `cached` of them were not computed. Sent at admission and after each chunk."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Piece:
    """Text that became certain and the tokens chosen since the last piece (with logprobs when asked for).

    Sent once for each token, even when its text is empty; text held back until the end comes with no token.
    """

    text: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Done:
    """The end, also of a cancelled job."""

    result: Result


@dataclass(frozen=True)
class Failed:
    """The end of a job that could not be finished."""

    error: StokerError


Event = Progress | Piece | Done | Failed


@dataclass(frozen=True)
class Row:
    """One job as the engine sees it: tokens, and seconds since it was submitted."""

    id: int
    phase: Literal["waiting", "prefill", "decode"]
    prompt_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_s: float


@dataclass(frozen=True)
class Status:
    """The engine now. Rates are over the last seconds, all jobs together; error: why it is not healthy."""

    running: int
    waiting: int
    parallel: int
    queue: int
    kv_used_tokens: int
    kv_total_tokens: int
    decode_tok_s: float
    prefill_tok_s: float
    healthy: bool
    draining: bool
    error: str | None
    sequences: tuple[Row, ...]
