"""Unmerged LoRA against PEFT on the dequantised model, alone and several in one step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from stoker.adapter.lora import LoraPair, write_lora
from stoker.errors import AdapterError, OptionError
from stoker.runtime.model import Options, Runtime, load
from stoker.runtime.step import Part
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of, relative_l2
from tests.runtime.test_architectures import LIMIT, some_ids
from tests.runtime.tiny import ARCHITECTURES

TARGETS = {
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen2_moe": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],  # of the shared expert
    "deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"],
    "qwen3_5_moe": ["q_proj", "o_proj", "in_proj_qkv", "out_proj"],  # attention and linear attention
}


def peft_directory(store: Path, architecture: str, directory: Path, seed: int, rank: int = 6) -> Path:
    """An adapter that PEFT made and saved, with a B that is not zero."""
    model = oracle_of(open_store(store))
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS[architecture], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16())
    adapted.save_pretrained(directory)
    return directory


def peft_logits(store: Path, directory: Path, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return PeftModel.from_pretrained(oracle_of(open_store(store)), directory).eval()(input_ids=ids).logits


@pytest.fixture(params=list(TARGETS))
def case(request: pytest.FixtureRequest, packed: Packer, tmp_path: Path) -> Iterator[tuple[Path, Path, str]]:
    store = packed(request.param, 8)
    yield store, peft_directory(store, request.param, tmp_path / "lora", 1), request.param


def test_logits_are_peft_s(case: tuple[Path, Path, str]) -> None:
    store, directory, _ = case
    ids = some_ids(1, 21)
    with load(store, Options(memory="8GiB", ctx_size=256, adapter=str(directory))) as runtime:
        ours = runtime.logits(ids)
        sequence = runtime.new_sequence()
        runtime.prefill(sequence, ids[0, :-1].tolist())
        last = runtime.decode([sequence], [int(ids[0, -1])])[0]
        sequence.close()
        assert runtime.ledger()["adapter_bytes"] > 0
    with load(store, Options(memory="8GiB", ctx_size=256)) as plain:
        base = plain.logits(ids)
    theirs = peft_logits(store, directory, ids)
    moved = relative_l2(base, theirs)
    assert moved > 0.05, "the adapter must matter, or this shows nothing"
    # A route may flip where a tie was near: most positions must agree closely, all of them much better than the base.
    errors = [relative_l2(a, b) for a, b in zip(ours[0], theirs[0], strict=True)]
    assert sorted(errors)[len(errors) // 2] < 5 * LIMIT, errors
    assert relative_l2(ours, theirs) < max(0.3 * moved, 5 * LIMIT)
    assert relative_l2(last, ours[0, -1]) < 5e-3


def test_sequences_of_one_step_take_their_own_adapters(packed: Packer, tmp_path: Path) -> None:
    """Bit for bit what each gives alone; one sequence has none."""
    store = packed("qwen3_moe", 4)
    loras = tuple(
        (name, str(peft_directory(store, "qwen3_moe", tmp_path / name, seed, rank)))
        for name, seed, rank in (("one", 1, 4), ("two", 2, 9))
    )
    names, prompts = ("one", None, "two", "one"), [some_ids(1, n, seed=n)[0].tolist() for n in (5, 7, 3, 9)]
    with load(store, Options(memory="8GiB", ctx_size=256, kv_tokens=1024, loras=loras)) as runtime:
        alone = [_run(runtime, [name], [prompt])[0] for name, prompt in zip(names, prompts, strict=True)]
        together = _run(runtime, list(names), prompts)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other)
        plain = _run(runtime, [None, "one"], [prompts[0], prompts[0]])
        assert relative_l2(plain[0], plain[1]) > 0.05
    with load(store, Options(memory="8GiB", ctx_size=256)) as runtime:
        assert torch.equal(_run(runtime, [None], [prompts[1]])[0], alone[1]), "no adapter, no change"


def _run(runtime: Runtime, names: list[str | None], prompts: list[list[int]]) -> list[Tensor]:
    """Logits after each prompt and after two more tokens, all sequences in the same steps."""
    sequences = [runtime.new_sequence(name) for name in names]
    rows = [runtime.advance([Part(s, p) for s, p in zip(sequences, prompts, strict=True)])]
    rows += [runtime.decode(sequences, [token] * len(sequences)) for token in (11, 12)]
    for sequence in sequences:
        sequence.close()
    return list(torch.stack(rows, 1))


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [("model.layers.0.self_attn.q_proj", (32, 128), "shapes are not"),
     ("model.layers.9.self_attn.q_proj", (64, 128), "no linear"), ("lm_head", (64, 160), "no linear")],
)  # fmt: skip
def test_what_the_model_does_not_have_is_refused(
    path: str, shape: tuple[int, int], message: str, packed: Packer, tmp_path: Path
) -> None:
    assert "qwen3_moe" in ARCHITECTURES
    write_lora(tmp_path, {path: LoraPair(torch.randn(4, shape[0]), torch.randn(shape[1], 4), 1.0)})
    with pytest.raises(AdapterError, match=message):
        load(packed("qwen3_moe", 4), Options(memory="8GiB", ctx_size=256, adapter=str(tmp_path)))


def test_heads_cannot_be_one_sequence_s(packed: Packer, tmp_path: Path) -> None:
    from stoker.adapter.init import init_adapter

    store = packed("qwen3_moe", 4)
    init_adapter(open_store(store), tmp_path / "heads", hidden=24)
    with pytest.raises(OptionError, match="only a LoRA"):
        load(store, Options(memory="8GiB", loras=(("x", str(tmp_path / "heads")),)))
