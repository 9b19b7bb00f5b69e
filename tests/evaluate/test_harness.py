"""The adapter for lm-evaluation-harness: named when it is missing, right where it is there."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import stoker
from stoker.errors import StokerError
from tests.cli.conftest import ENVIRONMENT
from tests.generate.stores import pack, write_checkpoint

INSTALLED = find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> stoker.Model:
    base = tmp_path_factory.mktemp("harness")
    store = pack(write_checkpoint(base / "checkpoint"), base / "store", "--bits", 16)
    with stoker.load(store, memory="6GiB", threads=1, ctx_size=256) as loaded:
        yield loaded


def test_importing_it_does_not_import_the_harness() -> None:
    code = "import sys, stoker.evaluate.harness; print('lm_eval' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "False\n"


@pytest.mark.skipif(INSTALLED, reason="the extra is installed")
def test_a_missing_extra_is_named(model: stoker.Model) -> None:
    from stoker.evaluate.harness import run_tasks

    with pytest.raises(StokerError, match=r"stoker\[eval\]"):
        run_tasks(model, ["any"])


@pytest.mark.skipif(not INSTALLED, reason="needs the eval extra")
def test_log_likelihoods_and_answers_are_the_models(model: stoker.Model) -> None:
    from lm_eval.api.instance import Instance

    from stoker.evaluate.harness import _adapter

    adapter = _adapter(model)
    request = Instance("loglikelihood", {}, ("The meaning of", " the word"), 0)
    (found,) = adapter.loglikelihood([request])
    context, wanted = adapter.tok_encode("The meaning of"), adapter.tok_encode("The meaning of the word")
    rows = wanted[len(context) :]
    logits_TV = model.logits([wanted])[0].double().log_softmax(-1)
    expected = sum(float(logits_TV[len(context) - 1 + place, token]) for place, token in enumerate(rows))
    assert found[0] == pytest.approx(expected, abs=1e-6)
    assert found[1] == bool(torch.equal(logits_TV[len(context) - 1 : -1].argmax(-1), torch.tensor(rows)))
    generate = Instance("generate_until", {}, ("Hello", {"until": [], "max_gen_toks": 8}), 0)
    assert adapter.generate_until([generate]) == [
        model.generate(adapter.tok_encode("Hello"), max_tokens=8, temperature=0.0).text
    ]


@pytest.mark.skipif(not INSTALLED, reason="needs the eval extra")
def test_the_local_task_runs(model: stoker.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.evaluate.harness import run_tasks

    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    results = run_tasks(model, ["stoker_next_passage"], include=root / "recipes/tasks", limit=4)
    assert 0 <= results["results"]["stoker_next_passage"]["acc,none"] <= 1
