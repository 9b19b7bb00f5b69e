"""Makes the demo model: a Mixture-of-Experts out of SmolLM2-135M-Instruct, as a 4-bit Mixtral checkpoint (MLX format).

    python -m recipes.demo.make DIR [--seed N] [--cache DIR]

Order of work: fetch the dense model, look at its hidden states, fit the routers, write one shard a layer. Half-made
output never stands under DIR's name; a DIR that this very recipe made is left as it is. The source has 4 bits already,
and they are kept as they are: quantising its values again would cost 7.6% of relative error.
"""

import argparse
import hashlib
import json
import shutil
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, MixtralConfig

from recipes.demo.routers import TEXT, fit, mlp_inputs, passages
from recipes.demo.source import GROUP, Source, fetch
from recipes.demo.upcycle import expert_parts
from stoker.quant.reference import Parts

EXPERTS = 8
CHOSEN = 2
SEED = 2
AFFINE = {"group_size": GROUP, "mode": "affine"}
STAMP = "recipe.sha256"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo MoE out of SmolLM2-135M-Instruct.")
    parser.add_argument("directory", type=Path, help="where to write the checkpoint (440 MB)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the download is kept (98 MB)")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
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
        dtype="float16",
        quantization={**AFFINE, "bits": 4, "model.embed_tokens": {**AFFINE, "bits": 8}},
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

    dense: dict[str, Tensor] = {}
    for name in source.names:
        if ".mlp." not in name:
            dense |= {name: source.tensor(name)} if source.bits(name) is None else named(name, source.parts(name))
    for layer, router_ED in enumerate(routers):
        dense[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = router_ED
    write(1, dense)
    for layer in range(len(routers)):
        write(layer + 2, layer_experts(source, layer, seed))
    listing = {"metadata": {"total_size": total_bytes}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=1) + "\n")


def layer_experts(source: Source, layer: int, seed: int) -> dict[str, Tensor]:
    gate, up, down = (source.parts(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    tensors: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        for name, parts in expert_parts(gate, up, down, seed=seed, layer=layer, expert=expert).items():
            tensors |= named(f"{prefix}.{name}.weight", parts)
    return tensors


def named(weight: str, parts: Parts) -> dict[str, Tensor]:
    """MLX's names for a quantised matrix: the codes under the weight's own, scales and biases beside it."""
    module = weight.removesuffix("weight")
    return {weight: parts.codes, f"{module}scales": parts.scales, f"{module}biases": parts.biases}


if __name__ == "__main__":
    main()
