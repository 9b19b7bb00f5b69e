"""How fast a training step is with each experts and attention function, data type and with torch.compile.

    python -m recipes.testbed.speed [e32k4] [--threads 1]

One JSON line a variant: tokens a second at best of a few steps (forward and backward, 8 windows of 512), and CPU
seconds a thousand tokens, which tell more on a machine that is busy with other things.
"""

import argparse
import json
import time

import torch

from recipes.testbed.attention import ATTENTION_FUNCTION
from recipes.testbed.experts import EXPERTS_FUNCTION
from recipes.testbed.head import cross_entropy
from recipes.testbed.model import CONTEXT_TOKENS, ENTRIES, SHAPES, build, hidden_states, layer_step

SEQUENCES, STEPS = 8, 4
VARIANTS = (
    # experts, attention, bfloat16 autocast, compiled
    ("eager", "sdpa", False, False),
    ("eager", "sdpa", True, False),
    ("grouped_mm", "sdpa", True, False),
    (EXPERTS_FUNCTION, "sdpa", True, False),
    (EXPERTS_FUNCTION, ATTENTION_FUNCTION, False, False),
    (EXPERTS_FUNCTION, ATTENTION_FUNCTION, True, False),
    (EXPERTS_FUNCTION, ATTENTION_FUNCTION, True, True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a training step's variants.")
    parser.add_argument("model", nargs="?", choices=sorted(SHAPES), default="e32k4")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for experts, attention, half, compiled in VARIANTS:
        figures = measure(options.model, experts, attention, half, compiled)
        variant = {"experts": experts, "attention": attention, "bf16": half, "compiled": compiled}
        print(json.dumps({"model": options.model, "threads": options.threads} | variant | figures), flush=True)


def measure(name: str, experts: str, attention: str, half: bool, compiled: bool) -> dict[str, float]:
    model = build(name, 0).train()
    model.set_experts_implementation(experts)
    model.set_attn_implementation(attention)
    step = torch.compile(layer_step, dynamic=False) if compiled else layer_step
    ids = torch.randint(0, ENTRIES, (SEQUENCES, CONTEXT_TOKENS + 1), generator=torch.Generator().manual_seed(0))
    walls, cpus = [], []
    for _ in range(STEPS + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            hidden_BTD, balance, _ = hidden_states(model, ids[:, :-1], step)
        head_VD, targets = model.model.embed_tokens.weight, ids[:, 1:].reshape(-1)
        dtype = torch.bfloat16 if half else torch.float32
        (cross_entropy(hidden_BTD.flatten(0, 1), head_VD, targets, dtype) + balance).backward()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    tokens = SEQUENCES * CONTEXT_TOKENS
    return {"tokens_s": round(tokens / min(walls[1:])), "cpu_s_a_1000_tokens": round(min(cpus[1:]) / tokens * 1e3, 3)}


if __name__ == "__main__":
    main()
