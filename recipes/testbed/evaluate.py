"""Measures the committed models: perplexity by domain next to an n-gram's, and what their routing looks like.

    python -m recipes.testbed.evaluate [e32k4 e8k2] [--traces DIR]

Writes results.json beside this file. Both predict the same tokens of the test split; the model in windows of 512 that
do not overlap, so that its first tokens have little before them, the n-gram with four tokens before all but the first.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from recipes.testbed.corpus import read
from recipes.testbed.data import evaluation_windows, spread_evenly, tokens
from recipes.testbed.measure import load, routes, token_losses
from recipes.testbed.model import CONTEXT_TOKENS, SHAPES
from recipes.testbed.ngram import NGram
from recipes.testbed.sources import DOMAINS
from recipes.testbed.tokenizer import ENTRIES
from stoker.plan.statistics import reuse, traffic_share, working_set

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SAMPLE = HERE / "sample.jsonl"
SAMPLE_CHARACTERS = 1600
ROUTE_WINDOWS = 16  # 8192 tokens of each domain, as long as a real trace


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the testbed's models.")
    parser.add_argument("models", nargs="*", default=sorted(SHAPES), help="which of e32k4, e8k2")
    parser.add_argument("--traces", type=Path, help="directory of real routing traces, qwen3_*.npz")
    parser.add_argument("--windows", type=int, help="test windows of 512 tokens of each domain; default: all")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not SAMPLE.exists():
        write_sample()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if results.get("windows_a_domain", 0) != options.windows:
        results |= {"windows_a_domain": options.windows, "ngram": perplexities(ngram_losses(options.windows))}
    if options.traces:
        results["real_traces"] = {path.stem: routing(np.load(path)["experts"], 128) for path in traces(options.traces)}
    for name in options.models:
        results[name] = evaluate(HERE / name, SHAPES[name].experts, options.windows)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def evaluate(directory: Path, n_experts: int, windows: int | None) -> dict:
    model = load(directory)
    training = json.loads((directory / "training.json").read_text())
    by_domain = {}
    for domain in DOMAINS:
        by_domain[domain] = token_losses(model, evaluation_windows(domain, "test", CONTEXT_TOKENS, windows)).ravel()
    experts = {domain: routes(model, stretch(domain)) for domain in DOMAINS}
    return {
        "tokens_seen": training["tokens_seen"],
        "weights_sha256": training["weights_sha256"],
        "perplexity": perplexities(by_domain),
        "ngram_same_tokens": perplexities(ngram_losses(windows, training["tokens_seen"])),
        "test_tokens": sum(len(one) for one in by_domain.values()),
        "sample_perplexity": sample_perplexity(model, directory),
        "routing": {domain: routing(one, n_experts) for domain, one in experts.items()},
        "routing_domain_overlap": overlap(experts, n_experts),
    }


def ngram_losses(windows: int | None, training_tokens: int | None = None) -> dict[str, np.ndarray]:
    """Of exactly the tokens that the models predict, in windows of each domain's test split.

    `training_tokens`: fit on the beginnings of the training streams, so many tokens in all; None: on all of them.
    """
    streams = [tokens(domain, "train") for domain in DOMAINS]
    part = 1.0 if training_tokens is None else min(1.0, training_tokens / sum(len(one) for one in streams))
    model = NGram.fit([one[: int(len(one) * part)] for one in streams], ENTRIES)
    losses = {}
    for domain in DOMAINS:
        whole = len(evaluation_windows(domain, "test", CONTEXT_TOKENS))
        chances_N = model.log_probabilities(tokens(domain, "test")[: whole * CONTEXT_TOKENS + 1])
        losses[domain] = -spread_evenly(chances_N.reshape(whole, CONTEXT_TOKENS), windows).ravel()
    return losses


def perplexities(losses: dict[str, np.ndarray]) -> dict[str, float]:
    """By domain, over all tokens, and the mean of domains (the exponential of the mean of their losses)."""
    found = {domain: float(np.exp(one.mean(dtype=np.float64))) for domain, one in losses.items()}
    found["all_tokens"] = float(np.exp(np.concatenate(list(losses.values())).mean(dtype=np.float64)))
    found["domain_mean"] = float(np.exp(np.mean([one.mean(dtype=np.float64) for one in losses.values()])))
    return {name: round(value, 4) for name, value in found.items()}


def sample_perplexity(model: Qwen3MoeForCausalLM, directory: Path) -> float:
    """Of sample.jsonl: passages of the test split short enough to commit."""
    return round(float(np.exp(np.mean([token_losses(model, ids).mean() for ids in sample_ids(directory)]))), 4)


def write_sample() -> None:
    """Beginnings of test documents whose licences are permissive: three of each domain."""
    licences = {"code": "PSF-2.0", "chat": "MIT"}
    lines = []
    for domain, licence in licences.items():
        long = (text for text in read(domain, "test") if len(text) >= SAMPLE_CHARACTERS)
        for text in islice(long, 3):
            lines.append({"domain": domain, "licence": licence, "text": text[:SAMPLE_CHARACTERS]})
    SAMPLE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def sample_ids(directory: Path) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = [json.loads(line)["text"] for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    return [torch.tensor([tokenizer(text)["input_ids"][: CONTEXT_TOKENS + 1]]) for text in texts]


def stretch(domain: str) -> torch.Tensor:
    """Consecutive windows from the start of the test split, without the token after each."""
    return evaluation_windows(domain, "test", CONTEXT_TOKENS)[:ROUTE_WINDOWS, :-1]


def routing(experts_LTK: np.ndarray, n_experts: int) -> dict[str, float | list[float]]:
    """Medians over layers; `even`: what independent, even choices would give. Definitions: docs/metrics.md.

    reuse: share of a token's experts that the token before also used; chance: the same for independent tokens with this
    load; load_entropy: of the experts' shares, as a fraction of its largest value; effective_experts: its exponential.
    """
    loads = [np.bincount(layer.ravel(), minlength=n_experts) / layer[:, 0].size for layer in experts_LTK]
    shares = [load / load.sum() for load in loads]
    entropy = np.array([-(share[share > 0] * np.log(share[share > 0])).sum() for share in shares])
    chosen = experts_LTK.shape[2]
    sets = working_set(experts_LTK)
    return {
        "experts": n_experts,
        "chosen": chosen,
        "reuse_lag_1": figure(np.median(reuse(experts_LTK, 1))),
        "reuse_by_layer": [figure(one) for one in reuse(experts_LTK, 1)] if len(experts_LTK) < 10 else [],
        "reuse_chance": figure(np.median([(load**2).sum() / load.sum() for load in loads])),
        "reuse_even": figure(chosen / n_experts),
        "load_entropy": figure(np.median(entropy) / np.log(n_experts)),
        "effective_experts": figure(np.exp(np.median(entropy))),
        "top_quarter_share": figure(np.median(traffic_share(experts_LTK, n_experts // 4))),
        "working_set_256": figure(np.median(sets)),
        "working_set_256_part": figure(np.median(sets) / n_experts),
        "least_used": figure(min(load.min() for load in loads) * n_experts / chosen),
    }


def overlap(experts: dict[str, np.ndarray], n_experts: int) -> dict[str, float]:
    """Cosine between the loads of two domains, a mean over layers: 1 where domains use experts alike."""
    loads = {
        domain: np.stack([np.bincount(layer.ravel(), minlength=n_experts) for layer in one]).astype(float)
        for domain, one in experts.items()
    }
    unit = {domain: load / np.linalg.norm(load, axis=1, keepdims=True) for domain, load in loads.items()}
    names = list(unit)
    return {
        f"{one}-{other}": figure((unit[one] * unit[other]).sum(1).mean())
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    }


def figure(value: float) -> float:
    return round(float(value), 4)


def traces(directory: Path) -> list[Path]:
    found = sorted(directory.glob("qwen3_*.npz"))
    if not found:
        raise SystemExit(f"{directory} holds no qwen3_*.npz")
    return found


def table(results: dict) -> str:
    """Perplexities and routing as tables in markdown."""
    columns = {"5-gram, all training text": results["ngram"]}
    for name in sorted(set(SHAPES) & set(results)):
        seen = f"{results[name]['tokens_seen'] / 1e6:.1f} M tokens"
        columns |= {f"{name}, {seen}": results[name]["perplexity"]}
        columns |= {f"5-gram, {seen}": results[name]["ngram_same_tokens"]}
    rows = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for domain in (*DOMAINS, "all_tokens", "domain_mean"):
        rows.append(f"| {domain} | " + " | ".join(f"{column[domain]:.1f}" for column in columns.values()) + " |")
    return "\n".join(rows) + "\n\n" + routing_table(results)


def routing_table(results: dict) -> str:
    """Routing figures in markdown: the models' over domains, the real traces' one by one."""
    wanted = ("reuse_lag_1", "reuse_chance", "load_entropy", "top_quarter_share", "working_set_256_part")
    rows = ["| | reuse | by chance | load entropy | top quarter's share | working set of 256 |", "|---" * 6 + "|"]
    for name in sorted(set(SHAPES) & set(results)):
        for domain, one in results[name]["routing"].items():
            rows.append(f"| {name} {domain} | " + " | ".join(f"{one[key]:.2f}" for key in wanted) + " |")
    for name, one in results.get("real_traces", {}).items():
        rows.append(f"| {name} | " + " | ".join(f"{one[key]:.2f}" for key in wanted) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
