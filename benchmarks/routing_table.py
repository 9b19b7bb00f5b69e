"""Makes stoker/plan/data/routing.json: hit rates and misses per event against residency, from recorded routes.

    python benchmarks/routing_table.py TRACE [TRACE ...] [--out FILE]

TRACE: .npz with `experts` [L, T, K] or a route .csv (`stoker simulate` reads the same). LRU comes from stack distances
in one pass over everything; the other policies are replayed over fewer tokens. The routes are not kept, these sums are.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from stoker.plan.forecast_routing import strange_uses
from stoker.plan.replay import replay
from stoker.plan.routes import Routes, Stream, load_routes

OUT = Path(__file__).resolve().parents[1] / "stoker/plan/data/routing.json"
SHARES = (1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
OTHER_POLICIES = ("lfru", "decayed-lfu:64", "s3-fifo", "fifo")
OTHER_TOKENS = 1600
WINDOWS = (1, 8, 32, 128, 256, 512, 1024, 2048)
WARM_UP = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    tables = []
    for path in arguments.traces:
        routes = load_routes(path)
        tables.append(table(routes, path))
        print(routes.name, tables[-1]["policies"]["lru"]["hit_rate"], flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(dumped({"command": "benchmarks/routing_table.py", "tables": tables}))


def dumped(body: dict[str, Any]) -> str:
    """One line for each innermost list of numbers."""
    lines = json.dumps(body, indent=1).split("\n")
    text, inside = [], False
    for line in lines:
        number = line.strip().rstrip(",").replace(".", "", 1).replace("e-", "", 1).isdigit()
        text.append(line.strip() if number or (inside and line.strip() in ("]", "],")) else "\n" + line)
        inside = number or line.rstrip().endswith("[")
    return "".join(text).strip() + "\n"


def table(routes: Routes, path: Path) -> dict[str, Any]:
    slots = sorted({max(routes.k, round(share * routes.experts)) for share in SHARES})
    return {
        "name": routes.name,
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "layers": routes.layers,
        "experts": routes.experts,
        "top_k": routes.k,
        "tokens": routes.steps,
        "slots": slots,
        "policies": {
            "lru": lru(routes, slots),
            **{policy: replayed(routes, policy, slots) for policy in OTHER_POLICIES},
        },
        "windows": list(WINDOWS),
        "distinct": [round(distinct(routes, window), 2) for window in WINDOWS],
        "strange": [round(strange_uses(routes, size), 4) for size in slots],
    }


def lru(routes: Routes, slots: list[int]) -> dict[str, Any]:
    """Share of events with 0 .. k misses at each size, all layers together, after the warm-up."""
    counts = np.zeros((len(slots), routes.k + 1))
    for stream in routes.streams:
        misses = lru_misses(stream, slots, int(WARM_UP * routes.steps))
        for row, per_event in enumerate(misses):
            counts[row] += np.bincount(per_event, minlength=routes.k + 1)[: routes.k + 1]
    return rates(counts)


def lru_misses(stream: Stream, slots: list[int], from_step: int) -> list[np.ndarray]:
    """Misses of each counted event at each size: an expert hits where fewer than `slots` others came since its use."""
    recency: list[int] = []
    found: list[list[int]] = [[] for _ in slots]
    first = int(np.searchsorted(stream.step, from_step))
    for index, event in enumerate(stream.events()):
        if index >= first:
            place = {expert: at for at, expert in enumerate(recency)}
            distances = [place.get(expert, 1 << 30) for expert in event]
            for row, size in enumerate(slots):
                found[row].append(sum(distance >= size for distance in distances))
        needed = set(event)
        recency = event + [expert for expert in recency if expert not in needed]
    return [np.array(row) for row in found]


def replayed(routes: Routes, policy: str, slots: list[int]) -> dict[str, Any]:
    part = routes.between(0, OTHER_TOKENS)
    counts = np.zeros((len(slots), routes.k + 1))
    for row, size in enumerate(slots):
        if size >= routes.experts:
            counts[row, 0] = 1
            continue
        outcome = replay(part, policy, size)
        for stream, misses in zip(part.streams, outcome.misses, strict=True):
            counted = misses[np.searchsorted(stream.step, outcome.warm_up_steps) :]
            counts[row] += np.bincount(counted, minlength=routes.k + 1)[: routes.k + 1]
    return rates(counts) | {"tokens": part.steps}


def rates(counts: np.ndarray) -> dict[str, Any]:
    shares = counts / counts.sum(axis=1, keepdims=True)
    k = counts.shape[1] - 1
    hit = 1 - shares @ np.arange(k + 1) / k
    return {
        "hit_rate": [round(float(h), 4) for h in hit],
        "misses_per_event": [[round(float(s), 4) for s in row] for row in shares],
    }


def distinct(routes: Routes, window: int) -> float:
    """Distinct experts that a layer needs in so many tokens one after the other, mean over layers and windows."""
    found = []
    for stream in routes.streams:
        for start in range(0, routes.steps - window + 1, max(window, routes.steps // 8)):
            low, high = np.searchsorted(stream.step, [start, start + window])
            found.append(len(np.unique(stream.experts[stream.starts[low] : stream.starts[high]])))
    return float(np.mean(found)) if found else float(routes.experts)


if __name__ == "__main__":
    main()
