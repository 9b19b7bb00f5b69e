"""What is recorded of routes, and how they are compared: by sets, token by token."""

import pytest
import torch

from stoker.evaluate.routes import LayerRoutes, RouteMeter, agreement
from stoker.runtime.model import Options, load
from stoker.store.reader import open_store
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of

IDS = torch.tensor([[5, 9, 33, 21, 7, 100, 64, 2, 18, 150, 3, 3]])


def random_routes(tokens: int, experts: int, chosen: int, seed: int, used: int | None = None) -> LayerRoutes:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.randn(tokens, experts, generator=generator).softmax(-1)
    used_TK = torch.stack([torch.randperm(experts, generator=generator)[: used or chosen] for _ in range(tokens)])
    return LayerRoutes(used_TK, scores_TE.topk(chosen).indices, scores_TE)


@pytest.mark.parametrize("used", [4, 2, 6])
def test_agreement_counts_sets_and_mass(used: int) -> None:
    """Also where fewer or more experts are used than were chosen."""
    ours = [random_routes(20, 12, 4, seed, used) for seed in (0, 1)]
    theirs = [random_routes(20, 12, 4, seed) for seed in (2, 3)]
    slots, masses = [], []
    for a, b in zip(ours, theirs, strict=True):
        for token in range(20):
            chosen, mine = set(b.chosen_TK[token].tolist()), set(a.used_TK[token].tolist())
            slots.append(len(chosen & mine) / len(chosen))
            scores = b.scores_TE[token].tolist()
            masses.append(sum(scores[e] for e in mine) / sum(scores[e] for e in chosen))
    found = agreement(ours, theirs)
    assert found.slots == pytest.approx(sum(slots) / len(slots), rel=1e-6)
    assert found.mass == pytest.approx(sum(masses) / len(masses), rel=1e-6)
    assert found.tokens == 20


def test_the_gate_agrees_with_itself() -> None:
    routes = random_routes(10, 8, 2, 0)
    same = [LayerRoutes(routes.chosen_TK.flip(-1), routes.chosen_TK, routes.scores_TE)]
    assert agreement(same, same).slots == 1.0
    assert agreement(same, same).mass == pytest.approx(1.0)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_streamed_model_and_a_whole_one_are_recorded_alike(packed: Packer, architecture: str) -> None:
    """Softmax and sigmoid gates, paged and transformers' attention; reads ahead ask gates early and must not count."""
    directory = packed(architecture, 16)
    eager = oracle_of(open_store(directory))
    whole = RouteMeter(eager)
    with whole.recording(), torch.inference_mode():
        eager(input_ids=IDS)
    with load(directory, Options(memory="6GiB", ctx_size=64, threads=1, path="staged", slots=None)) as runtime:
        streamed = RouteMeter(runtime.model)
        with streamed.recording():
            runtime.logits(IDS)
        ours, theirs = streamed.take(), whole.take()
        runtime.logits(IDS)  # nobody listens
        with streamed.recording():
            runtime.logits(IDS[:, :5])
        assert [len(one.used_TK) for one in streamed.take()] == [5] * len(ours)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.used_TK.sort().values, b.used_TK.sort().values)
        assert torch.equal(a.chosen_TK.sort().values, a.used_TK.sort().values)
        torch.testing.assert_close(a.scores_TE, b.scores_TE, atol=5e-3, rtol=0)
