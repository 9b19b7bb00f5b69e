"""Timed replay in cases small enough to be worked out by hand, and against measured shapes on public routes."""

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import OptionError
from stoker.plan.device import Device, DeviceModel, Job
from stoker.plan.predictors import CoOccurrence, Markov, Predictor, StaleGate, popularity, steps_of
from stoker.plan.replay import replay
from stoker.plan.routes import from_array, load_routes
from stoker.plan.timed import LayerTime, Prefetch, replay_timed
from stoker.trace.measures import percentile


class Oracle(Predictor):
    """Knows the next layer's experts, and guesses `wrong` ones first (that no layer ever needs)."""

    reach = "layer"

    def __init__(self, wrong: int = 0) -> None:
        self.wrong = wrong

    def ranked(self, place: int, chosen: list[int], truth: list[int]) -> list[int]:
        return list(range(50, 50 + self.wrong)) + truth


def alternating(tokens: int):  # two layers; every token needs two new experts in each: nothing ever hits
    token = np.arange(tokens)[:, None]
    layer = np.concatenate([2 * token, 2 * token + 1], 1) % 16
    return from_array(np.stack([layer, layer]), n_experts=16)


def timed(prefetch: Prefetch | None, lanes: int = 1, record_ms: float = 2.0, tokens: int = 20) -> dict:
    device = DeviceModel(record_ms, lanes, jitter=0)
    return replay_timed(alternating(tokens), "lru", 4, device, LayerTime(3, 1), prefetch, warm_up_steps=5)


def test_demand_only() -> None:
    """Two reads of 2 ms one after the other in each of two layers: 8 ms stall on 8 ms compute; side by side: 4."""
    one, two = timed(None), timed(None, lanes=2)
    assert one["stall_ms_per_token"] == pytest.approx(8) and one["token_ms"]["p50"] == pytest.approx(16)
    assert two["stall_ms_per_token"] == pytest.approx(4) and two["tokens_per_s"] == pytest.approx(1000 / 12)
    assert one["reads_per_token"] == 4 and one["cache_hit_rate"] == 0 and one["on_time_ratio"] == 0
    assert one["waste_ratio"] is None and one["overlap_efficiency"] == pytest.approx(0)


def test_a_perfect_prefetch_hides_one_of_two_layers() -> None:
    """Layer 0 stalls 4 ms as before; layer 1's reads start behind layer 0's (4 ms) and have 1 + 3 ms more: on time."""
    figures = timed(Prefetch(Oracle(), 2))
    assert figures["stall_ms_per_token"] == pytest.approx(4)
    assert figures["on_time_ratio"] == pytest.approx(0.5) and figures["late_ratio"] == 0
    assert figures["reads_per_token"] == 4 and figures["waste_ratio"] == 0 and figures["miss_recall"] == 0.5
    assert figures["ready_rate"] == pytest.approx(0.5) and figures["cache_hit_rate"] == 0


def test_a_prefetch_in_service_is_late_and_waits_only_for_its_rest() -> None:
    """Reads of 3 ms, layers of 4: the second prefetch starts 3 ms before the need + 1, and ends 2 ms after it."""
    figures = timed(Prefetch(Oracle(), 2), record_ms=3.0)
    assert figures["stall_ms_per_token"] == pytest.approx(6 + 2)
    assert figures["late_ratio"] == pytest.approx(0.25) and figures["on_time_ratio"] == pytest.approx(0.25)
    assert figures["lateness_ms"]["p50"] == pytest.approx(2)


def test_wrong_guesses_waste_reads_and_what_has_not_started_is_cancelled() -> None:
    """Two wrong guesses fill the 4 ms of lead; the right ones behind them never start: demand reads them, unhurt."""
    figures = timed(Prefetch(Oracle(wrong=2), 4))
    assert figures["reads_per_token"] == 6 and figures["waste_ratio"] == 1 and figures["miss_recall"] == 0
    assert figures["stall_ms_per_token"] == pytest.approx(8) and figures["waste_of_all_reads"] == pytest.approx(2 / 6)


def test_prefetch_does_not_change_the_misses() -> None:
    rng = np.random.default_rng(0)
    routes = from_array(np.stack([[rng.permutation(16)[:3] for _ in range(300)] for _ in range(4)]), n_experts=16)
    gate = Prefetch(StaleGate(0.7, popularity(routes)), 3)
    without = replay(routes, "lfru", 8, 50).hit_rate
    for prefetch in (None, gate):
        figures = replay_timed(routes, "lfru", 8, DeviceModel(0.5), prefetch=prefetch, warm_up_steps=50)
        assert figures["cache_hit_rate"] == pytest.approx(without)
    assert figures["on_time_ratio"] > 0


def test_demand_goes_before_prefetch_and_service_is_not_interrupted() -> None:
    device = Device(DeviceModel(1.0, 1, jitter=0))
    ahead = [Job(0.0, prefetch=True) for _ in range(3)]
    device.submit(ahead)
    device.advance(0.5)
    demand = Job(0.5, prefetch=False)
    device.submit([demand])
    device.finish_demand()
    assert (ahead[0].start_ms, ahead[0].end_ms, demand.start_ms, demand.end_ms) == (0, 1, 1, 2)
    assert device.withdraw([ahead[0], ahead[2]]) == [ahead[2]]
    device.advance(10)
    assert ahead[1].start_ms == 2 and ahead[2].start_ms == np.inf and device.served == 3


def test_jitter_keeps_the_mean_and_has_the_spread() -> None:
    device = Device(DeviceModel(2.0, 1, jitter=0.5, seed=1))
    jobs = [Job(0.0, prefetch=False) for _ in range(20000)]
    device.submit(jobs)
    device.finish_demand()
    service = np.array([job.end_ms - job.start_ms for job in jobs])
    assert service.mean() == pytest.approx(2.0, rel=0.02) and service.std() == pytest.approx(1.0, rel=0.03)


def test_the_gate_model_has_its_recall_and_never_repeats() -> None:
    rng = np.random.default_rng(0)
    gate = StaleGate(0.8, np.ones((3, 64)), seed=2)
    found = 0
    for _ in range(2000):
        truth = rng.permutation(64)[:8].tolist()
        guess = gate.ranked(0, [], truth)
        assert len(set(guess)) == 8
        found += len(set(guess) & set(truth))
    assert found / 16000 == pytest.approx(0.8, abs=0.01)


def test_tables_learn_what_follows_what() -> None:
    rng = np.random.default_rng(0)
    first = np.stack([rng.permutation(16)[:2] for _ in range(600)])
    routes = from_array(np.stack([first, (first + 5) % 16]), n_experts=16)  # layer 1 is a function of layer 0
    steps = steps_of(routes)
    table = CoOccurrence(steps[:500], 16)
    hits = sum(set(table.ranked(0, step[0], [])[:2]) == set(step[1]) for step in steps[500:])
    assert hits >= 98
    cycle = np.stack([[t % 16, (t + 1) % 16] for t in range(600)])
    steps = steps_of(from_array(cycle[None], n_experts=16))
    markov = Markov(steps[:500], 16)
    assert all(set(steps[i + 1][0]) <= set(markov.ranked(0, steps[i][0], [])[:3]) for i in range(500, 599))


def test_percentiles_are_nearest_rank_and_need_enough() -> None:
    assert percentile(list(range(1, 101)), 0.5) == 50
    assert percentile(list(range(1, 201)), 0.95) == 190
    assert percentile(list(range(199)), 0.95) is None and percentile(list(range(999)), 0.99) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_what_cannot_be_is_refused() -> None:
    routes = alternating(10)
    with pytest.raises(OptionError, match="offline"):
        replay_timed(routes, "min", 4, DeviceModel(1.0))
    with pytest.raises(OptionError, match="warm-up"):
        replay_timed(routes, "lru", 4, DeviceModel(1.0), warm_up_steps=10)
    for bad in ((0.0, 1, 0.0), (1.0, 0, 0.0), (1.0, 1, -1.0)):
        with pytest.raises(OptionError):
            DeviceModel(*bad)


@pytest.mark.slow
def test_public_routes_have_the_measured_shape(traces: Path) -> None:
    """General text, a quarter resident, 1 ms layers, 0.5 ms reads. Measured elsewhere: demand only 42.9 ms stall, p99
    161 ms, 86 reads; gate of recall 0.886: 17.4 ms, 116 ms, 101 reads, 0.51 on time, 0.21 wasted; co-occurrence, two
    reads: 30.6 ms. Jitter and sample differ: a tenth of tolerance."""
    routes = load_routes(traces / "qwen3_general.npz")
    window, train = routes.between(0, 1400), steps_of(routes.between(1400, 4400))
    gate, table = StaleGate(0.886, popularity(routes)), CoOccurrence(train, 128)
    device = DeviceModel(0.5)
    none, with_gate, with_table = (
        replay_timed(window, "lru", 32, device, prefetch=prefetch)
        for prefetch in (None, Prefetch(gate, 8), Prefetch(table, 2))
    )
    assert none["stall_ms_per_token"] == pytest.approx(42.9, rel=0.1)
    assert none["token_ms"]["p99"] == pytest.approx(161, rel=0.1) and none["reads_per_token"] == pytest.approx(
        86, rel=0.1
    )
    assert with_gate["stall_ms_per_token"] == pytest.approx(17.4, rel=0.1)
    assert with_gate["token_ms"]["p99"] == pytest.approx(116, rel=0.1)
    assert with_gate["on_time_ratio"] == pytest.approx(0.51, abs=0.05)
    assert with_gate["waste_ratio"] == pytest.approx(0.21, abs=0.05)
    assert with_table["stall_ms_per_token"] == pytest.approx(30.6, rel=0.1)
