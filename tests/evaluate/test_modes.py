"""`stoker eval modes`: what is measured of each mode, and that a bound found on one text holds on another."""

from pathlib import Path

import pytest
import torch

from stoker.adapter.init import init_adapter
from stoker.evaluate.models import StoreScorer
from stoker.evaluate.modes import Candidate, candidates, measure_modes
from stoker.evaluate.run import Text, evaluate
from stoker.evaluate.text import Window, bundled
from stoker.runtime.model import Options, load
from stoker.store.reader import open_store
from tests.generate.stores import pack, write_checkpoint

OPTIONS = Options(memory="6GiB", ctx_size=128, threads=1)
FEW = {"windows": 1, "window_tokens": 100, "prompt_tokens": 20}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("modes")
    packed = pack(write_checkpoint(base / "checkpoint"), base / "store", "--bits", 8, "--group-size", 32)
    init_adapter(open_store(packed), base / "heads", hidden=16, random=True)
    return packed


def test_every_mode_is_measured_against_the_gates(store: Path) -> None:
    text = Text("half", bundled("calibrate"), **FEW)
    told: list[str] = []
    found = measure_modes(store, candidates(open_store(store), [store.parent / "heads"]), text, OPTIONS, told.append)
    exact, heads = found[0], next(mode for mode in found if mode.name == "adapter heads")
    assert exact.options == {} and exact.kl_high == 0 and exact.ratio_high == 1 and exact.ms_per_token > 0
    assert heads.options == {"adapter": str(store.parent / "heads")} and heads.adapter_fingerprint
    assert heads.kl_high > heads.kl > 0 and heads.slot_agreement < 1 and heads.fed == "answer"
    assert len(told) == len(found) and "KL" in told[-1]
    # The same by another way: two loaded models, side by side.
    with load(store, OPTIONS) as plain, load(store, Options(**(vars(OPTIONS) | heads.options))) as served:
        result = evaluate(served, text, reference=StoreScorer(plain))
    assert heads.kl == result["against_reference"]["all"]["kl_mean"]


def test_a_bound_found_on_one_half_holds_on_the_other(store: Path) -> None:
    """The upper end that was calibrated, on text that was not used for it."""
    options = {"windows": 3, "window_tokens": 100, "prompt_tokens": 20}
    adapter = Candidate("heads", {"adapter": str(store.parent / "heads")})
    (_, mode) = measure_modes(store, [adapter], Text("half", bundled("calibrate"), **options), OPTIONS)
    with load(store, OPTIONS) as plain, load(store, Options(**(vars(OPTIONS) | adapter.options))) as served:
        held_out = Text("other half", bundled("held-out"), **options)
        result = evaluate(served, held_out, reference=StoreScorer(plain))
    assert result["against_reference"]["all"]["kl_mean"] <= mode.kl_high


def test_the_prerouter_is_the_same_at_once_and_token_by_token(store: Path) -> None:
    """Also where no gate is asked any more: what it would have chosen is recorded all the same."""
    with load(store, Options(**(vars(OPTIONS) | {"adapter": str(store.parent / "heads")}))) as runtime:
        ids = tuple(runtime.tokenizer.encode(bundled("held-out")[0].text)[:90])
        feeds = ("answer", "token by token")
        found = [StoreScorer(runtime, feed=feed, prompt_tokens=20).score(Window("d", 0, ids), 20) for feed in feeds]
    assert torch.equal(found[0].logits_NV, found[1].logits_NV)
    for one, other in zip(found[0].routes, found[1].routes, strict=True):
        assert torch.equal(one.used_TK, other.used_TK) and torch.equal(one.chosen_TK, other.chosen_TK)
        assert one.chosen_TK.shape == (69, 2) and torch.allclose(one.scores_TE, other.scores_TE)
    assert not torch.equal(found[0].routes[1].used_TK.sort().values, found[0].routes[1].chosen_TK.sort().values)
