"""Training along rosters is training along what is served: the same routes, and an adapter that says which rosters."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.adapter.manifest import read_manifest
from stoker.errors import OptionError
from stoker.routing.roster_options import Prefix, RosterOptions
from stoker.runtime.model import Options
from stoker.runtime.model import load as serve
from stoker.train.model import BaseOptions, load
from stoker.train.session import Student
from tests.runtime.conftest import Packer
from tests.train.test_gradients import some_ids
from tests.train.test_runs import command, run
from tests.train.test_student import whole_batch

OPTIONS = RosterOptions((4,), Prefix(tokens=16), 0.1, shift=None)


def test_training_goes_along_the_rosters_that_are_served(packed: Packer) -> None:
    store, ids = packed("qwen3_moe", 4), some_ids(2, 40)
    with load(store, BaseOptions(memory="6GiB", step_tokens=80, threads=1)) as base:
        student = Student.of(base)
        student.add_roster(OPTIONS)
        with torch.no_grad(), student.routing(whole_batch(ids, 40)):
            trained = base.logits(base.hidden_states(ids).flatten(0, 1))
        with torch.no_grad(), student.untrained(), student.routing(whole_batch(ids, 40)):
            free = base.logits(base.hidden_states(ids).flatten(0, 1))
    rosters = {"routing": "roster", "roster_size": "4", "pin_after": "16", "delta": 0.1}
    with serve(store, Options(memory="6GiB", ctx_size=64, **rosters)) as runtime:
        served = runtime.logits(ids).flatten(0, 1)
    apart = (served - trained).norm(dim=-1) / trained.norm(dim=-1)
    assert (apart < 1e-2).float().mean() >= 0.9, apart
    assert ((free - trained).norm(dim=-1) / trained.norm(dim=-1) > 0.1).float().mean() > 0.3, "rosters matter"


def test_the_command_writes_an_adapter_that_names_its_rosters(packed: Packer, tmp_path: Path) -> None:
    store, text, out = packed("qwen3_moe", 4), tmp_path / "ids.npy", tmp_path / "out"
    np.save(text, np.random.default_rng(0).integers(3, 150, 3000))
    done = run([*command("roster", store, out, text, 3), "--roster-size", "4"])
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(out)
    assert manifest.roster is not None and manifest.roster["sizes"] == [4] and manifest.roster["pin_after"] == "20%"
    assert "--routing roster --roster-size 4" in done.stdout


def test_what_does_not_fit_is_refused(packed: Packer) -> None:
    with load(packed("qwen3_moe", 4), BaseOptions(memory="6GiB", step_tokens=64, threads=1)) as base:
        for options in (RosterOptions((9,)), RosterOptions((4,), Prefix(prompt=True))):
            with pytest.raises(OptionError):
                Student.of(base).add_roster(options)
