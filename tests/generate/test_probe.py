"""The probe of a served mode: what it computes, that it leaves no trace, when it calls a bound broken."""

import numpy as np
import pytest
import torch

from stoker.generate.probe import LEAST, QualityProbe, kl
from stoker.runtime.model import Options, load
from stoker.runtime.step import Part
from tests.evaluate.test_modes_fed import LastChoiceSwapped
from tests.runtime.conftest import Packer, packed

__all__ = ["packed"]
PROMPT = [5, 9, 33, 21, 7, 100, 64, 2, 18, 150, 3, 3]
ANSWER = [17, 80, 41, 99, 6, 120, 33, 58]


@pytest.fixture
def runtime(packed: Packer):  # type: ignore[no-untyped-def]
    """Two slots a layer more than a token needs: what passes by must not stay."""
    options = Options(memory="6GiB", ctx_size=128, threads=1, path="hot", slots=(4, 4, 4), prefetch=0)
    with load(packed("qwen3_moe", 8), options) as loaded:
        loaded.follow(LastChoiceSwapped())
        yield loaded


def answer(runtime, probe: QualityProbe | None = None) -> tuple[torch.Tensor, list]:  # type: ignore[no-untyped-def]
    """Logits of a served answer [T, V], and who was resident after each step."""
    sequence = runtime.new_sequence()
    sequence.prompt_tokens = len(PROMPT)
    rows, residents = [], []
    runtime.prefill(sequence, PROMPT)
    for token in ANSWER:
        parts = [Part(sequence, [token], decode=True)]
        if probe is not None:
            probe.before(parts)
        rows.append(runtime.advance(parts))
        if probe is not None:
            probe.after([np.asarray(rows[-1][0])])
        residents.append([sorted(runtime.residency.resident(pool)) for pool in range(3)])
    sequence.close()
    return torch.cat(rows), residents


def test_it_leaves_no_trace(runtime, packed: Packer) -> None:  # type: ignore[no-untyped-def]
    """The same logits, the same experts in memory, the same counts of use as without it."""
    probe = QualityProbe(runtime, limit=10.0, share=1.0)
    with_probe, residents = answer(runtime, probe)
    options = Options(memory="6GiB", ctx_size=128, threads=1, path="hot", slots=(4, 4, 4), prefetch=0)
    with load(packed("qwen3_moe", 8), options) as other:
        other.follow(LastChoiceSwapped())
        expected, expected_residents = answer(other)
        assert (other.expert_uses() == runtime.expert_uses()).all()
    assert torch.equal(with_probe, expected) and residents == expected_residents
    found = probe.stats()
    assert found["probes"] == len(ANSWER) and found["read_bytes"] > 0 and found["seconds"] > 0


def test_it_measures_what_the_gates_would_say_next(runtime) -> None:  # type: ignore[no-untyped-def]
    """Of the first answer token the context is the gates' own, so the second opinion is the exact model's."""
    sequence = runtime.new_sequence()
    sequence.prompt_tokens = len(PROMPT)
    runtime.prefill(sequence, PROMPT)
    opinion = runtime.gate_logits(sequence, ANSWER[0])
    exact = runtime.logits(torch.tensor([[*PROMPT, ANSWER[0]]]), gate=True)[0, -1]
    assert torch.equal(opinion, exact)
    served = runtime.decode([sequence], [ANSWER[0]])[0]
    assert kl(np.asarray(opinion), np.asarray(served)) > 1e-4
    p, q = opinion.double().log_softmax(-1), served.double().log_softmax(-1)
    assert kl(np.asarray(opinion), np.asarray(served)) == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-6)
    sequence.close()


class Silent:
    """A runtime whose gates say that all tokens are alike."""

    def gate_logits(self, sequence: object, token: int) -> torch.Tensor:
        return torch.zeros(16)

    def counters(self) -> dict[str, int]:
        return {"demand_bytes": 0, "prefetch_bytes": 0}


class Answering:
    routing = object()


def run(probe: QualityProbe, tokens: int, served: np.ndarray, together: int = 1) -> None:
    for _ in range(tokens // together):
        parts = [Part(Answering(), [1], decode=True) for _ in range(together)]
        probe.before(parts)
        probe.after([served] * together)


@pytest.mark.parametrize("together", [1, 3, 8])
def test_the_share_is_kept_whatever_runs_together(together: int) -> None:
    probe = QualityProbe(Silent(), 1.0, share=1 / 8)
    run(probe, 960, np.zeros(16, np.float32), together)
    assert probe.stats()["probes"] == 120


def test_a_bound_breaks_by_more_than_noise_and_not_before_there_is_evidence() -> None:
    bad = np.zeros(16, np.float32)
    bad[3] = 2.0
    distance = kl(np.zeros(16, np.float32), bad)
    kept = QualityProbe(Silent(), distance * 1.01, share=1.0)
    run(kept, 4 * LEAST, bad)
    assert not kept.broken
    broken = QualityProbe(Silent(), distance * 0.99, share=1.0)
    run(broken, LEAST - 1, bad)
    assert not broken.broken
    run(broken, 1, bad)
    assert broken.broken and broken.stats()["broken"] == 1


def test_prompts_and_exact_answers_are_not_probed() -> None:
    probe = QualityProbe(Silent(), 1.0, share=1.0)

    class Exact:
        routing = None

    probe.before([Part(Answering(), [1, 2, 3]), Part(Exact(), [1], decode=True)])
    probe.after([None, np.zeros(16, np.float32)])
    assert probe.stats()["probes"] == 0
