"""Steps of LoRA on one repeated batch through a streamed base: loss, time, device bytes against expert bytes, peak RSS.

    python benchmarks/train_step.py STORE --memory 8GiB [--tokens 2048] [--sequence 512] [--steps 3]

Writes results/train_step.json. Random token ids: the loss of a repeated batch must fall all the same. `device_bytes` is
what the kernel says that this process read (/proc/self/io), `record_bytes` what the reader asked for.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from stoker.bench.provenance import provenance, write_result
from stoker.runtime.budget import parse_bytes, peak_resident_bytes
from stoker.train.data import Batch
from stoker.train.lora import LoraSettings
from stoker.train.model import BaseOptions, load
from stoker.train.session import Student, targets

RESULT = Path(__file__).parent / "results" / "train_step.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--heads", action="store_true", help="along the routes of untrained heads")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result = measure(options)
    write_result(options.out, result | {"provenance": provenance()})
    print(json.dumps({key: value for key, value in result.items() if key != "steps"}, indent=1))


def measure(options: argparse.Namespace) -> dict:
    """One row a step: what it computed, took and read."""
    base_options = BaseOptions(
        memory=options.memory, hold="stream", step_tokens=options.tokens, sequence_tokens=options.sequence,
        trained_parameters=20_000_000, threads=options.threads,
    )  # fmt: skip
    with load(options.store, base_options) as base:
        print(*base.plan.lines(), sep="\n", flush=True)
        student = Student.of(base)
        if options.heads:
            student.add_heads()
        student.add_lora(LoraSettings())
        parameters = list(student.train_only(heads=False, lora=True).values())
        optimiser = torch.optim.AdamW(parameters, lr=options.lr)
        batch = repeated_batch(base.config.vocab_size, options.tokens, options.sequence)
        steps = []
        for number in range(options.steps):
            steps.append(step(student, batch, parameters, optimiser))
            print(number, steps[-1], flush=True)
        expert_bytes = base.store.expert_bytes
        plan = base.plan
    return {
        "memory_bytes": parse_bytes(options.memory),
        "peak_rss_bytes": peak_resident_bytes(),
        "planned_bytes": plan.used_bytes,
        "expert_bytes": expert_bytes,
        "tokens": options.tokens,
        "sequence": options.sequence,
        "trained_parameters": sum(p.numel() for p in parameters),
        "device_over_expert_bytes": max(one["device_bytes"] for one in steps) / expert_bytes,
        "losses": [one["loss"] for one in steps],
        "loss_falls": all(b["loss"] < a["loss"] for a, b in itertools.pairwise(steps)),
        "within_memory": peak_resident_bytes() <= parse_bytes(options.memory),
        "steps": steps,
    }


def repeated_batch(vocabulary: int, tokens: int, sequence: int) -> Batch:
    rows = max(1, tokens // sequence)
    ids_BT = torch.randint(0, vocabulary, (rows, sequence), generator=torch.Generator().manual_seed(0))
    return Batch(ids_BT, torch.full((rows,), sequence), torch.ones(rows, dtype=torch.int64))


def step(student: Student, batch: Batch, parameters: list, optimiser: torch.optim.Optimizer) -> dict:
    """One step of the optimiser."""
    wanted_N, started = targets(batch), time.perf_counter()
    before, asked = device_bytes(), student.model.device_bytes
    loss, _ = student.loss(batch, lambda logits, rows: F.cross_entropy(logits, wanted_N[rows], reduction="none"))
    forward_s = time.perf_counter() - started
    loss = loss / batch.count
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    optimiser.step()
    return {
        "loss": float(loss.detach()),
        "grad_norm": norm,
        "seconds": round(time.perf_counter() - started, 2),
        "forward_seconds": round(forward_s, 2),
        "device_bytes": device_bytes() - before,
        "record_bytes": student.model.device_bytes - asked,
    }


def device_bytes() -> int:
    """Bytes that this process has had read from devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main()
