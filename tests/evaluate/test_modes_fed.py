"""How a routing mode is fed and what is said of it: a rule that changes routes in a way that is known."""

import pytest
import torch

from stoker.evaluate.measure import measure
from stoker.evaluate.models import StoreScorer
from stoker.evaluate.results import summarise
from stoker.evaluate.run import feed_of
from stoker.routing.rule import RouteState, RoutingRule
from stoker.runtime.model import Options, load
from tests.evaluate.test_models import random_windows
from tests.runtime.conftest import Packer

PROMPT = 20


class LastChoiceSwapped(RoutingRule):
    """An answer's tokens use, in place of their weakest expert, the one with the next id that they did not choose."""

    name = "swapped"

    def new_state(self) -> RouteState:
        return RouteState()

    def route(self, layer, rows, hidden_TD, logits_TE, index_TK, weights_TK):  # type: ignore[no-untyped-def]
        index_TK = index_TK.clone()
        for span in rows.spans:
            for row in range(span.answer_row, span.last) if span.state is not None else ():
                other = (int(index_TK[row, -1]) + 1) % 8
                while other in index_TK[row].tolist():
                    other = (other + 1) % 8
                index_TK[row, -1] = other
        return index_TK, weights_TK


@pytest.fixture
def runtime(packed: Packer):  # type: ignore[no-untyped-def]
    with load(packed("qwen3_moe", 8), Options(memory="6GiB", ctx_size=128, threads=1)) as loaded:
        loaded.follow(LastChoiceSwapped())
        yield loaded


def test_at_once_and_token_by_token_are_the_same_for_a_mode_that_asks_nothing(runtime) -> None:  # type: ignore[no-untyped-def]
    window = random_windows(1)[0]
    found = {
        feed: StoreScorer(runtime, feed=feed, prompt_tokens=PROMPT).score(window, PROMPT)
        for feed in ("answer", "token by token")
    }
    assert torch.equal(found["answer"].logits_NV, found["token by token"].logits_NV)
    for one, other in zip(*(scored.routes for scored in found.values()), strict=True):
        assert torch.equal(one.used_TK, other.used_TK)


def test_the_same_store_is_its_own_reference(runtime, packed: Packer) -> None:  # type: ignore[no-untyped-def]
    """One loaded model on both sides: what the mode does never reaches the gate's run."""
    model = StoreScorer(runtime, feed="answer", prompt_tokens=PROMPT)
    exact = StoreScorer(runtime, gate=True)
    windows = random_windows(3)
    figures = summarise(measure(model, windows, reference=exact, first=PROMPT))
    assert figures["routes_against_gate"]["slot_agreement"] == 0.5  # one of two experts is another
    assert figures["routes_against_gate"]["weight_mass_kept"] < 1
    assert figures["routes_against_reference"]["slot_agreement"] < 1
    assert figures["against_reference"]["all"]["kl_mean"] > 1e-3
    assert exact.about()["routing"] == {"mode": "exact", "lossless": True}
    with load(packed("qwen3_moe", 8), Options(memory="6GiB", ctx_size=128, threads=1)) as plain:
        for window in windows:
            expected = StoreScorer(plain).score(window, PROMPT).logits_NV
            assert torch.equal(exact.score(window, PROMPT).logits_NV, expected)


def test_a_prompt_alone_is_exact(runtime) -> None:  # type: ignore[no-untyped-def]
    window = random_windows(1)[0]
    fed = StoreScorer(runtime, feed="prompt").score(window, 0)
    assert torch.equal(fed.logits_NV, StoreScorer(runtime, gate=True).score(window, 0).logits_NV)


def test_a_mode_that_looks_at_memory_goes_token_by_token() -> None:
    class Looking(RoutingRule):
        asks_residency = True

    assert (feed_of(None), feed_of(RoutingRule()), feed_of(Looking())) == ("prompt", "answer", "token by token")
