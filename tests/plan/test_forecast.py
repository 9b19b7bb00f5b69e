"""The forecast in cases whose answer is known by hand, and what it assumes of routing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import OptionError
from stoker.plan.forecast import Machine, Setting, decode, misses_of, new_share, prefill, read_ahead, simple
from stoker.plan.forecast_layers import LayerTimes, ReadAhead, simulate
from stoker.plan.forecast_routing import (
    Curve,
    Replayed,
    Uniform,
    assumed,
    binomial,
    curves,
    hit_rate,
    routing_for,
    routing_named,
    spread_over,
    strange_uses,
)
from stoker.plan.profile import FirstUse
from stoker.plan.replay import replay
from stoker.plan.routes import from_array
from tests.plan.machines import machine, model

SETTING = Setting(slots=16, ring_records=8, prefill_chunk=512, prefetch=0)


class Always:
    """Every event misses exactly `missed`."""

    name, words = "always", "for tests"

    def __init__(self, missed: int) -> None:
        self.missed = missed

    def misses(self, slots: float, experts: int, top_k: int, policy: str) -> np.ndarray:
        return np.eye(1, top_k + 1, self.missed)[0]

    def distinct(self, tokens: int, experts: int, top_k: int) -> float:
        return float(min(experts, tokens * top_k))

    def strange(self, slots: float, experts: int) -> float:
        return 1 - slots / experts


def test_everything_resident_is_bytes_over_bandwidth() -> None:
    token = decode(model(), Machine(machine()), replace(SETTING, slots=64), Uniform())
    dense_ms = 10 * 10 / 10  # 10 layers of 10 MB at 10 GB/s: 1 ms each
    experts_ms = 10 * 4 * (1 << 20) / 10e9 * 1e3
    assert token.stall_ms == 0 and token.misses == 0 and token.hit_rate == 1
    assert token.dense_ms == pytest.approx(dense_ms)
    assert token.head_ms == pytest.approx(1.0)
    assert token.total_ms == pytest.approx(dense_ms + 1.0 + experts_ms, rel=1e-3)


def test_slow_reads_are_waited_for_but_for_what_is_computed_meanwhile() -> None:
    token = decode(model(), Machine(machine(record_ms=5.0)), SETTING, Always(2))
    each_ms = (1 << 20) / 10e9 * 1e3
    layer_ms = 10.0 + each_ms  # two reads of 5 ms one after the other, then the last expert
    assert token.stall_ms + token.experts_ms == pytest.approx(10 * layer_ms, rel=1e-3)
    assert token.read_bytes == 10 * 2 * (1 << 20)
    assert token.misses == 20


def test_reads_that_land_while_hits_are_computed_cost_nothing() -> None:
    fast = Machine(machine(record_ms=0.01, expert_bytes_s=1e9))
    assert decode(model(), fast, SETTING, Always(1)).stall_ms == pytest.approx(0, abs=1e-6)


def test_latency_is_paid_once_a_burst() -> None:
    quick, late = (Machine(machine(record_ms=1.0, latency_ms=ms)) for ms in (0.0, 2.0))
    more = decode(model(), late, SETTING, Always(4)).total_ms - decode(model(), quick, SETTING, Always(4)).total_ms
    assert more == pytest.approx(10 * 2.0, rel=0.02)


TIMES = LayerTimes(between_ms=1.0, together_ms=0.1, alone_ms=0.2, first_ms=3.0, each_ms=2.0)


def missing(count: int, top_k: int = 8) -> np.ndarray:
    return np.eye(1, top_k + 1, count)[0]


def test_one_layer_by_hand() -> None:
    none = simulate(missing(0), TIMES, None)
    assert (none.experts_ms, none.stall_ms, none.reads) == (pytest.approx(0.8), 0, 0)
    two = simulate(missing(2), TIMES, None)  # hits to 0.6, reads land at 3 and 5, each then takes 0.2
    assert two.experts_ms == pytest.approx(6 * 0.1 + 2 * 0.2)
    assert two.stall_ms == pytest.approx(5.2 - 1.0)
    assert two.demand_reads == 2 and two.ahead_reads == 0


def test_reads_get_on_no_further_while_computing_holds_them_up() -> None:
    held = replace(TIMES, progress=0.0)
    two = simulate(missing(2), held, None)  # hits to 0.6, then 3 ms to the first; the second comes 2 after it
    assert two.stall_ms == pytest.approx(3.0 + 2.0)
    half = simulate(missing(2), replace(TIMES, progress=0.5), None)
    assert half.stall_ms == pytest.approx(3.0 - 0.3 + 2.0 - 0.1)
    assert simulate(missing(0), held, None) == simulate(missing(0), TIMES, None)


def test_nothing_is_read_ahead_under_weights_that_hold_reads_up() -> None:
    sure = ReadAhead(most=8, recall=1.0, strange=0.0)
    times = LayerTimes(between_ms=20.0, together_ms=0.1, alone_ms=0.2, first_ms=3.0, each_ms=2.0, progress=0.0)
    assert simulate(missing(2), times, sure).stall_ms < 1e-9
    assert simulate(missing(2), replace(times, streaming_ms=20.0), sure).stall_ms > 4.0


def test_reading_ahead_with_perfect_sight_hides_what_fits_between() -> None:
    sure = ReadAhead(most=8, recall=1.0, strange=0.0)
    slow = LayerTimes(between_ms=20.0, together_ms=0.1, alone_ms=0.2, first_ms=3.0, each_ms=2.0)
    found = simulate(missing(2), slow, sure)
    assert found.stall_ms < 1e-9 and found.demand_reads == 0 and found.ahead_reads == 2 and found.on_time == 2


@pytest.mark.parametrize(("missed", "most", "found"), [(8, 8, 8), (8, 3, 3), (2, 3, 2)])
def test_all_misses_are_considered_and_no_more_than_allowed_sent(missed: int, most: int, found: int) -> None:
    sure = ReadAhead(most=most, recall=1.0, strange=0.0)
    slow = LayerTimes(between_ms=50.0, together_ms=0.1, alone_ms=0.2, first_ms=3.0, each_ms=2.0)
    figures = simulate(missing(missed), slow, sure)
    assert (figures.on_time, figures.ahead_reads, figures.demand_reads) == (found, found, missed - found)


def test_right_and_wrong_guesses_by_hand() -> None:
    """Of 8 guesses half are wrong, of the wrong ones half are in memory: two are read for nothing. One of two misses is
    found."""
    half = ReadAhead(most=8, recall=0.5, strange=0.5)
    slow = LayerTimes(between_ms=50.0, together_ms=0.1, alone_ms=0.2, first_ms=3.0, each_ms=2.0)
    found = simulate(missing(2), slow, half)
    assert found.on_time == pytest.approx(1, abs=0.1) and found.demand_reads == pytest.approx(1, abs=0.1)
    assert found.ahead_reads == pytest.approx(1 + 2, abs=0.15)


def test_who_reads_ahead_and_how_much() -> None:
    most = {
        (path, prefetch): ahead and ahead.most
        for path in ("auto", "hot", "staged", "exact", "whole_layer")
        for prefetch in (0, 3)
        for ahead in [read_ahead(model(), replace(SETTING, path=path, prefetch=prefetch), Uniform(), depth=2)]
    }
    reading = {key: count for key, count in most.items() if count is not None}
    assert reading == {("auto", 3): 3, ("hot", 3): 3, ("staged", 0): 4, ("staged", 3): 4}


def test_reading_ahead_where_nothing_fits_changes_no_bytes() -> None:
    sure = ReadAhead(most=8, recall=1.0, strange=0.0)
    busy = LayerTimes(between_ms=0.0, together_ms=0.0, alone_ms=0.0, first_ms=2.0, each_ms=2.0)
    found = simulate(missing(4), busy, sure)
    assert found.reads == pytest.approx(4) and found.stall_ms == pytest.approx(8.0, rel=0.01)


def test_wrong_guesses_cost_bytes_and_no_more_than_allowed() -> None:
    blind = ReadAhead(most=3, recall=0.0, strange=1.0)
    slow = LayerTimes(between_ms=50.0, together_ms=0.1, alone_ms=0.2, first_ms=3.0, each_ms=2.0)
    found = simulate(missing(2), slow, blind)
    assert found.ahead_reads == pytest.approx(3) and found.demand_reads == 2 and found.on_time == 0


def test_reads_in_flight_are_not_given_up() -> None:
    wrong = ReadAhead(most=3, recall=0.0, strange=1.0)
    one, two = (simulate(missing(1), TIMES, replace(wrong, depth=depth)) for depth in (1, 2))
    assert one.ahead_reads == pytest.approx(1) and two.ahead_reads == pytest.approx(2)
    assert two.stall_ms > one.stall_ms + 1.0, "a wrong read more is in the way of each demand"


def test_prefetch_pays_in_the_forecast_where_there_is_time_for_it() -> None:
    one = Machine(machine(record_ms=0.5, layer_ms=2.0))
    without, with_it = (decode(model(), one, replace(SETTING, prefetch=n), Always(1)) for n in (0, 3))
    assert with_it.stall_ms < without.stall_ms and with_it.misses == without.misses


def test_fixed_costs_count_by_layer_miss_and_kind_of_attention() -> None:
    base = decode(model(), Machine(machine()), SETTING, Always(2)).overhead_ms
    costly = Machine(machine(layer_ms=0.2, miss_ms=0.1))
    assert decode(model(), costly, SETTING, Always(2)).overhead_ms - base == pytest.approx(10 * 0.2 + 20 * 0.1)
    waiting = Machine(machine(wait_ms=0.3))
    assert decode(model(), waiting, SETTING, Always(2)).overhead_ms - base == pytest.approx(10 * 0.3)
    assert decode(model(), waiting, SETTING, Always(0)).overhead_ms == pytest.approx(base)
    keeping = Machine(machine(keep_ms=0.3))
    assert decode(model(), keeping, SETTING, Always(0)).overhead_ms - base == pytest.approx(10 * 0.3)
    assert decode(model(), keeping, replace(SETTING, slots=64), Always(0)).overhead_ms == pytest.approx(base)
    plain = decode(model(plain_attention=5), costly, SETTING, Always(2)).overhead_ms
    assert plain - base == pytest.approx(5 * 0.2 + 5 * 0.6 + 20 * 0.1)


def test_more_slots_are_never_slower_and_nothing_kept_is_slowest() -> None:
    at = [
        decode(model(), Machine(machine(record_ms=3)), replace(SETTING, slots=s), curves()["general"])
        for s in (4, 8, 16, 32, 63)
    ]
    speeds = [token.tokens_s for token in at]
    assert speeds == sorted(speeds)
    exact = decode(model(), Machine(machine(record_ms=3)), replace(SETTING, path="exact"), curves()["general"])
    assert exact.misses == 40 and exact.tokens_s <= speeds[0]


def test_staged_misses_more_than_the_policy_that_it_lacks() -> None:
    hot, staged = (misses_of(model(), replace(SETTING, path=path), curves()["general"]) for path in ("hot", "staged"))
    assert hit_rate(hot) - 0.08 < hit_rate(staged) < hit_rate(hot) - 0.02
    assert staged.sum() == pytest.approx(1, abs=2e-3)


def test_a_prompt_bound_by_reads_takes_what_the_reads_take() -> None:
    found = prefill(model(), Machine(machine(record_ms=10.0)), SETTING, Always(0), 512)
    assert found.bound == "reads" and found.distinct == 64
    assert found.total_s == pytest.approx(10 * 64 * 10e-3, rel=0.05)
    assert found.read_bytes == 640 << 20


def test_a_prompt_bound_by_arithmetic_takes_what_it_takes() -> None:
    found = prefill(model(), Machine(machine(record_ms=0.01)), SETTING, Always(0), 512)
    macs = 512 * (10 * 20e6 + 10 * 4 * 3 * 1024 * 512)
    assert found.bound == "arithmetic" and found.total_s == pytest.approx(macs / 100e9, rel=0.05)


ALL_NEW = {"dense_bytes": 0}  # nothing to load: the thread that touches slots has had no time
SLOTS_S = 10 * 16 * (1 << 20) / 1e8  # 16 slots in each of 10 layers, first used at 100 MB/s


def test_first_use_of_memory_bounds_reads_and_holds_one_core() -> None:
    """With nothing to compute two threads find memory, the touching and the reading one."""
    one = Machine(machine(macs_s=1e13, touch_bytes_s=1e8))
    assert new_share(model(**ALL_NEW), one, SETTING) == 1
    reading = prefill(model(**ALL_NEW), one, SETTING, Always(0), 512)
    assert reading.total_s == pytest.approx(SLOTS_S / 2, rel=0.02), "computing and reads hide below memory"
    slow = {"macs_s": 10e9, "record_ms": 0.01}
    before, after = (
        prefill(model(**ALL_NEW), Machine(machine(**slow, touch_bytes_s=r)), SETTING, Always(0), 512).total_s
        for r in (1e15, 1e8)
    )
    assert after - before == pytest.approx(SLOTS_S / 2, rel=0.1), "one of two cores is away"
    nothing = replace(SETTING, path="exact")
    kept = [
        prefill(model(**ALL_NEW), Machine(machine(**slow, touch_bytes_s=r)), nothing, Always(0), 512)
        for r in (1e15, 1e8)
    ]
    assert kept[0] == kept[1], "a path that keeps nothing uses no slots"


def test_first_use_beside_computing_and_alone_by_hand() -> None:
    found = FirstUse(bytes_s=1e8, holds=0.5, alone_bytes_s=4e8)
    assert found.takes_s(0.5e8, compute_s=1.0) == pytest.approx((0.5, 0.25)), "computing goes on all along"
    assert found.takes_s(2e8, compute_s=1.0) == pytest.approx((2.0, 1.0)), "it is over with the computing"
    assert found.takes_s(6e8, compute_s=1.0) == pytest.approx((3.0, 1.0)), "the rest comes four times as fast"
    assert found.takes_s(6e8, compute_s=1.0, threads=2) == pytest.approx((2.5, 1.0))
    assert found.takes_s(4e8, compute_s=0.0) == pytest.approx((1.0, 0.0))


def test_reads_hold_up_a_prompts_computing() -> None:
    """Half a second of reads, of which computing loses a fifth."""
    slow = {"macs_s": 10e9, "record_ms": 0.5 * 1e3 / 640}
    free, held = (
        prefill(model(), Machine(machine(**slow, reads_hold=share)), replace(SETTING, path="exact"), Always(0), 512)
        for share in (0.0, 0.2)
    )
    assert free.bound == "arithmetic" and held.total_s - free.total_s == pytest.approx(0.1, rel=0.1)


def test_a_first_prompt_uses_scratch_and_kv_for_the_first_time() -> None:
    setting = replace(SETTING, path="exact")
    more = replace(setting, scratch_bytes=1e8, kv_token_bytes=1e8 / 512)
    slow = machine(touch_bytes_s=1e8, touch_alone_bytes_s=4e8)
    plain, first, warm = (
        prefill(model(), Machine(slow), how, Always(0), 512, warm_share=share).total_s
        for how, share in ((setting, 0.0), (more, 0.0), (more, 1.0))
    )
    assert first - plain == pytest.approx(0.5)
    assert warm == prefill(model(), Machine(slow), setting, Always(0), 512, warm_share=1.0).total_s


def test_what_was_touched_while_loading_costs_a_prompt_nothing() -> None:
    shape = model(**ALL_NEW)
    ring_s = SETTING.ring_records * (1 << 20) / 1e8
    for load_s in (0.0, 0.5, 1.0, 1.5):
        one = Machine(machine(touch_bytes_s=1e8, load_s=load_s))
        assert new_share(shape, one, SETTING) == pytest.approx(1 - load_s / (SLOTS_S + ring_s))
    for load_s in (2.0, 10.0):
        assert new_share(shape, Machine(machine(touch_bytes_s=1e8, load_s=load_s)), SETTING) == 0


def test_a_second_chunk_finds_what_the_first_left() -> None:
    one = Machine(machine(record_ms=10.0))
    whole, halves = (
        prefill(model(), one, replace(SETTING, slots=32, prefill_chunk=c), Always(0), 512) for c in (512, 256)
    )
    assert halves.read_bytes == pytest.approx(whole.read_bytes * 1.5), "half of the experts stay for the second chunk"


def test_the_band_is_ordered() -> None:
    speeds = [
        decode(model(), Machine(machine(), quartile), SETTING, Always(3)).tokens_s
        for quartile in ("high", "last", "low")
    ]
    assert speeds == sorted(speeds) and speeds[0] < speeds[-1]


def test_buffered_reads_are_slower_where_they_measured_slower() -> None:
    one = machine(record_ms=1.0, buffered_bytes_s=0.25e9)
    direct, buffered = (decode(model(), Machine(one, direct=d), SETTING, Always(4)).stall_ms for d in (True, False))
    assert buffered > 3.5 * direct


def test_the_naive_calculator_and_its_trap() -> None:
    once = simple(model(), 1e9, compute_ms=10.0, hit=0.5)
    assert once == pytest.approx(1e3 / (10 + 20 * (1 << 20) / 1e9 * 1e3))
    assert simple(model(), 1e9, 10.0, 0.5, extra_latency_ms=1.0) == pytest.approx(1e3 / (1e3 / once + 20))


# ---- routing


@pytest.mark.parametrize("name", ["general", "code", "math", "medical"])
def test_curves_are_the_measured_ones_at_their_points(name: str) -> None:
    curve = curves()[name]
    for policy, rows in curve.misses_per_event.items():
        assert np.allclose(rows.sum(axis=1), 1, atol=2e-3), policy
        for slots, row in zip(curve.slots, rows, strict=True):
            assert np.allclose(curve.misses(slots, 128, 8, policy), row)
    lru = [hit_rate(curve.misses(slots, 128, 8, "lru")) for slots in curve.slots]
    assert lru == sorted(lru)


@pytest.mark.parametrize(("name", "slots", "known"), [("general", 16, 0.604), ("code", 32, 0.849), ("math", 64, 0.928)])
def test_lru_curves_agree_with_independent_figures(name: str, slots: int, known: float) -> None:
    assert hit_rate(curves()[name].misses(slots, 128, 8, "lru")) == pytest.approx(known, abs=0.004)


def test_a_curve_serves_other_shapes_at_the_same_share() -> None:
    curve = curves()["general"]
    assert hit_rate(curve.misses(64, 256, 8, "lru")) == pytest.approx(hit_rate(curve.misses(32, 128, 8, "lru")))
    other_k = curve.misses(64, 256, 4, "lru")
    assert len(other_k) == 5 and other_k.sum() == pytest.approx(1, abs=2e-3)
    assert hit_rate(other_k) == pytest.approx(hit_rate(curve.misses(32, 128, 8, "lru")), abs=2e-3)


def test_spreading_keeps_the_mean() -> None:
    shares = np.array([0.5, 0.0, 0.5])
    assert spread_over(shares, 8) @ np.arange(9) / 8 == pytest.approx(0.5)


@pytest.mark.parametrize("routing", [Uniform(), curves()["general"]])
def test_distinct_experts_grow_from_k_to_all(routing: Uniform | Curve) -> None:
    counts = [routing.distinct(tokens, 128, 8) for tokens in (1, 2, 8, 64, 512, 4096)]
    assert counts == sorted(counts) and counts[0] == pytest.approx(8, abs=0.1) and counts[-1] <= 128


def test_uniform_routing_hits_by_share() -> None:
    assert hit_rate(Uniform().misses(32, 128, 8, "lru")) == pytest.approx(0.25)
    assert binomial(8, 0.3).sum() == pytest.approx(1)


def test_replayed_routes_are_the_simulators() -> None:
    experts_LTK = np.random.default_rng(3).permuted(np.tile(np.arange(32), (2, 900, 1)), axis=2)[:, :, :4]
    routes = from_array(experts_LTK, "made", 32)
    found = Replayed(routes, "made").misses(12, 32, 4, "lru")
    assert hit_rate(found) == pytest.approx(replay(routes, "lru", 12).hit_rate, abs=1e-9)
    assert Replayed(routes, "made").distinct(900, 32, 4) == 32


def test_strange_uses_by_hand() -> None:
    tokens = 640
    experts_TK = np.array([[0, 1, 2 + 2 * t % 32, 3 + 2 * t % 32] for t in range(tokens)])
    strange = strange_uses(from_array(np.stack([experts_TK, experts_TK]), "made", 34), 4)
    assert strange == pytest.approx(0.5 - 0.5 * 2 / 32, abs=0.01), "half of the uses are strong, two more are there"
    for curve in curves().values():
        assert list(curve.strange_guesses) == sorted(curve.strange_guesses, reverse=True)


def test_routing_by_name() -> None:
    assert isinstance(routing_named("uniform"), Uniform)
    assert routing_named("code") is curves()["code"]
    assert isinstance(routing_named("synthetic:general:200"), Replayed)
    with pytest.raises(OptionError, match="unknown routing"):
        routing_named("nonsense")
    with pytest.raises(OptionError, match="no curve"):
        curves()["general"].misses(32, 128, 8, "belady")


def test_few_experts_are_assumed_uniform_and_many_as_measured() -> None:
    assert isinstance(assumed(8)[0], Uniform)
    typical, worst, best = assumed(128)
    at = [hit_rate(one.misses(32, 128, 8, "lru")) for one in (worst, typical, best)]
    assert at == sorted(at)


@pytest.mark.parametrize(
    ("layers", "top_k", "experts", "fits"),
    [(2, 4, 34, True), (1, 4, 128, True), (3, 4, 34, False), (2, 2, 34, False), (2, 8, 34, False), (2, 4, 33, False)],
)
def test_routes_of_another_shape_are_refused(tmp_path: Path, layers: int, top_k: int, experts: int, fits: bool) -> None:
    routes_TK = np.array([[0, 1, 2 + 2 * t % 32, 3 + 2 * t % 32] for t in range(40)])
    np.savez(tmp_path / "routes.npz", experts=np.stack([routes_TK, routes_TK]))
    shape = model(moe_layers=layers, top_k=top_k, experts=experts)
    if fits:
        assert isinstance(routing_for(str(tmp_path / "routes.npz"), shape), Replayed)
        return
    with pytest.raises(OptionError, match=r"--routes .*routes.npz: routes of another model's shape"):
        routing_for(str(tmp_path / "routes.npz"), shape, "--routes")
