"""Expert use counts against the routes that a trace of the same run recorded."""

from pathlib import Path

import numpy as np

import stoker
from stoker.runtime.uses import LISTED
from stoker.trace.reader import Trace
from tests.runtime.conftest import Packer
from tests.runtime.tiny import VOCABULARY


def test_uses_are_those_of_the_recorded_routes(packed: Packer, tmp_path: Path) -> None:
    """Prefill by counting, prefill by listing, one token and several sequences in a step: every way of counting."""
    with stoker.load(packed("qwen3_moe", 16), memory="2GiB", trace=tmp_path / "run.trace") as model:
        runtime = model.runtime
        assert model.expert_uses().shape == (3, 8) and not model.expert_uses().any()
        long, short = [[3 + i % (VOCABULARY - 3) for i in range(length)] for length in (LISTED, 5)]
        sequences = [runtime.new_sequence() for _ in range(2)]
        for sequence, ids in zip(sequences, (long, short), strict=True):
            runtime.prefill(sequence, ids)
        runtime.decode(sequences, [9, 9])
        runtime.decode(sequences[:1], [11])
        for sequence in sequences:
            sequence.close()
        counted = model.expert_uses()
    trace = Trace(tmp_path / "run.trace")
    recorded = np.zeros_like(counted)
    for row, layer in enumerate(trace.column("layer.layer").tolist()):
        np.add.at(recorded[layer], trace.route(row)[0].ravel(), 1)
    assert np.array_equal(counted, recorded)
    assert counted.sum(axis=1).tolist() == [(LISTED + 5 + 3) * 2] * 3
