"""A store against the checkpoint that it was packed from, run by transformers itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stoker.errors import CheckpointError, OptionError
from stoker.evaluate.measure import measure
from stoker.evaluate.models import CheckpointScorer, StoreScorer, checkpoint_bytes
from stoker.evaluate.results import compare, summarise
from stoker.evaluate.text import Window
from stoker.runtime.model import Options, Runtime, load
from tests.runtime.conftest import Packer

OPTIONS = Options(memory="6GiB", ctx_size=128, threads=1)


def random_windows(count: int, tokens: int = 48) -> list[Window]:
    random = np.random.default_rng(0)
    return [
        Window("even" if number % 2 == 0 else "odd", number, tuple(random.integers(3, 160, tokens).tolist()))
        for number in range(count)
    ]


@pytest.fixture
def store(packed: Packer) -> Runtime:
    with load(packed("qwen3_moe", 16), OPTIONS) as runtime:
        yield runtime


@pytest.fixture
def source(packed: Packer) -> Path:
    return packed("qwen3_moe", 16).parent / "source"


def test_sixteen_bits_say_what_the_checkpoint_says(store: Runtime, source: Path) -> None:
    figures = summarise(measure(StoreScorer(store), random_windows(6), reference=CheckpointScorer(source)))
    against = figures["against_reference"]["all"]
    assert figures["tokens"] == 6 * 47
    assert against["kl_mean"] < 5e-4 and against["top1_agreement"] > 0.98
    assert against["ratio"] == pytest.approx(1, abs=5e-3)
    assert figures["routes_against_reference"]["slot_agreement"] > 0.995
    assert set(figures["perplexity"]) == {"even", "odd", "all"}
    # The reference's perplexity, by transformers' own loss.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    losses = [float(model(torch.tensor([w.ids]), labels=torch.tensor([w.ids])).loss) for w in random_windows(6)]
    assert against["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_four_bits_cost_something_and_are_seen(packed: Packer, source: Path) -> None:
    with load(packed("qwen3_moe", 4), OPTIONS) as runtime:
        figures = summarise(measure(StoreScorer(runtime), random_windows(4), reference=CheckpointScorer(source)))
    against = figures["against_reference"]["all"]
    assert against["kl_mean"] > 1e-3 and against["kl_p99"] is None  # 188 tokens have no 99th percentile
    assert figures["routes_against_reference"]["slot_agreement"] < 1
    assert figures["routes_against_gate"] == {"slot_agreement": 1.0, "weight_mass_kept": 1.0}


def test_a_checkpoint_streamed_from_disk_says_the_same(source: Path) -> None:
    pytest.importorskip("accelerate")
    whole = CheckpointScorer(source)
    streamed = CheckpointScorer(source, memory_bytes=checkpoint_bytes(source) // 4)
    window = random_windows(1)[0]
    assert "disk" in streamed.model.hf_device_map.values()
    ours, theirs = streamed.score(window, 5), whole.score(window, 5)
    torch.testing.assert_close(ours.logits_NV, theirs.logits_NV, atol=1e-4, rtol=1e-4)
    assert ours.logits_NV.shape == (42, 160)
    for one, other in zip(ours.routes, theirs.routes, strict=True):
        assert torch.equal(one.used_TK, other.used_TK) and len(one.used_TK) == 42


def test_no_weights_to_compare_with(packed: Packer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((packed("qwen3_moe", 16) / "config.json").read_text())
    with pytest.raises(CheckpointError, match="no weights"):
        CheckpointScorer(tmp_path)


def test_rows_are_scored_on_the_token_after_them(store: Runtime) -> None:
    """From the first row asked for, the same rows whatever stands before."""
    window = random_windows(1)[0]
    everything = StoreScorer(store, routes=False).score(window, 0)
    later = StoreScorer(store, routes=False).score(window, 30)
    assert torch.equal(later.logits_NV, everything.logits_NV[30:]) and later.routes == []
    logits_TV = store.logits(torch.tensor([window.ids]))[0]
    assert torch.equal(everything.logits_NV, logits_TV[:-1])


def test_token_by_token_says_the_same_without_a_mode(store: Runtime) -> None:
    window = random_windows(1)[0]
    expected = StoreScorer(store).score(window, 20)
    found = StoreScorer(store, feed="token by token", prompt_tokens=20).score(window, 20)
    assert torch.equal(found.logits_NV, expected.logits_NV)
    assert all(torch.equal(a.used_TK, b.used_TK) for a, b in zip(found.routes, expected.routes, strict=True))


def test_results_are_compared_by_document(packed: Packer, store: Runtime, source: Path) -> None:
    windows = random_windows(6)
    about = {"text": {"sha256": "t"}}
    reference = CheckpointScorer(source)
    fine = about | summarise(measure(StoreScorer(store), windows, reference=reference))
    with load(packed("qwen3_moe", 4), OPTIONS) as coarse_runtime:
        coarse = about | summarise(measure(StoreScorer(coarse_runtime), windows, reference=reference))
    found = compare(coarse, fine)
    assert found["all"]["ratio"] == pytest.approx(coarse["perplexity"]["all"] / fine["perplexity"]["all"], rel=1e-4)
    # Paired with the store in between, and with the checkpoint in one run: 16 bits are nearly the checkpoint.
    assert found["all"]["ratio_95"] == pytest.approx(coarse["against_reference"]["all"]["ratio_95"], abs=2e-3)
    assert compare(fine, fine)["odd"] == {"ratio": 1.0, "ratio_95": [1.0, 1.0]}
    fewer = about | summarise(measure(StoreScorer(store), windows[:4]))
    with pytest.raises(OptionError, match="different tokens"):
        compare(fine, fewer)
