"""The testbed: its committed models through stoker, and the parts of the recipe that its figures rest on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.testbed import clean, corpus, evaluate, model, train
from recipes.testbed.head import cross_entropy
from recipes.testbed.measure import load as load_model
from recipes.testbed.measure import token_losses
from recipes.testbed.ngram import NGram
from recipes.testbed.quantise import rounded
from recipes.testbed.sources import DOMAINS
from stoker.checkpoint.source import open_checkpoint
from stoker.quant.formats import MatrixSpec, WeightFormat
from stoker.quant.reference import dequantize_rows, quantize_rows
from stoker.runtime.model import Options, load
from stoker.store.pack import pack
from stoker.store.packplan import PackOptions, plan_pack
from tests.runtime.oracle import relative_l2
from tests.runtime.routes import RouteRecorder, forced_routes

COMMITTED = Path(__file__).resolve().parents[2] / "recipes" / "testbed"
NAMES = [name for name in sorted(model.SHAPES) if (COMMITTED / name / "model.safetensors").exists()]


@pytest.mark.parametrize("name", NAMES)
def test_stoker_computes_the_committed_model(name: str, tmp_path: Path) -> None:
    """At 16 bits, against transformers' eager model, on text of the test split."""
    published = AutoModelForCausalLM.from_pretrained(
        COMMITTED / name, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    ids = evaluate.sample_ids(COMMITTED / name)[0][:, :96]
    pack(plan_pack(open_checkpoint(COMMITTED / name), PackOptions(bits=16)), tmp_path / "store")
    recorder = RouteRecorder()
    with load(tmp_path / "store", Options(memory="2GiB", ctx_size=256), recorder) as runtime:
        ours = runtime.logits(ids)
    with torch.inference_mode(), forced_routes(published, recorder.take()):
        theirs = published(input_ids=ids).logits
    assert relative_l2(ours, theirs) < 5e-3
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.98


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_figures_are_those_of_the_committed_weights(name: str) -> None:
    results = json.loads(evaluate.RESULTS.read_text())[name]
    training = json.loads((COMMITTED / name / "training.json").read_text())
    assert results["weights_sha256"] == training["weights_sha256"]
    assert results["tokens_seen"] == training["tokens_seen"]
    perplexity = evaluate.sample_perplexity(load_model(COMMITTED / name), COMMITTED / name)
    assert perplexity == pytest.approx(results["sample_perplexity"], rel=2e-3)


def test_the_committed_weights_are_small() -> None:
    assert NAMES
    total = sum(path.stat().st_size for name in NAMES for path in (COMMITTED / name).iterdir())
    assert total < 25_000_000


@pytest.fixture
def loud() -> model.Qwen3MoeForCausalLM:
    """A random model whose matrices are large enough that routing and attention are far from uniform."""
    made = model.build("e8k2", seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return made


def test_the_training_pass_is_transformers_own(loud: model.Qwen3MoeForCausalLM) -> None:
    """Loss and every gradient, against eager experts, SDPA attention and the whole logits."""
    ids = torch.randint(0, model.ENTRIES, (2, 200), generator=torch.Generator().manual_seed(1))
    hidden, balance, load = model.hidden_states(loud, ids[:, :-1])
    head = loud.model.embed_tokens.weight
    loss = cross_entropy(hidden.flatten(0, 1), head, ids[:, 1:].reshape(-1), torch.float32)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in loud.named_parameters()}
    loud.zero_grad()
    loud.set_experts_implementation("eager")
    loud.set_attn_implementation("sdpa")
    logits = loud(input_ids=ids[:, :-1], use_cache=False).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1))
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    for name, parameter in loud.named_parameters():
        assert relative_l2(ours[name], parameter.grad) < 1e-4, name
    assert load.sum(1) == pytest.approx(torch.ones(len(load)), abs=1e-5)
    assert balance > 1


@pytest.fixture
def token_files(tmp_path: Path) -> Path:
    """Small random token files in place of the corpus."""
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for split, length in (("train", 1200), ("valid", 600)):
            np.save(tmp_path / f"{domain}.{split}.npy", rng.integers(0, 64, length).astype(np.uint16))
    return tmp_path


def test_a_killed_run_goes_on_with_the_same_curve(token_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a checkpoint and one step more: metrics fall back to the checkpoint, then every number repeats."""
    monkeypatch.setattr(train, "LOG_STEPS", 1)
    plan = train.Plan("e8k2", tokens=4 * 1024, step_tokens=1024, warmup_steps=2)

    def run(directory: str) -> train.Run:
        return train.Run(plan, token_files / directory, token_files, compiled=False)

    def curve(directory: str) -> list[tuple[int, float, float]]:
        lines = (token_files / directory / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"], line["gradient"]) for line in map(json.loads, lines)]

    run("whole").go(until=math.inf)
    killed = run("killed")
    for _ in range(2):
        killed.log(killed.train_step() | {"tokens_s": 1})
    killed.save()
    killed.log(killed.train_step() | {"tokens_s": 1})
    with open(token_files / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    resumed = run("killed")
    assert resumed.step == 2 and len(curve("killed")) == 2
    resumed.go(until=math.inf)
    assert curve("killed") == curve("whole")
    with pytest.raises(SystemExit, match="another plan"):
        train.Run(train.Plan("e8k2", plan.tokens, seed=9), token_files / "killed", token_files, compiled=False)


def test_the_learning_rate_before_the_decay_does_not_depend_on_the_length() -> None:
    short, long = train.Plan("e8k2", 20_000_000), train.Plan("e8k2", 40_000_000)
    assert [short.rate(i) for i in range(short.decay_from)] == [long.rate(i) for i in range(short.decay_from)]
    assert short.rate(short.steps) == pytest.approx(short.last_part)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_stokers_own_rule(bits: int) -> None:
    weights = torch.randn(24, 192, generator=torch.Generator().manual_seed(bits))
    weights[3, :64] = 0.25
    fmt = WeightFormat("affine", bits, 64)
    theirs = dequantize_rows(quantize_rows(weights, fmt), MatrixSpec(24, 192, fmt))
    assert torch.equal(rounded(weights, bits), theirs)
    errors = [(rounded(weights, fewer) - weights).norm().item() for fewer in (8, 4, 3, 2)]
    assert errors == sorted(errors)


def test_the_ngram_is_a_distribution_and_learns() -> None:
    rng = np.random.default_rng(0)
    stream = np.cumsum(rng.integers(0, 2, 3000)).astype(np.uint16) % 7
    fitted = NGram.fit([stream[:2000]], vocabulary=9)
    context = stream[2000:2010]
    after = [np.exp(fitted.log_probabilities(np.append(context, token).astype(np.uint16))[-1]) for token in range(9)]
    assert sum(after) == pytest.approx(1)
    assert min(after) > 0, "tokens that were never seen keep some mass"
    assert -fitted.log_probabilities(stream[2000:]).mean() < math.log(2) * 1.2, "the source has one bit a token"


def test_duplicates_of_tested_text_leave_the_training_text() -> None:
    seen = corpus.Seen()
    tested = "The quick brown fox jumps over the lazy dog while seventeen patient turtles look on from the river bank."
    assert seen.fresh(tested) == tested
    near = tested.replace("seventeen patient", "seventeen, patient").replace("bank.", "bank!")
    other = "An entirely different paragraph about the making of bread, which shares no run of words with the first."
    assert seen.fresh(f"{tested}\n\n{other}") == other
    assert seen.fresh(near) == ""
    assert seen.fresh("Yes.\n\nYes.") == "Yes.\n\nYes.", "short lines may recur"


def test_manual_pages_and_html_become_plain_text() -> None:
    page = '.TH X 1\n.SH NAME\ntan \\- tangent\n.BI "double tan(double " x );\n.\\" a comment\n\\fBbold\\fP \\(bu end'
    assert clean.tidy(clean.roff(page)) == "NAME\n\ntan - tangent\ndouble tan(double x);\nbold * end"
    text = clean.html("<head><title>t</title></head><p>One  <b>two</b><script>x()</script></p><pre>a\n  b</pre>")
    assert clean.tidy(text) == "One two\n\na\nb"


def test_results_compare_the_models_with_the_ngram_on_every_domain() -> None:
    results = json.loads(evaluate.RESULTS.read_text())
    for name in NAMES:
        assert set(results[name]["perplexity"]) == set(results["ngram"])
        loads = [results[name]["routing"][domain] for domain in DOMAINS]
        assert all(one["reuse_chance"] <= one["reuse_lag_1"] < 1 for one in loads), "routing follows the text"
        assert all(0.5 < one["load_entropy"] < 1 for one in loads), "neither collapsed nor uniform"


def test_token_losses_are_those_of_the_logits(loud: model.Qwen3MoeForCausalLM) -> None:
    ids = torch.randint(0, model.ENTRIES, (3, 65), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden, _, _ = model.hidden_states(loud, ids[:, :-1])
        chances = (hidden @ loud.model.embed_tokens.weight.t()).log_softmax(-1)
    expected = -chances.gather(-1, ids[:, 1:, None])[..., 0]
    assert token_losses(loud, ids) == pytest.approx(expected.numpy(), abs=1e-4)
