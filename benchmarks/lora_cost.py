"""What unmerged LoRA costs in decode: the same loaded model, the same tokens, step by step with and without.

    python benchmarks/lora_cost.py STORE [--rank 16] [--targets attention] [--steps 200] [--memory 24GiB]

Two sequences take turns, one with the adapter and one without, so that drift falls on both alike. Give a budget that
holds all experts: then nothing waits for reads, and the cost is as large as it gets.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from stoker.adapter.lora import LoraPair, write_lora
from stoker.bench.provenance import spread, write_result
from stoker.runtime.model import Options, load
from stoker.store.reader import Store, open_store

RESULT = Path(__file__).parent / "results" / "lora_cost.json"
SUFFIXES = {
    "attention": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                  "self_attn.o_proj.weight"),
    "qv": ("self_attn.q_proj.weight", "self_attn.v_proj.weight"),
}  # fmt: skip


def random_lora(store: Store, targets: str, rank: int) -> dict[str, LoraPair]:
    """Random bf16 pairs for these projections of every layer."""
    generator, lora = torch.Generator().manual_seed(0), {}
    for name, tensor in store.dense.items():
        if name.endswith(SUFFIXES[targets]):
            rows, columns = tensor.shape if tensor.spec is None else (tensor.spec.rows, tensor.spec.cols)
            a, b = (torch.randn(*shape, generator=generator) * 0.01 for shape in ((rank, columns), (rows, rank)))
            lora[name.removesuffix(".weight")] = LoraPair(a.bfloat16(), b.bfloat16(), 2.0)
    return lora


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=sorted(SUFFIXES), default="attention")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    with tempfile.TemporaryDirectory() as folder:
        write_lora(Path(folder), random_lora(store, arguments.targets, arguments.rank))
        options = Options(
            memory=arguments.memory, ctx_size=2048, kv_tokens=4096, threads=arguments.threads,
            loras=(("lora", folder),),
        )  # fmt: skip
        with load(arguments.store, options) as runtime:
            if runtime.residency.plan.kept == tuple(pool.experts for pool in store.pools):
                runtime.residency.warm()
            sequences = {"without": runtime.new_sequence(), "with": runtime.new_sequence("lora")}
            for sequence in sequences.values():
                runtime.prefill(sequence, [5, 6, 7, 8])
            rounds: list[dict[str, float]] = []
            for round_ in range(arguments.rounds):
                times: dict[str, list[float]] = {"without": [], "with": []}
                for step in range(arguments.warm + arguments.steps):
                    order = ("without", "with") if step % 2 else ("with", "without")
                    for name in order:
                        began = time.perf_counter()
                        runtime.decode([sequences[name]], [10 + step])
                        if step >= arguments.warm:
                            times[name].append(1e3 * (time.perf_counter() - began))
                middle = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
                rounds.append(middle | {"cost": middle["with"] / middle["without"] - 1})
                print(f"round {round_}: {middle['without']:.2f} -> {middle['with']:.2f} ms, {rounds[-1]['cost']:+.1%}")
            figures = {name: spread([one[name] for one in rounds]) for name in rounds[0]}
            write_result(arguments.out, {
                "store": store.fingerprint, "layers": len(store.pools), "rank": arguments.rank,
                "targets": arguments.targets, "resident_share": runtime.budget.resident_share,
                "adapter_bytes": runtime.budget.adapter_bytes, "figures": figures, "rounds": rounds,
            })  # fmt: skip


if __name__ == "__main__":
    main()
