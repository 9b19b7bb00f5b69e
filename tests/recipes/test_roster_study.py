"""Training under a rule: the forward pass is transformers' under the plain rule, and gradients reach the router."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.roster import rules, study, training
from recipes.testbed import model as testbed
from recipes.testbed.sources import DOMAINS
from stoker.routing.roster_options import Prefix, RosterOptions
from tests.routing.roster_oracle import PlainRoster
from tests.runtime.oracle import relative_l2
from tests.runtime.rostered import routed_by

OPTIONS = RosterOptions((4,), Prefix(share=0.3), 0.1, shift=None)


@pytest.fixture
def loud() -> testbed.Qwen3MoeForCausalLM:
    """A random model whose matrices are large enough that routing is far from uniform."""
    made = testbed.build("s8k2", seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return made


def test_the_training_pass_is_transformers_under_the_plain_rule(loud: testbed.Qwen3MoeForCausalLM) -> None:
    ids = torch.randint(0, testbed.ENTRIES, (1, 100), generator=torch.Generator().manual_seed(1))
    rule = rules.Rostered(2, noting=True, options=OPTIONS)
    hidden, _, _ = testbed.hidden_states(loud, ids, partial(testbed.layer_step, choose=rule))
    hidden.sum().backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in loud.model.layers)
    loud.set_experts_implementation("eager")
    loud.set_attn_implementation("sdpa")
    with torch.no_grad(), routed_by(loud, lambda _: PlainRoster(8, 2, 4, 0.1, 30)) as taken:
        theirs = loud.model(input_ids=ids, use_cache=False).last_hidden_state
    for layer, rows in taken.items():
        assert np.array_equal(np.sort(rows), np.sort(rule.seen[layer][0][0]))
    assert relative_l2(hidden.detach(), theirs) < 1e-4
    assert all(len(np.unique(seen[0][:, 30:])) <= 4 for seen in rule.seen.values())
    assert (rules.working_set(rule, 100) >= 4).all()


@pytest.fixture
def token_files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for split in ("train", "valid"):
            np.save(tmp_path / f"{domain}.{split}.npy", rng.integers(0, 64, 700).astype(np.uint16))
    return tmp_path


@pytest.mark.parametrize("rule", ["roster", "amplifier", "distil"])
def test_a_run_goes_on_from_another_and_after_a_kill(token_files: Path, rule: str) -> None:
    common = {"step_tokens": 128, "window": 64, "warmup_steps": 1, "optimiser": "adamw"}
    first = training.RuleRun(training.RulePlan("s8k2", 256, **common), token_files / "base", token_files)
    first.go(until=float("inf"))
    plan = training.RulePlan("s8k2", 384, rule=rule, start=str(token_files / "base"), trains="experts", **common)
    whole = training.RuleRun(plan, token_files / "whole", token_files)
    gates = whole.model.model.layers[0].mlp.gate.weight.clone()
    experts = whole.model.model.layers[0].mlp.experts.down_proj.clone()
    whole.go(until=float("inf"))
    assert torch.equal(whole.model.model.layers[0].mlp.gate.weight, gates), "the experts alone"
    assert not torch.equal(whole.model.model.layers[0].mlp.experts.down_proj, experts)
    killed = training.RuleRun(plan, token_files / "killed", token_files)
    killed.train_step()
    killed.save()
    resumed = training.RuleRun(plan, token_files / "killed", token_files)
    assert resumed.step == 1
    resumed.go(until=float("inf"))
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_amplifier_makes_the_rich_richer() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 200, 16)).astype(np.float32)
    free, biased = rules.Free(2), rules.Amplified(2, strength=2.0)
    used = [len(np.unique(rule.choose(0, scores)[0])) for rule in (free, biased)]
    assert used[1] < used[0] == 16


def test_paired_intervals() -> None:
    low, high = study.interval(np.full(10, 0.3))
    assert low == high == pytest.approx(0.3)
