"""The demo model through stoker itself: its bytes, its dense source, the same output everywhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.demo.make import EXPERTS, SEED
from recipes.demo.source import Source
from recipes.demo.upcycle import expert_parts
from stoker.errors import BudgetError
from stoker.quant.formats import PlacedMatrix
from stoker.quant.reference import Parts, pack_tiles
from stoker.runtime.model import Options, load
from stoker.store.reader import open_store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ROOMY_MIB = 2048
CTX_TOKENS = 2560
NEW_TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Name three primary colours.",
    "How many days are there in a leap year?",
    "Write one sentence about the sea.",
    "What is 12 plus 30?",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into French.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "def add(a, b):",
    "List the planets of the solar system.",
    "What does HTTP stand for?",
    "Write a haiku about rain.",
    "Who was the first person on the Moon?",
    "What is the opposite of hot?",
    "Describe a cat in five words.",
    "How do I boil an egg?",
    "What is the largest ocean?",
    "Tell me a joke.",
]


def decode(store: Path, memory_mib: int, path: str = "auto", prompts: list[str] = PROMPTS) -> Any:
    """tokens, ledger and stats of greedy.py in a fresh process, so that the budget is what a user would give."""
    run = run_greedy(store, memory_mib, path, prompts)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def run_greedy(store: Path, memory_mib: int, path: str, prompts: list[str]) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("greedy.py")
    command = [sys.executable, script, store, str(memory_mib), path, str(CTX_TOKENS), str(NEW_TOKENS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, input=json.dumps(prompts), capture_output=True, text=True)


@pytest.fixture(scope="module")
def smallest_mib(demo_store: Path) -> int:
    """What a refusal names, and a little more: libraries take a few MiB more or less from one start to the next."""
    refusal = run_greedy(demo_store, 1, "auto", [])
    assert refusal.returncode == BudgetError.exit_code
    named = re.search(r"give --memory (\d+)MiB", refusal.stderr)
    assert named is not None, refusal.stderr
    return int(named[1]) + 8


@pytest.fixture(scope="module")
def expected(demo_store: Path) -> list[list[int]]:
    """What everything else has to give: all experts in memory."""
    resident = decode(demo_store, ROOMY_MIB)
    assert resident["ledger"]["resident_share"] == 1.0
    return list(resident["tokens"])


def test_records_are_the_source_byte_for_byte(demo_store: Path, source: Source) -> None:
    store = open_store(demo_store)
    for layer in (0, 13, 29):
        matrices = [source.parts(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
        layout = store.pools[layer].layout
        for expert in range(EXPERTS):
            extent = store.record(layer, expert)
            with open(extent.file, "rb") as file:
                file.seek(extent.offset)
                record = file.read(extent.length)
            parts = expert_parts(*matrices, seed=SEED, layer=layer, expert=expert)
            for name, placed in (("w1", layout.gate), ("w3", layout.up), ("w2", layout.down)):
                assert_placed(record, placed, parts[name])


def assert_placed(record: bytes, placed: PlacedMatrix, rows: Parts) -> None:
    tiles = pack_tiles(rows, placed.spec)
    assert tiles.scales is not None and tiles.biases is not None
    for offset, part in ((placed.codes, tiles.codes), (placed.scales, tiles.scales), (placed.biases, tiles.biases)):
        wanted = part.contiguous().view(torch.uint8).flatten().numpy().tobytes()
        assert record[offset : offset + len(wanted)] == wanted


@torch.inference_mode()
def test_logits_are_those_of_the_dense_model(demo_store: Path, source: Source) -> None:
    with load(demo_store, Options(memory=4 << 30, ctx_size=1024)) as runtime:
        turn = [{"role": "user", "content": PROMPTS[0]}]
        ids = runtime.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        got = runtime.logits(ids)
    wanted = source.model()(ids).logits
    error = float((got - wanted).norm() / wanted.norm())
    # 0.021 was measured: what 30 layers add up to when the experts round their inputs to 8 bits.
    assert error < 0.03, error
    assert torch.equal(got[:, -1].argmax(-1), wanted[:, -1].argmax(-1))


@pytest.mark.parametrize(
    ("path", "more_mib", "most_resident"),
    [("hot", 0, 0.32), ("exact", 0, 0.32), ("staged", 0, 0.32), ("auto", 150, 0.75)],
)
def test_greedy_output_is_the_same_at_every_budget_and_path(
    demo_store: Path, smallest_mib: int, expected: list[list[int]], path: str, more_mib: int, most_resident: float
) -> None:
    memory_mib = smallest_mib + more_mib
    run = decode(demo_store, memory_mib, path)
    assert run["ledger"]["resident_share"] < most_resident
    assert run["tokens"] == expected
    assert run["stats"]["dropped_experts"] == 0
    assert run["stats"]["demand_bytes"] > run["ledger"]["expert_bytes"], "the experts did not come from disk"
    assert run["peak_rss_bytes"] <= memory_mib << 20


def test_greedy_output_alone_equals_that_in_a_batch(
    demo_store: Path, smallest_mib: int, expected: list[list[int]]
) -> None:
    assert decode(demo_store, smallest_mib, prompts=PROMPTS[:1])["tokens"] == expected[:1]


def test_answers_paris_with_a_quarter_of_the_experts(demo_store: Path, smallest_mib: int) -> None:
    command = [sys.executable, "-m", "stoker", "run", str(demo_store), PROMPTS[0], "--temperature", "0"]
    command += ["--ctx-size", "1024", "--memory", f"{smallest_mib}MiB"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "The capital of France is Paris."
    assert "expert slots" in run.stderr and "tok/s" in run.stderr


def test_the_example_answers_too(demo_store: Path) -> None:
    example = ROOT / "examples/stream_one_token.py"
    assert len(example.read_text().splitlines()) < 80
    run = subprocess.run(
        [sys.executable, "-c", f"exec(compile(open({str(example)!r}).read(), 'example', 'exec'))", str(demo_store)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.startswith("The capital of France is Paris\n")
