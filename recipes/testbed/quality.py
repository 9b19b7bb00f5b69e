"""What fewer bits and fewer experts a token cost on the testbed: perplexity on the test split, all else equal.

    python -m recipes.testbed.quality [e32k4 e8k2] [--windows 48]

Writes results/quality.json beside this file. Each row is measured on the same windows; `ratio` is its perplexity over
that of the committed model (16 bits, all chosen experts), with a 95% interval of a paired bootstrap over windows.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from recipes.testbed.data import evaluation_windows
from recipes.testbed.measure import experts_a_token, load, token_losses
from recipes.testbed.model import CONTEXT_TOKENS, SHAPES
from recipes.testbed.quantise import GROUP, round_model
from recipes.testbed.sources import DOMAINS

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "quality.json"
BITS = (16, 8, 4, 3, 2)
RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity under fewer bits and fewer experts a token.")
    parser.add_argument("models", nargs="*", default=sorted(SHAPES), help="which of e32k4, e8k2")
    parser.add_argument("--windows", type=int, default=48, help="test windows of 512 tokens of each domain")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.models:
        results[name] = study(name, options.windows)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def study(name: str, windows: int) -> dict:
    """All settings of one model."""
    ids = {domain: evaluation_windows(domain, "test", CONTEXT_TOKENS, windows) for domain in DOMAINS}
    training = json.loads((HERE / name / "training.json").read_text())
    rows: list[dict] = []
    base: np.ndarray | None = None
    for bits, experts_only, chosen in settings(SHAPES[name].chosen):
        model = load(HERE / name)
        round_model(model, bits, experts_only)
        started = time.monotonic()
        with experts_a_token(model, chosen):
            losses = {domain: token_losses(model, one).mean(1) for domain, one in ids.items()}
        flat = np.concatenate(list(losses.values()))
        base = flat if base is None else base
        row = {"bits": bits, "rounded": "experts" if experts_only else "all matrices", "experts_a_token": chosen}
        row |= {"perplexity": rounded(np.exp(flat.mean())), "by_domain": by_domain(losses), **ratio(flat, base)}
        rows.append(row)
        print(name, row["bits"], row["rounded"], chosen, row["perplexity"], f"{time.monotonic() - started:.0f} s")
    return {
        "tokens_seen": training["tokens_seen"],
        "weights_sha256": training["weights_sha256"],
        "test_tokens": sum(one[:, 1:].numel() for one in ids.values()),
        "format": f"affine, group {GROUP}, bf16 scale and bias; routers and norms keep 16 bits",
        "source": "measured on the testbed, float32 arithmetic on rounded weights",
        "rows": rows,
    }


def settings(chosen: int) -> Iterator[tuple[int, bool, int]]:
    """(bits, experts only, experts a token): the committed model first, then one change at a time, then two."""
    yield from ((bits, False, chosen) for bits in BITS)
    yield from ((bits, True, chosen) for bits in BITS if bits < 8)
    yield from ((bits, False, fewer) for fewer in range(chosen - 1, 0, -1) for bits in (16, 4))


def by_domain(losses: dict[str, np.ndarray]) -> dict[str, float]:
    return {domain: rounded(np.exp(one.mean())) for domain, one in losses.items()}


def ratio(losses_W: np.ndarray, base_W: np.ndarray) -> dict[str, float | list[float]]:
    """Perplexity over the base's, and its 95% interval: windows are resampled, the same ones for both."""
    difference_W = losses_W - base_W
    picks = np.random.default_rng(0).integers(0, len(difference_W), (RESAMPLES, len(difference_W)))
    low, high = np.quantile(np.exp(difference_W[picks].mean(1)), (0.025, 0.975))
    return {"ratio": rounded(np.exp(difference_W.mean())), "ratio_95": [rounded(low), rounded(high)]}


def rounded(value: float) -> float:
    return round(float(value), 4)


if __name__ == "__main__":
    main()
