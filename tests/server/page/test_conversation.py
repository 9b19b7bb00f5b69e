"""Talking to a real model through the page: what is said, stopped, edited, tried again, refused and kept."""

import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.browsing import Browser
from tests.server.page.conftest import CTX, KEY, Servers
from tests.server.running import http

CAPITAL = "What is the capital of France?"
ESCAPE, ENTER = "\ue00c", "\ue007"


def api(url: str, messages: list[dict[str, str]], **more: object) -> str:
    body = {"model": "store", "messages": messages, "temperature": 0, **more}
    answer = http.post(f"{url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def live(url: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"{url}/live").json()["models"]["store"]
    return found


def running(url: str) -> int:
    return int(live(url)["status"]["running"])


def test_words_and_figures(browser: Browser, demo: str) -> None:
    """The words are the API's; the panel shows what the server counts; all of it comes from the server alone."""
    browser.errors(), browser.requested()
    browser.open(demo)
    browser.wait(lambda: browser.text("#link") == "connected", "the connection")
    browser.settings(temperature=0, max_tokens=24)
    browser.send(CAPITAL)
    first = browser.answer()
    assert "Paris" in first and first == api(demo, said(CAPITAL), max_tokens=24)
    assert "tokens at" in browser.last("figures") and "first after" in browser.last("figures")
    browser.send("And of Italy?")
    second = browser.answer()
    assert second == api(demo, said(CAPITAL, first, "And of Italy?"), max_tokens=24)
    assert browser.messages() == [CAPITAL, first, "And of Italy?", second]
    assert f"of {CTX:,} tokens of context" in browser.text("#context")
    spoken = browser.js("return document.getElementById('spoken').textContent")
    assert second.split(".")[0] in spoken and "End of the answer." in spoken

    ledger = live(demo)["ledger"]
    answers = str(sum(live(demo)["finished"].values()))
    browser.wait(lambda: browser.text("#totals").startswith(f"answers\n{answers}"), "the totals")
    assert float(browser.text("#tile-tok_s b")) > 0
    assert browser.text("#tile-hits b").endswith("%") and browser.text("#tile-first b").endswith("s")
    assert sum(browser.probe("ledgerShares()")) == pytest.approx(100, abs=0.2)
    assert browser.probe("ledgerRow('slots')") == f"{ledger['slots_bytes'] / 2**20:.0f} MiB"
    assert "1.00 GiB" in browser.text("#memory-text") and "experts dropped\n0" in browser.text("#totals")
    width, height, colours = browser.probe("painted('heat')")
    assert (width, height) == (8, 30) and colours > 20, "layers by experts, in many shades"
    assert all(url.startswith((demo, "data:")) for url in browser.requested())
    assert browser.errors() == []


def test_system_prompt_and_sampling_reach_the_model(browser: Browser, demo: str) -> None:
    browser.open(demo)
    asked = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 16, "seed": 7}
    browser.settings(system="You are a pirate.", **asked)
    browser.send("Who are you?")
    messages = [{"role": "system", "content": "You are a pirate."}, *said("Who are you?")]
    assert browser.answer() == api(demo, messages, **asked)
    browser.find("#settings-open").click()
    browser.find("#temperature").clear()
    browser.find("#temperature").send_keys("9", ENTER)
    assert browser.text("#settings-wrong").startswith("Temperature:") and browser.find("#settings").is_displayed()
    browser.press(ESCAPE)


def test_stop_ends_the_answer_on_the_server(browser: Browser, demo: str) -> None:
    browser.open(demo)
    browser.settings(temperature=0)
    browser.send("Write a very long story about a steam train, with many chapters.")
    browser.wait(lambda: len(browser.last("words")) > 20, "the first words")
    assert running(demo) == 1
    browser.press(ESCAPE)
    kept = browser.answer(5)
    browser.wait(lambda: running(demo) == 0, "the server to stop", 5)
    assert "stopped by you" in browser.last("figures") and len(kept) > 20
    assert browser.answer() == kept and live(demo)["finished"]["cancelled"] >= 1
    browser.settings(max_tokens=8)
    browser.send("Hello")
    browser.answer()
    assert "reached the most tokens" in browser.last("figures")


def test_edit_and_retry_keep_every_version(browser: Browser, demo: str, downloads: Path) -> None:
    browser.open(demo)
    browser.settings(temperature=0, max_tokens=12)
    browser.send(CAPITAL)
    first = browser.answer()
    browser.send("Thanks")
    browser.answer()
    browser.find(".message.user button[aria-label='Edit this message']").click()
    changed = "What is the capital of Italy?"
    browser.js("document.querySelector('.edit textarea').value = arguments[0]", changed)
    browser.find(".edit button.primary").click()
    second = browser.answer()
    assert browser.messages() == [changed, second] and second == api(demo, said(changed), max_tokens=12)
    browser.find(".message.assistant button[aria-label='Write this answer again']").click()
    browser.answer()
    assert [turn.text for turn in browser.all(".turn > span")] == ["2 of 2", "2 of 2"]
    browser.find(".message.user button[aria-label='Earlier version']").click()
    assert browser.messages()[:3] == [CAPITAL, first, "Thanks"], "the first version has its own future"
    browser.driver.refresh()
    browser.wait(lambda: len(browser.messages()) == 4, "the kept chat")

    browser.find("#chats-open").click()
    browser.find("#export").click()
    exported = browser.wait(lambda: list(downloads.glob("*.md")), "the exported file")[0].read_text()
    assert exported.startswith(f"**You**\n\n{CAPITAL}\n") and f"**store**\n\n{first}" in exported
    browser.find("#chats .close").click()
    browser.find("#new").click()
    assert browser.messages() == [] and browser.text("#empty-title")
    browser.find("#chats-open").click()
    browser.find(".chats-list .go").click()
    assert browser.messages()[0] == CAPITAL
    browser.find("#chats-open").click()
    browser.find("#clear").click()
    browser.find("#clear").click()
    assert browser.messages() == [] and "stoker.chat." not in browser.js("return Object.keys(localStorage).join()")


def test_a_conversation_that_is_too_long(browser: Browser, demo: str) -> None:
    browser.errors()
    browser.open(demo)
    browser.send("word " * 2000)
    browser.answer()
    told = browser.last("problem")
    assert "too long for the model" in told and f"{CTX:,} is the most" in told and "needs 2,0" in told
    browser.find(".problem button").click()
    assert browser.messages() == [] and all("400" in line for line in browser.errors()), "the refusal alone"


def test_a_full_queue(browser: Browser, demo: str) -> None:
    """The page says when to try again, and the same attempt then succeeds."""
    browser.errors()
    browser.open(demo)
    browser.settings(temperature=0, max_tokens=16)
    body = {
        "model": "store",
        "messages": said("Tell me a long story."),
        "max_tokens": 900,
        "stream": True,
        "ignore_eos": True,
    }
    with http.stream("POST", f"{demo}/v1/chat/completions", json=body) as one:
        assert one.status_code == 200
        browser.wait(lambda: running(demo) == 1, "the first to run")
        with http.stream("POST", f"{demo}/v1/chat/completions", json=body) as two:
            assert two.status_code == 200
            browser.wait(lambda: "1 of 1 waiting" in browser.text("#queue-text"), "the queue on the page")
            browser.send(CAPITAL)
            browser.answer()
            assert "The server is busy" in browser.last("problem") and "Try again in" in browser.last("problem")
    browser.wait(lambda: running(demo) == 0, "the others to be gone")
    browser.find(".problem button").click()
    assert "Paris" in browser.answer() and browser.all(".turn") == [], "the failed attempt was taken up again"
    assert all("429" in line for line in browser.errors()), "the refusal alone"


def test_key(browser: Browser, servers: Servers) -> None:
    """What needs the key and what does not; the page asks for it, keeps it in the tab, says when it is wrong."""
    url = servers.locked.url
    assert [http.get(url + path).status_code for path in ("/", "/static/app.js", "/health")] == [200, 200, 200]
    assert [http.get(url + path).status_code for path in ("/live", "/live/stream", "/metrics")] == [401, 401, 401]
    assert http.get(f"{url}/live", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    browser.open(url)
    browser.wait(lambda: "wants an API key" in browser.text("#banner"), "the banner")
    browser.find("#banner button").click()
    browser.press("wrong", ENTER)
    browser.wait(lambda: "The API key is wrong" in browser.text("#banner"), "what is wrong")
    browser.settings(key=KEY)
    browser.wait(lambda: browser.text("#link") == "connected", "the way in")
    assert not browser.find("#banner").is_displayed()
    browser.settings(max_tokens=4)
    browser.send("Hello")
    browser.answer()
    assert "4 tokens" in browser.last("figures")
    assert KEY not in browser.js("return JSON.stringify(localStorage)")
    assert KEY in browser.js("return JSON.stringify(sessionStorage)")
    browser.errors()


def test_reasoning_as_it_comes(browser: Browser, servers: Servers) -> None:
    """A model that never ends its reasoning: all of it in the folded part, none in the answer or the next prompt."""
    url = servers.locked.url
    browser.open(url)
    browser.settings(key=KEY, temperature=0, max_tokens=40)
    browser.wait(lambda: browser.text("#link") == "connected", "the way in")
    browser.send("Hello")
    assert browser.answer() == ""
    body = {"model": "thinker", "messages": said("Hello"), "temperature": 0, "max_tokens": 40}
    answer = http.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}).json()
    reasoning = answer["choices"][0]["message"]["reasoning_content"]
    assert browser.text(".reasoning summary") == f"Reasoning: {len(reasoning.split())} words"
    kept = browser.js("return Object.values(localStorage).join()")
    assert reasoning.split()[0] in kept and "40 tokens" in browser.last("figures")
    browser.errors()


def test_a_long_prompt_shows_how_far_it_is(browser: Browser, demo: str) -> None:
    browser.open(demo)
    browser.settings(temperature=0, max_tokens=2)
    browser.send(f"Say yes. {uuid.uuid4()} " + "Red, green and blue. " * 72)
    told = browser.wait(
        lambda: re.fullmatch(r"Reading the prompt: (\d+) of (\d+) tokens.*", browser.last("progress").strip()),
        "the progress",
    )
    total = int(told[2])
    assert 300 < total < CTX and browser.all(".message.user > .cut") != []
    seen = set()
    while not browser.idle():
        bar = browser.js("const b = document.querySelector('.progress progress'); return b && [b.value, b.max]")
        seen.add(tuple(bar or ()))
    assert browser.last("figures").startswith("2 tokens") and f"prompt {total}" in browser.last("figures")
    assert any(part and 0 < part[0] < total for part in seen), seen


def test_the_server_goes_away(browser: Browser, servers: Servers) -> None:
    """In the middle of an answer: what had come is kept. Before the next: said so, with what to do."""
    server = servers.alive()
    browser.open(server.url)
    browser.settings(temperature=0)
    browser.send("Write a long story about the sea, with many chapters.")
    browser.wait(lambda: len(browser.last("words")) > 20, "the first words")
    server.process.kill()
    kept = browser.answer()
    assert len(kept) > 20 and "broke in the middle" in browser.last("problem")
    assert "Try again" in browser.last("problem")
    browser.wait(lambda: "The server does not answer" in browser.text("#banner"), "the banner")
    assert "out of touch" in browser.text("#live-note")
    browser.send("Are you there?")
    browser.answer()
    assert "The server does not answer" in browser.last("problem") and "stoker serve" in browser.last("problem")
    assert browser.messages()[1] == kept
    browser.errors()
