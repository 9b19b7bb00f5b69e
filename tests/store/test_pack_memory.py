"""Packing streams: the peak memory of the process does not grow with the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker.store.reader import open_store

HIDDEN, WIDTH, EXPERTS = 1024, 512, 64

MEASURED = """
import resource, sys
from pathlib import Path
from stoker.checkpoint.source import open_checkpoint
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, plan_pack

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pack(plan_pack(open_checkpoint(Path(sys.argv[1])), PackOptions(4, 64)), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_peak_memory_is_a_small_part_of_the_checkpoint(tmp_path: Path) -> None:
    """One stacked tensor of 128 MiB, one of 64 MiB, and an embedding of 128 MiB: none may ever be in memory whole."""
    source = tmp_path / "src"
    source.mkdir()
    block = torch.randn(1 << 20).to(torch.bfloat16)
    experts = "model.language_model.layers.0.mlp.experts"
    shapes = {
        f"{experts}.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
        f"{experts}.down_proj": (EXPERTS, HIDDEN, WIDTH),
        "model.language_model.embed_tokens.weight": (1 << 16, HIDDEN),
    }
    tensors = {name: block.repeat(torch.Size(shape).numel() >> 20).view(shape) for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors")
    text = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "store")]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (source / "model.safetensors").stat().st_size > 300 << 20
    assert grown_kib < 100 << 10
    open_store(tmp_path / "store").verify()
