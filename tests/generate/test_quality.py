"""The contract: what a bound means, and which mode it picks."""

from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import OptionError
from stoker.generate import quality
from stoker.generate.quality import Bound, MeasuredMode, Promise, Records, choose, recall, remember

GIB = 2**30


def mode(name: str, kl_high: float, ratio_high: float, ms: float, **options: object) -> MeasuredMode:
    return MeasuredMode(name, options, kl_high / 2, kl_high, 1.0, ratio_high, ms, 0.0, 1000)


MODES = [
    mode("exact", 0, 1, 30.0),
    mode("mild", 0.004, 1.002, 20.0, routing="cache-aware", lead=0.05),
    mode("wild", 0.05, 1.03, 10.0, routing="cache-aware", lead=0.5),
    mode("useless", 0.001, 1.001, 40.0, routing="roster"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "cache_directory", lambda: tmp_path)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("exact", Bound("exact")),
        ("kl<=0.01", Bound("kl", 0.01)),
        ("kl <= 0.5", Bound("kl", 0.5)),
        ("ppl<=+1%", Bound("ppl", 0.01)),
        ("ppl<=0.5%", Bound("ppl", 0.005)),
    ],
)
def test_bounds_are_read(text: str, bound: Bound) -> None:
    read = Bound.parse(text)
    assert read.kind == bound.kind and read.limit == pytest.approx(bound.limit)
    assert Bound.parse(str(read)) == read


@pytest.mark.parametrize("text", ["", "good", "kl<0.01", "ppl<=1", "kl<=-1", "kl<=1.2.3", "exact "])
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--quality"):
        Bound.parse(text)


@pytest.mark.parametrize(
    ("bound", "name"),
    [("kl<=0.01", "mild"), ("kl<=0.1", "wild"), ("kl<=0.002", None), ("ppl<=+5%", "wild"), ("ppl<=+0.3%", "mild"),
     ("ppl<=+0.01%", None), ("exact", None)],
)  # fmt: skip
def test_the_fastest_that_keeps_the_bound_is_chosen(bound: str, name: str | None) -> None:
    """By the upper end of the interval: `mild` has a mean of 0.002, and may be 0.004. Slower than exact is none."""
    remember("f" * 64, Records(4 * GIB, MODES))
    found = choose("f" * 64, Bound.parse(bound), int(4.2 * GIB), "store")
    assert (found and found.name) == name


def test_the_worst_domain_counts() -> None:
    """In all the mode costs 0.004 at most, but 0.02 where it costs most."""
    one = replace(MODES[1], kl_worst=0.02, ratio_worst=1.02)
    assert Bound("kl", 0.01).kept(MODES[1]) and not Bound("kl", 0.01).kept(one) and Bound("kl", 0.02).kept(one)
    assert Bound("ppl", 0.01).kept(MODES[1]) and not Bound("ppl", 0.01).kept(one) and Bound("ppl", 0.03).kept(one)
    assert Promise(Bound("ppl", 0.03), one).probe_limit == 0.02


def test_nothing_measured_is_refused_with_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"stoker eval modes store --memory 4\.00GiB"):
        choose("f" * 64, Bound("kl", 0.01), 4 * GIB, "store")
    remember("f" * 64, Records(8 * GIB, MODES))
    with pytest.raises(OptionError, match=r"8\.00 GiB"):
        choose("f" * 64, Bound("kl", 0.01), 4 * GIB, "store")
    assert choose("f" * 64, Bound("exact"), 4 * GIB, "store") is None  # needs no measurement


def test_records_are_of_one_store_and_one_budget_each() -> None:
    remember("a" * 64, Records(4 * GIB, MODES[:2]))
    remember("a" * 64, Records(8 * GIB, MODES))
    remember("a" * 64, Records(int(4.1 * GIB), MODES[:1]))
    assert sorted(len(one.modes) for one in recall("a" * 64)) == [1, 4]
    assert recall("b" * 64) == []
    file = quality.records_file("a" * 64)
    file.write_text(file.read_text().replace(f'"version": {quality.VERSION}', '"version": 0'))
    assert recall("a" * 64) == []
    file.write_text("{")
    assert recall("a" * 64) == []
