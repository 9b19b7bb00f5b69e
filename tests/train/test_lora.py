"""LoRA files are PEFT's: the library itself reads them and computes the same."""

from pathlib import Path

import pytest
import torch

from stoker.errors import AdapterError, OptionError
from stoker.store.reader import open_store
from stoker.train.model import BaseOptions, load
from stoker.train.output import load_into, save
from stoker.train.session import Student
from tests.runtime.conftest import Packer
from tests.runtime.oracle import oracle_of, relative_l2
from tests.train.test_gradients import some_ids
from tests.train.test_student import shaken_student, whole_batch


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe"])
def test_peft_computes_the_same_from_the_files(architecture: str, packed: Packer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    store, ids = packed(architecture, 4), some_ids(1, 12)
    student = shaken_student(store)
    student.heads = None
    with torch.no_grad():
        ours = student.model.logits(student.model.hidden_states(ids)[0])
    save(student, tmp_path, {}, {}, {})
    student.model.close()
    model = peft.PeftModel.from_pretrained(oracle_of(open_store(store)), str(tmp_path)).eval()
    with torch.no_grad():
        theirs = model(input_ids=ids).logits[0]
        with model.disable_adapter():
            plain = model(input_ids=ids).logits[0]
    assert relative_l2(ours, theirs) < 1e-5
    assert relative_l2(plain, theirs) > 1e-1  # the update does something


def test_what_was_written_is_read_back(packed: Packer, tmp_path: Path) -> None:
    store, batch = packed("qwen3_moe", 4), whole_batch(some_ids(2, 12))
    student = shaken_student(store)
    save(student, tmp_path, {"stages": []}, {}, {"ratio": 1.0})
    again = Student.of(load(store, BaseOptions(memory="6GiB", step_tokens=64, threads=1)))
    load_into(again, tmp_path)
    hidden = []
    for one in (student, again):
        with torch.no_grad(), one.routing(batch):
            hidden.append(one.model.hidden_states(batch.ids_BT))
        one.model.close()
    assert torch.equal(*hidden)


def test_another_base_or_k_is_refused(packed: Packer, tmp_path: Path) -> None:
    student = shaken_student(packed("qwen3_moe", 4))
    save(student, tmp_path, {}, {}, {})
    for store, k, error in (("qwen3_moe", 1, OptionError), ("olmoe", None, AdapterError)):
        with load(packed(store, 4), BaseOptions(memory="6GiB", step_tokens=64, threads=1)) as base:
            other = Student.of(base, k)
            with pytest.raises(error) as raised:
                load_into(other, tmp_path)
            if error is AdapterError:
                assert student.model.store.fingerprint in str(raised.value)
                assert base.store.fingerprint in str(raised.value)
    student.model.close()
