"""`stoker report`: the page's content by its text, and the page in a real browser, wide and narrow, light and dark.

The browser tests need selenium, Chromium and its driver; without them they are skipped and say so.
"""

import html.parser
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from stoker.bench.report import charts, trace_data
from stoker.bench.report.bench_section import _distinct
from stoker.bench.report.ledger_section import ENTRIES, ledger_figure
from stoker.cli.main import build_app
from stoker.trace.events import Phase, ReadClass
from stoker.trace.reader import Trace
from stoker.trace.summary import summarise
from stoker.trace.writer import TraceWriter

MS = 10**6
LAYERS, EXPERTS, K, SLOTS = 6, 32, 4, 10


def command(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


def write_trace(path: Path, tokens: int = 240) -> Path:
    """A prefill of 64 tokens in two chunks, then decode steps with every class of read, one slow token among them."""
    random = np.random.default_rng(2)
    ledger = {
        "budget_bytes": 4 << 30, "process_bytes": 400 << 20, "dense_bytes": 900 << 20, "kv_bytes": 300 << 20,
        "scratch_bytes": 64 << 20, "slots_bytes": 2 << 30, "ring_bytes": 64 << 20, "reserve_bytes": 96 << 20,
        "free_bytes": 200 << 20, "floor_bytes": 2 << 30, "slots": [SLOTS] * LAYERS, "ring_records": 32,
        "resident_share": SLOTS / EXPERTS,
    }  # fmt: skip
    about = {"model": "<b>toy</b>", "path": "hot", "policy": "lru", "experts": EXPERTS, "ledger": ledger}
    now = 0
    with TraceWriter(path, about) as writer:
        for step in range(tokens + 2):
            phase = Phase.PREFILL if step < 2 else Phase.DECODE
            count = 32 if phase is Phase.PREFILL else 1
            spent = (900 if step < 2 else 400 if step == 100 else int(random.integers(30, 80))) * MS
            for layer in range(LAYERS):
                route = [random.permutation(EXPERTS)[:K].tolist() for _ in range(count)]
                begin = now + spent * layer // LAYERS
                cls = (
                    ReadClass.STREAM if count > 1 else [ReadClass.DEMAND, ReadClass.PREFETCH, ReadClass.LATE][layer % 3]
                )
                writer.read(layer, route[0][0], cls, begin, begin, begin + 3 * MS, 2 << 20)
                writer.layer(step, layer, layer, route, [[0.25] * K] * count, K - 1, 1, 4 * MS)
            writer.step(step, phase, count, now, now + spent, 3 << 30)
            now += spent
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("report") / "run & all.trace")


@pytest.fixture(scope="module")
def result(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "bench.json"
    fed = ("--prompt", 16, "--decode", 12, "--warmup", 2, "--threads", 1, "--repeats", 2, "--vs-path", "exact")
    done = command("bench", store, "--memory", "2GiB", *fed, "--out", out)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def page(trace: Path, result: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "page.html"
    done = command("report", trace, result, "--out", out, "--title", "Runs <1>")
    assert done.exit_code == 0, done.output
    return out


class Tags(html.parser.HTMLParser):
    """Checks that tags close in order, and gathers them."""

    VOID = ("meta", "img", "br", "line", "rect", "path", "circle", "i")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_file_that_asks_nothing_of_a_network(page: Path) -> None:
    text, tags = page.read_text(), Tags()
    tags.feed(text)
    assert not tags.open
    for tag, attributes in tags.found:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href", "data-src", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp", text)
    assert "<b>toy</b>" not in text and "&lt;b&gt;toy&lt;/b&gt;" in text and "Runs &lt;1&gt;" in text


def test_every_drawing_has_a_name_and_a_table(page: Path) -> None:
    text, tags = page.read_text(), Tags()
    tags.feed(text)
    drawings = [attributes for tag, attributes in tags.found if tag == "svg"]
    assert len(drawings) >= 20
    ids = {attributes["id"] for tag, attributes in tags.found if "id" in attributes}
    assert all(a["role"] == "img" and a["aria-labelledby"] in ids for a in drawings)
    figures = text.split("<figure")[1:]
    assert all("<table" in figure for figure in figures if "<svg" in figure or "<img" in figure)
    assert text.count('class="wide"') == text.count('class="narrow"') > 8
    headings = "Tokens over time|Token latency|Which experts are used|Hit rate against residency|Bytes by class"
    for heading in f"{headings}|Prefetch|Memory ledger|What bounds the speed|Decode speed".split("|"):
        assert f"<h3>{heading}" in text


def test_the_figures_are_those_of_the_trace(page: Path, trace: Path) -> None:
    text, figures = page.read_text(), summarise(Trace(trace))
    assert f"{charts.short(figures['decode']['tokens_per_s'])} tok/s" in text
    assert f"p95 {figures['decode']['between_steps_ms']['p95']:.1f} ms" in text
    assert "p99 needs 1000 tokens" in text, "a percentile of too few samples is not drawn"
    assert f"{figures['prefetch']['on_time_ratio']:.1%} of the prefetched records" in text


def test_bars_keep_time_tokens_and_stall(trace: Path) -> None:
    view = trace_data.view(Trace(trace))
    steps = Trace(trace).table("step")
    for most in (7, 60, 1000):
        bars = view.bars(most)
        assert bars.tokens.sum() == steps["tokens"].sum() and bars.end_s[-1] == pytest.approx(view.busy_s)
        spent = (bars.ms * bars.tokens).sum() / 1e3
        assert spent == pytest.approx(view.busy_s) and (bars.stall_ms * bars.tokens).sum() == pytest.approx(
            24 * len(steps["step"]), rel=1e-6
        )
        assert np.array_equal(bars.start_s[1:], bars.end_s[:-1]) and set(bars.phase) == {0, 1}
    assert bars.ms.max() == pytest.approx(400), "the slow token stands out"
    rates = view.reads(50)
    moved = sum(rate.sum() for rate in rates.values()) * view.busy_s / 50
    assert moved == pytest.approx(Trace(trace).column("read.bytes").sum())
    assert set(rates) == {"demand", "prefetch", "late", "stream"}


def test_uses_and_curve(trace: Path) -> None:
    view = trace_data.view(Trace(trace))
    assert view.uses_LE.shape == (LAYERS, EXPERTS) and view.uses_LE.sum() == 240 * LAYERS * K
    curve = view.curve
    assert curve is not None
    lru = dict(curve.lru)
    for (share, best, _), (_, floor) in zip(curve.best, curve.floor, strict=True):
        assert lru[share] <= best + 1e-9 <= floor + 2e-9, "the best policy lies between LRU and MIN"
    assert lru[0.25] == pytest.approx(0.25, abs=0.03), "uniform routes hit as often as they are held"


def test_scales() -> None:
    assert charts.Scale(0, 1, 0, 100).ticks(4) == [0, 0.25, 0.5, 0.75, 1.0]
    assert charts.Scale(0, 97, 0, 100).ticks(5) == [0, 20, 40, 60, 80]
    assert charts.Scale(1, 1000, 0, 300, log=True).ticks(4) == [1, 10, 100, 1000]
    assert charts.Scale(1, 1000, 0, 300, log=True)(10) == pytest.approx(100)
    assert [charts.short(v) for v in (0, 0.0123, 1.5, 12.34, 1234.5)] == ["0", "0.0123", "1.5", "12.3", "1,234"]


def test_a_result_of_the_engine_benchmark(tmp_path: Path) -> None:
    one = {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    cell = {"prefill_tok_s": one, "decode_tok_s": one, "decode_bytes_per_token": one}
    run = {"decode_tokens": 2, "prefill_tokens": 8, "decode_ms": [400.0, 600.0]}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"cells": {"llama.cpp mmap 4GiB": cell}, "runs": {"llama.cpp mmap 4GiB": [run] * 3}}))
    done = command("report", file, "--out", tmp_path / "p.html")
    assert done.exit_code == 0, done.output
    assert "llama.cpp mmap 4GiB" in (tmp_path / "p.html").read_text()


def test_refusals(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    for arguments, word in (
        ((tmp_path / "x.json",), "no benchmark result"),
        ((tmp_path / "gone.trace",), "no such file"),
        ((Path(__file__),), "neither a trace nor"),
    ):
        done = command("report", *arguments, "--out", tmp_path / "p.html")
        assert done.exit_code == 1 and word in done.output and not (tmp_path / "p.html").exists()
    assert command("report", trace, "--out", tmp_path / "no" / "p.html").exit_code == 2
    assert command("report", trace, "--out", trace).exit_code == 2 and trace.stat().st_size > 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("no Chromium with its driver on this machine (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


def show(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())


def test_in_a_browser(browser: Any, page: Path) -> None:
    """Nothing overflows, nothing is fetched, no error is logged; text is readable at both widths and in both themes."""
    for width in (1000, 375):
        for scheme in ("light", "dark"):
            show(browser, page, width, scheme)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            shown = ".wide" if width > 640 else ".narrow"
            assert (
                browser.execute_script(f"return document.querySelector('{shown} svg').getBoundingClientRect().width")
                > 250
            )
            sizes = browser.execute_script(
                "return [...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().width)"
                ".map(t => t.getBoundingClientRect().height)"
            )
            assert min(sizes) >= 10, "text in drawings is not scaled down"
            assert contrast(browser) > 4.5
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"}
    assert all(url.startswith(("file:", "data:")) for url in urls)


def contrast(browser: Any) -> float:
    """Of the softest text against its panel (WCAG ratio)."""
    colours = browser.execute_script(
        "const s = getComputedStyle(document.querySelector('figcaption p')).color;"
        "const p = getComputedStyle(document.querySelector('figure')).backgroundColor; return [s, p]"
    )

    def luminance(colour: str) -> float:
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(luminance(colour) for colour in colours)
    return (high + 0.05) / (low + 0.05)


def test_pointer_theme_and_heat_map(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    show(browser, page, 1000)
    bar = browser.find_element(By.CSS_SELECTOR, ".wide rect[data-tip]")
    ActionChains(browser).scroll_to_element(bar).move_to_element(bar).perform()
    assert "token" in browser.find_element(By.ID, "tip").text
    picture = browser.find_element(By.CSS_SELECTOR, "img.by-use")
    ActionChains(browser).scroll_to_element(picture).move_to_element_with_offset(picture, 0, 0).perform()
    assert "uses" in browser.find_element(By.CSS_SELECTOR, ".reading").text
    toggle = browser.find_element(By.CSS_SELECTOR, ".heat-order")
    toggle.click()
    assert not picture.is_displayed() and browser.find_element(By.CSS_SELECTOR, "img.by-id").is_displayed()
    theme = browser.find_element(By.ID, "theme")
    before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    theme.click()
    theme.click()
    assert theme.text == "theme: dark"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before


def test_ledger_bars_are_named_by_variant_and_parts_by_colours_of_their_own() -> None:
    ledger = {key: 1 << 30 for key, _, _ in ENTRIES} | {"slots": [4], "floor_bytes": 1, "resident_share": 0.5}
    ledger |= {"budget_bytes": 4 << 30, "grammar_bytes": 0}
    found = _distinct({"hot": ledger, "staged": ledger, "exact": {**ledger, "slots": [5]}})
    assert list(found) == ["hot and 1 more", "exact"]
    assert len({colour for _, _, colour in ENTRIES}) == len(ENTRIES)
    assert "grammars" not in ledger_figure(found) and "kept prefixes" in ledger_figure(found)
