"""Routes as the simulator wants them: for each pool the stream of events, each event the set of experts that it needs.

Reads .npz arrays, stoker traces and BigMoeOnEdge route CSVs. Owns no policy and no clock; imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from stoker.errors import OptionError, TraceError
from stoker.trace.events import Phase
from stoker.trace.reader import Trace, is_trace

SYNTHETIC, SYNTHETIC_TOKENS = "synthetic:", 8000


@dataclass(frozen=True)
class Stream:
    """The events of one pool in order. Event i needs `experts[starts[i]:starts[i + 1]]`, unique, strongest first.

    step: int64 [events], the token (or batch step) of each; order: int64 [events], place among all events of the run.
    """

    pool: int
    layers: tuple[int, ...]
    experts: np.ndarray  # int32 [sum of event sizes]
    starts: np.ndarray  # int64 [events + 1]
    step: np.ndarray
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    @property
    def needed(self) -> np.ndarray:
        """How many experts each event needs, int64 [events]."""
        return np.diff(self.starts)

    @property
    def event_of(self) -> np.ndarray:
        """The event of each entry of `experts`."""
        return np.repeat(np.arange(len(self)), self.needed)

    def events(self) -> list[list[int]]:
        """Every event as a list of plain integers: what policies are fed."""
        flat, starts = self.experts.tolist(), self.starts.tolist()
        return [flat[low:high] for low, high in pairwise(starts)]

    def between(self, first_step: int, end_step: int) -> "Stream":
        """The part with first_step <= step < end_step."""
        low, high = np.searchsorted(self.step, [first_step, end_step])
        cut = slice(self.starts[low], self.starts[high])
        starts = self.starts[low : high + 1] - self.starts[low]
        return Stream(self.pool, self.layers, self.experts[cut], starts, self.step[low:high], self.order[low:high])


@dataclass(frozen=True)
class Routes:
    """One run: a stream a pool. `experts` is the size of the largest pool, `k` the most experts that an event needs."""

    name: str
    streams: tuple[Stream, ...]
    experts: int
    steps: int

    @property
    def layers(self) -> int:
        return sum(len(stream.layers) for stream in self.streams)

    @property
    def k(self) -> int:
        return max(int(stream.needed.max(initial=0)) for stream in self.streams)

    @property
    def demand_per_step(self) -> int:
        """Most experts that one step needs over all pools: the cliff of a shared cache."""
        total = np.zeros(self.steps, np.int64)
        for stream in self.streams:
            np.add.at(total, stream.step, stream.needed)
        return int(total.max(initial=0))

    def between(self, first_step: int, end_step: int) -> "Routes":
        """Steps first_step to end_step - 1, numbered from 0."""
        parts = [stream.between(first_step, end_step) for stream in self.streams]
        moved = tuple(
            Stream(part.pool, part.layers, part.experts, part.starts, part.step - first_step, part.order)
            for part in parts
        )
        return Routes(self.name, moved, self.experts, max(0, min(end_step, self.steps) - first_step))


def from_array(experts_LTK: np.ndarray, name: str = "routes", n_experts: int | None = None) -> Routes:
    """Routes of one token a step from integers [L, T, K], each layer its own pool, strongest expert first."""
    if experts_LTK.ndim != 3 or experts_LTK.size == 0 or experts_LTK.min() < 0:
        raise TraceError(
            "routes have a wrong shape", where=name, expected="integers [L, T, K] >= 0", got=experts_LTK.shape
        )
    if not np.issubdtype(experts_LTK.dtype, np.integer):
        raise TraceError("routes are not whole numbers", where=name, expected="integers", got=experts_LTK.dtype)
    ordered = np.sort(experts_LTK, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TraceError("a token names an expert twice", where=name, expected="distinct ids along the last axis")
    layers, tokens, k = experts_LTK.shape
    starts, step = np.arange(tokens + 1) * k, np.arange(tokens)
    flat = np.ascontiguousarray(experts_LTK.reshape(layers, -1), dtype=np.int32)
    streams = tuple(Stream(i, (i,), flat[i], starts, step, step * layers + i) for i in range(layers))
    found = int(experts_LTK.max()) + 1
    return Routes(name, streams, n_experts or (1 << (found - 1).bit_length() if found > 1 else 1), tokens)


def load_routes(path: str | Path) -> Routes:
    """Routes of one file: .npz with `experts` [L, T, K], a BigMoeOnEdge .csv, or a stoker trace (its decode steps); or
    of the generator: `synthetic:PRESET[:TOKENS[:SEED]]`, with the shape of the preset.

    Raises TraceError naming the file where it is none of these.
    """
    if str(path).startswith(SYNTHETIC):
        return _generated(str(path))
    path = Path(path)
    if path.suffix in (".npz", ".csv") and not path.is_file():
        raise TraceError("no such file", where=str(path))
    if path.suffix == ".npz":
        return from_array(_npz(path), path.stem)
    if path.suffix == ".csv":
        return _from_csv(path)
    if is_trace(path):
        return from_trace(Trace(path))
    raise TraceError(
        "holds no routes" if path.exists() else "no such file",
        where=str(path),
        expected="a stoker trace, an .npz with `experts` [L, T, K], or a route .csv",
    )


def _generated(name: str) -> Routes:
    from stoker.plan.synthetic import generate

    preset, *numbers = name.removeprefix(SYNTHETIC).split(":")
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise OptionError("cannot be read", where=name, expected=f"{SYNTHETIC}PRESET[:TOKENS[:SEED]]", got=name)
    tokens, seed = (*map(int, numbers), *(SYNTHETIC_TOKENS, 0)[len(numbers) :])
    return from_array(generate(preset, tokens, seed=seed).experts_LTK, name.replace(":", "-"), 128)


def _npz(path: Path) -> np.ndarray:
    try:
        with np.load(path) as archive:
            return archive["experts"]
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise TraceError(
            "holds no routes", where=str(path), expected="an array `experts` [L, T, K]", got=error
        ) from error


def from_trace(trace: Trace) -> Routes:
    """The decode steps of a trace. A step with several sequences is one event a layer: the union of what they need."""
    steps, rows = trace.table("step"), trace.table("layer")
    decode = np.unique(steps["step"][steps["phase"] == Phase.DECODE])
    chosen = np.flatnonzero(np.isin(rows["step"], decode))
    if len(chosen) == 0:
        raise TraceError("holds no decode steps", where=str(trace.path), expected="a run that generated tokens")
    experts = trace.column("route.experts")
    streams = []
    for pool in np.unique(rows["pool"][chosen]):
        of_pool = chosen[rows["pool"][chosen] == pool]
        lows = rows["route_start"][of_pool]
        highs = lows + (rows["tokens"] * rows["k"])[of_pool]
        sets = [_unique_in_order(experts[low:high]) for low, high in zip(lows, highs, strict=True)]
        layers = tuple(np.unique(rows["layer"][of_pool]).tolist())
        step = np.searchsorted(decode, rows["step"][of_pool])
        streams.append(_stream(int(pool), layers, sets, step, of_pool))
    declared = trace.about.get("experts")
    size = int(declared) if declared else max(int(stream.experts.max()) + 1 for stream in streams)
    return Routes(trace.path.stem, tuple(streams), size, len(decode))


def _unique_in_order(experts: np.ndarray) -> np.ndarray:
    values, first = np.unique(experts, return_index=True)
    return values[np.argsort(first)]


def _stream(
    pool: int, layers: tuple[int, ...], sets: Sequence[np.ndarray], step: np.ndarray, order: np.ndarray
) -> Stream:
    starts = np.concatenate([[0], np.cumsum([len(one) for one in sets])]).astype(np.int64)
    return Stream(pool, layers, np.concatenate(sets).astype(np.int32), starts, step, order)


def _from_csv(path: Path) -> Routes:
    """BigMoeOnEdge's route_trace v1: `turn,phase,step,layer,slot,expert,...`, phase 1 is decode."""
    lines = path.read_text().splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith("turn,")), None)
    if not lines or not lines[0].startswith("# route_trace v1") or header is None:
        raise TraceError("is no route trace", where=str(path), expected="# route_trace v1", got=lines[:1])
    names = lines[header].split(",")
    table = np.loadtxt(
        lines[header + 1 :], delimiter=",", usecols=[names.index(n) for n in _CSV_COLUMNS], dtype=np.int64
    )
    turn, _, step, layer, slot, expert = table[table[:, 1] == _CSV_DECODE].T
    order = np.lexsort((slot, layer, step, turn))
    turn, step, layer, expert = turn[order], step[order], layer[order], expert[order]
    token = np.unique(turn * (1 << 32) + step, return_inverse=True)[1]
    layers = int(layer.max()) + 1
    event = token * layers + layer
    streams = []
    for index in range(layers):
        mine = layer == index
        events, first = np.unique(event[mine], return_index=True)
        sets = np.split(expert[mine], first[1:])
        streams.append(_stream(index, (index,), sets, events // layers, events))
    size = next((int(part.split("=")[1]) for part in lines[1].split() if part.startswith("n_expert=")), 0)
    return Routes(path.stem.removesuffix(".route"), tuple(streams), size or int(expert.max()) + 1, int(token.max()) + 1)


_CSV_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
_CSV_DECODE = 1
