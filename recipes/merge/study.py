"""How much of a LoRA survives when it is merged into 4-bit weights: in the weights, and in what the model says.

    python -m recipes.merge.study [--model e32k4] [--steps 300] [--seed 0]

Trains two LoRAs on the quantised testbed model (PEFT, rank 16, attention): `recovery` imitates the 16-bit model on all
domains, `domain` learns one domain's text further. Then merges each into the quantised weights, rounds again, and
compares with the LoRA served beside them. Writes results.json beside this file. Needs the testbed's corpus
(recipes/testbed/README.md), which is encoded by the model's own tokenizer; shape and seeds decide everything.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoTokenizer

from recipes.testbed.corpus import read
from recipes.testbed.measure import load
from recipes.testbed.model import SHAPES, hidden_states
from recipes.testbed.quantise import GROUP, round_model, rounded
from recipes.testbed.sources import DOMAINS
from stoker.evaluate.bootstrap import perplexity_ratio

HERE = Path(__file__).parent
TESTBED = HERE.parent / "testbed"
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, ALPHA, RATE = 16, 32, 1e-3
WIDTH, SEQUENCES = 128, 8
DOMAIN = "german"
MERGED_BITS = (4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description="What merging a LoRA into quantised weights leaves of it.")
    parser.add_argument("--model", choices=sorted(SHAPES), default="e32k4")
    parser.add_argument("--steps", type=int, default=300, help=f"of {WIDTH * SEQUENCES} tokens")
    parser.add_argument("--windows", type=int, default=8, help="test windows of 512 tokens of each domain")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "command": f"python -m recipes.merge.study --model {options.model} --steps {options.steps} "
        f"--windows {options.windows} --seed {options.seed}",
        "weights_sha256": json.loads((TESTBED / options.model / "training.json").read_text())["weights_sha256"],
        "base": f"affine 4 bits, group {GROUP}",
        "lora": {"rank": RANK, "alpha": ALPHA, "targets": KINDS, "rate": RATE, "tokens_a_step": WIDTH * SEQUENCES},
    }
    for name in ("recovery", "domain"):
        results[name] = study(name, options)
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def study(name: str, options: argparse.Namespace) -> dict:
    """Train one LoRA and measure what merging leaves of it."""
    torch.manual_seed(options.seed)
    started = time.monotonic()
    teacher = load(TESTBED / options.model) if name == "recovery" else None
    student = quantised(options.model)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(KINDS), lora_dropout=0.0), student)
    curve = train(student, teacher, name, options)
    domains = (DOMAIN,) if name == "domain" else DOMAINS
    windows = torch.cat([text_windows(options.model, one, "test", 512, options.windows) for one in domains])
    base, trained = logits(quantised(options.model), windows), logits(student, windows)
    deltas = dict(lora_deltas(student))
    merged = {}
    for bits in MERGED_BITS:
        kinds, model = merge(options.model, deltas, bits)
        merged[f"{bits} bits"] = {"weights": kinds, **effect(base, trained, logits(model, windows), windows)}
    return {
        "steps": options.steps,
        "seed": options.seed,
        "seconds": round(time.monotonic() - started),
        "loss": curve,
        "test_tokens": windows[:, 1:].numel(),
        "perplexity": {"base": perplexity(base, windows), "lora beside": perplexity(trained, windows)},
        "merged": merged,
    }


def quantised(model: str) -> nn.Module:
    """The testbed model with every matrix that a store quantises rounded to 4 bits; frozen."""
    found = load(TESTBED / model)
    round_model(found, 4)
    return found.requires_grad_(False)


def train(student: nn.Module, teacher: nn.Module | None, name: str, options: argparse.Namespace) -> list[float]:
    """Adam on the LoRA alone; the loss of every tenth of the steps. With a teacher: KL(teacher || student)."""
    parameters = [one for one in student.parameters() if one.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / options.steps)
    losses = []
    for ids_BT in batches(name, options):
        ours = forward(student, ids_BT)
        if teacher is None:
            loss = F.cross_entropy(ours.flatten(0, 1), ids_BT[:, 1:].flatten())
        else:
            with torch.no_grad():
                theirs = forward(teacher, ids_BT).log_softmax(-1)
            loss = F.kl_div(ours.log_softmax(-1), theirs, reduction="sum", log_target=True) / ids_BT[:, 1:].numel()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    each = max(1, len(losses) // 10)
    return [round(float(np.mean(losses[first : first + each])), 5) for first in range(0, len(losses), each)]


def batches(name: str, options: argparse.Namespace) -> Iterator[Tensor]:
    """int64 [SEQUENCES, WIDTH + 1] training windows: of all domains, or of one, drawn by the seed."""
    domains = (DOMAIN,) if name == "domain" else DOMAINS
    most = -(-options.steps * SEQUENCES // len(domains))
    windows = torch.cat([text_windows(options.model, one, "train", WIDTH, most) for one in domains])
    order = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        yield windows[torch.randint(0, len(windows), (SEQUENCES,), generator=order)]


def text_windows(model: str, domain: str, split: str, width: int, most: int) -> Tensor:
    """int64 [n, width + 1]: the first `most` windows of a domain's split, documents one after the other."""
    tokenizer, ids = AutoTokenizer.from_pretrained(TESTBED / model), []
    for text in read(domain, split):
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id or 0]
        if len(ids) > most * width:
            break
    count = min(most, (len(ids) - 1) // width)
    return torch.tensor([ids[row * width : row * width + width + 1] for row in range(count)])


def forward(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Logits [B, T - 1, V] of every token but the last."""
    return hidden_states(model, ids_BT[:, :-1])[0] @ model.model.embed_tokens.weight.t()


def logits(model: nn.Module, windows: Tensor) -> Callable[[int], Tensor]:
    """A window's log-probabilities float64 [T, V], computed when asked for."""

    @torch.no_grad()
    def of_window(row: int) -> Tensor:
        return forward(model, windows[row : row + 1])[0].double().log_softmax(-1)

    return of_window


def lora_deltas(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What each LoRA adds to its matrix: (alpha / r) B A, float32 [out, in]."""
    for path, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield path, module.get_delta_weight("default").detach()


def merge(model: str, deltas: dict[str, Tensor], bits: int) -> tuple[dict, nn.Module]:
    """The quantised model with the deltas added and rounded to `bits` again (16: not rounded); what is left of them."""
    found = quantised(model)
    wanted: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    left: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    steps: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    with torch.no_grad():
        for path, delta in deltas.items():
            weight = found.get_submodule(path).weight
            before = weight.clone()
            after = weight + delta
            weight.copy_(after if bits == 16 else rounded(after, bits))
            kind = path.rsplit(".", 1)[1]
            wanted[kind].append(delta.flatten())
            left[kind].append((weight - before).flatten())
            steps[kind].append(step_sizes(before))
    return {
        kind: survival(torch.cat(wanted[kind]), torch.cat(left[kind]), torch.cat(steps[kind])) for kind in KINDS
    }, found


def step_sizes(weight: Tensor) -> Tensor:
    """The 4-bit grid's step of each group of a matrix."""
    low, high = weight.unflatten(-1, (-1, GROUP)).aminmax(dim=-1)
    return ((high - low) / 15).flatten()


def survival(wanted: Tensor, left: Tensor, steps: Tensor) -> dict[str, float]:
    """norm: of what is left over what was to be added; share: of it that points the same way, <left, wanted> /
    <wanted, wanted>; cosine; rms of the delta, and the median step of the 4-bit grid that it is rounded to."""
    wanted, left = wanted.double(), left.double()
    dot, norm = left @ wanted, wanted.norm()
    return {
        "norm": figure(left.norm() / norm),
        "share": figure(dot / norm**2),
        "cosine": figure(dot / norm / left.norm().clamp_min(1e-30)),
        "delta_rms": figure(norm / len(wanted) ** 0.5),
        "step_median": figure(steps.double().median()),
    }


def effect(base: Callable, beside: Callable, merged: Callable, windows: Tensor) -> dict:
    """What is left in the logits. kl_to_beside: KL(LoRA beside || merged); effect_left: 1 - that over
    KL(LoRA beside || base), so 1 where merging changes nothing and 0 where the LoRA might as well be absent."""
    lost = gone = 0.0
    losses = {"merged": [], "beside": []}
    for row in range(len(windows)):
        wanted, ours = beside(row), merged(row)
        lost += float(F.kl_div(ours, wanted, reduction="sum", log_target=True))
        gone += float(F.kl_div(base(row), wanted, reduction="sum", log_target=True))
        after = windows[row, 1:, None]
        losses["merged"].append(-float(ours.gather(1, after).sum()))
        losses["beside"].append(-float(wanted.gather(1, after).sum()))
    tokens = windows[:, 1:].numel()
    counts = np.full(len(windows), windows.shape[1] - 1)
    ratio, low, high = perplexity_ratio(np.array(losses["merged"]), np.array(losses["beside"]), counts)
    return {
        "kl_to_beside": figure(lost / tokens),
        "kl_of_the_lora": figure(gone / tokens),
        "effect_left": figure(1 - lost / gone),
        "perplexity_over_beside": figure(ratio),
        "perplexity_over_beside_95": [figure(low), figure(high)],
    }


def perplexity(model: Callable, windows: Tensor) -> float:
    losses = [-model(row).gather(1, windows[row, 1:, None]).mean() for row in range(len(windows))]
    return figure(torch.stack(losses).mean().exp())


def figure(value: float) -> float:
    return float(f"{float(value):.5g}")


if __name__ == "__main__":
    main()
