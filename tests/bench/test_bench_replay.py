"""Recorded routes in a running engine: the layers follow them, and caching them is what the simulator says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.bench.worker import StokerEngine, session
from stoker.errors import OptionError, TraceError
from stoker.plan.replay import replay
from stoker.plan.routes import from_array
from stoker.routing.replay import RouteReplay
from stoker.routing.rule import Rows
from stoker.trace.reader import Trace
from stoker.trace.writer import TraceWriter

OPTIONS = {"memory": "2GiB", "threads": 1, "ctx_size": 512}


def follow(routes: RouteReplay, layer: int, step: int, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer is answered in a step, whatever its gate chose."""
    return routes.route(layer, Rows(step), torch.empty(0), None, torch.empty(0), weights_TK)


def recorded(trace: Trace) -> np.ndarray:
    """[L, T, K] of all steps."""
    rows = trace.table("layer")
    by_layer = [
        np.concatenate([trace.route(int(row))[0] for row in np.flatnonzero(rows["layer"] == layer)])
        for layer in np.unique(rows["layer"])
    ]
    return np.stack(by_layer)


@pytest.mark.parametrize("path", ["hot", "whole_layer", "staged"])
def test_layers_follow_the_trace(path: str, mini: Path, npz: Path, routes_LTK: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    with TraceWriter(file) as recorder:
        engine = StokerEngine(str(mini), {**OPTIONS, "path": path}, routes=str(npz), recorder=recorder)
        session(engine, list(range(100)), list(range(60)))
        engine.close()
    found = recorded(Trace(file))
    assert found.shape == (4, 160, 4)
    expected = np.concatenate([routes_LTK, routes_LTK[:, :10]], axis=1)
    assert np.array_equal(found, expected), "the prompt takes the first tokens, decode the next, then from the start"
    again = RouteReplay.open(file)
    assert np.array_equal(again.experts_LTK, expected), "a recorded trace replays as it ran"


def test_hits_are_those_of_the_simulator(
    mini: Path, npz: Path, routes_LTK: np.ndarray, slots: Callable[[int], None]
) -> None:
    slots(6)
    engine = StokerEngine(str(mini), {**OPTIONS, "path": "hot", "prefetch": 0}, routes=str(npz))
    figures = session(engine, [1], list(range(149)), warmup=49)
    engine.close()
    simulated = replay(from_array(routes_LTK, n_experts=16), "lru", 6, warm_up_steps=50)
    assert figures["decode_misses"] / 100 == pytest.approx(simulated.misses_per_token, abs=0.05)
    assert 0.4 < figures["hit_rate"] < 0.9 and figures["decode_bytes_per_token"] > 0


def test_weights() -> None:
    routes = np.array([[[3, 1], [0, 2]]])
    own = torch.tensor([[0.7, 0.2], [0.5, 0.4]])
    index, weights = follow(RouteReplay(routes), 0, 0, own)
    assert index.tolist() == [[3, 1], [0, 2]] and index.dtype == torch.int64 and torch.equal(weights, own)
    _, uniform = follow(RouteReplay(routes, weights="uniform"), 0, 0, own)
    assert torch.allclose(uniform, torch.tensor([[0.45, 0.45], [0.45, 0.45]]))


def test_layers_of_a_step_share_its_tokens_and_seek_moves() -> None:
    routes = RouteReplay(np.arange(24).reshape(2, 6, 2))
    one, three = torch.ones(1, 2), torch.ones(3, 2)
    assert follow(routes, 0, 7, three)[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert follow(routes, 1, 7, three)[0].tolist() == [[12, 13], [14, 15], [16, 17]]
    assert follow(routes, 0, 8, one)[0].tolist() == [[6, 7]] and follow(routes, 1, 8, one)[0].tolist() == [[18, 19]]
    routes.seek(5)
    assert follow(routes, 0, 9, three)[0].tolist() == [[10, 11], [0, 1], [2, 3]]


def test_sequences_may_follow_stretches_of_their_own() -> None:
    experts_LTK = np.arange(2 * 6 * 1).reshape(2, 6, 1) % 7
    replay = RouteReplay(experts_LTK)
    replay.place([4, 1, 13])
    for layer in (0, 1):
        assert replay.take(layer, 0, 3).tolist() == experts_LTK[layer, [4, 1, 1]].tolist()
    assert replay.take(0, 1, 2).tolist() == experts_LTK[0, :2].tolist(), "then the stretch of the single one goes on"
    with pytest.raises(AssertionError, match="were placed"):
        replay.place([0])
        replay.take(0, 2, 2)


def test_the_look_ahead_has_its_recall() -> None:
    random = np.random.default_rng(0)
    truth = np.stack([random.permutation(128)[:8] for _ in range(400)])[None]
    routes = RouteReplay(truth, look_ahead_recall=0.85)
    found = 0
    for step in range(400):
        index, _ = follow(routes, 0, step, torch.ones(1, 8))
        guess = routes.look_ahead(0, Rows(step), 1)
        assert len(set(guess)) == len(guess) <= 8
        found += len(set(guess) & set(index[0].tolist()))
    assert found / 3200 == pytest.approx(0.85, abs=0.03)


@pytest.mark.parametrize(
    ("shape", "got"),
    [((3, 16, 4), "layers"), ((4, 16, 3), "3 experts"), ((4, 20, 4), "ids up to 19")],
)
def test_a_trace_of_another_shape_is_refused(shape: tuple[int, int, int], got: str) -> None:
    layers, experts, k = shape
    routes = np.stack([[(np.arange(k) + t) % experts for t in range(experts)] for _ in range(layers)])
    with pytest.raises(OptionError, match=got):
        RouteReplay(routes).check_shape(4, 16, 4)


def test_bad_routes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="twice"):
        RouteReplay(np.array([[[1, 1]]]))
    with pytest.raises(TraceError, match="wrong shape"):
        RouteReplay(np.array([[1, 2]]))
    with pytest.raises(OptionError, match="uniform"):
        RouteReplay(np.array([[[1, 2]]]), weights="random")  # type: ignore[arg-type]
    np.savez(tmp_path / "x.npz", routes=np.zeros(3))
    for name in ("x.npz", "gone.npz", "gone"):
        with pytest.raises(TraceError, match=name):
            RouteReplay.open(tmp_path / name)
