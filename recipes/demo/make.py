"""Makes the demo model: a Mixture-of-Experts out of SmolLM2-135M-Instruct, as an ordinary Hugging Face checkpoint.

    python -m recipes.demo.make DIR [--seed N] [--cache DIR]

Order of work: fetch the dense model, look at its hidden states, fit the routers, write one shard a layer. Half-made
output never stands under DIR's name; a DIR that this very recipe made is left as it is. The weights are float32,
because the source's 4-bit grid is exact in nothing smaller.
"""

import argparse
import hashlib
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, MixtralConfig

from recipes.demo.routers import TEXT, fit, mlp_inputs, passages
from recipes.demo.source import Source, fetch
from recipes.demo.upcycle import expert_tensors

EXPERTS = 8
CHOSEN = 2
SEED = 2
STAMP = "recipe.sha256"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo MoE out of SmolLM2-135M-Instruct.")
    parser.add_argument("directory", type=Path, help="where to write the checkpoint (2.7 GB)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the download is kept (98 MB)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # many small steps: a second thread mostly waits, and would change the last bits
    started = time.monotonic()
    if make(options.directory, options.cache, options.seed):
        print(f"{options.directory}: made in {time.monotonic() - started:.0f} s")


def make(directory: Path, cache: Path, seed: int = SEED) -> bool:
    """Write the checkpoint; False where this recipe, with this seed, already did.

    Raises SystemExit where `directory` exists and is not ours.
    """
    wanted = fingerprint(seed)
    if directory.exists():
        if not (directory / STAMP).exists():
            raise SystemExit(f"{directory} exists and was not made by this recipe; name another directory or delete it")
        if (directory / STAMP).read_text() == wanted:
            return False
        shutil.rmtree(directory)
    source = Source(fetch(cache))
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source.write_tokenizer(partial)
    write_config(source, partial)
    write_weights(source, partial, fit_routers(source, partial, seed), seed)
    (partial / STAMP).write_text(wanted)
    partial.rename(directory)
    return True


def fingerprint(seed: int) -> str:
    """What the checkpoint depends on: this folder's code and text, and the seed."""
    digest = hashlib.sha256(str(seed).encode())
    for file in [*sorted(Path(__file__).parent.glob("*.py")), TEXT]:
        digest.update(file.read_bytes())
    return digest.hexdigest() + "\n"


def write_config(source: Source, directory: Path) -> None:
    config = MixtralConfig(
        **source.config,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(directory)
    ends = {key: source.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(directory)


def fit_routers(source: Source, tokenizer_directory: Path, seed: int) -> list[Tensor]:
    """One router [EXPERTS, width] a layer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    inputs = mlp_inputs(source.model(), tokenizer, passages())
    return [fit(inputs_TD, EXPERTS, CHOSEN, seed + layer) for layer, inputs_TD in enumerate(inputs)]


def write_weights(source: Source, directory: Path, routers: list[Tensor], seed: int) -> None:
    """model-0000N-of-M.safetensors: first everything outside the MLPs, then one shard of experts a layer."""
    shards = len(routers) + 1
    index: dict[str, str] = {}
    total_bytes = 0

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        nonlocal total_bytes
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    dense = source.state_dict(lambda name: ".mlp." not in name)
    for layer, router_ED in enumerate(routers):
        dense[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router_ED
    write(1, dense)
    for layer in range(len(routers)):
        gate_FD, up_FD, down_DF = (
            source.tensor(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        write(layer + 2, expert_tensors(gate_FD, up_FD, down_DF, layer=layer, experts=EXPERTS, seed=seed))
    listing = {"metadata": {"total_size": total_bytes}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=1) + "\n")


if __name__ == "__main__":
    main()
