"""Chromium for tests: one window on a server's page, with the few moves that the tests make.

Skips, with the reason, where selenium, Chromium or its driver is missing.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROBES = (Path(__file__).parent / "probes.js").read_text()
PHONE = (360, 740)
DESK = (1360, 900)


@contextmanager
def chromium(downloads: Path) -> Iterator["Browser"]:
    """A browser that keeps its console, its requests and its downloads."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the dev extra has it)")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver on this machine (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()


class Browser:
    """`driver`: selenium's, for what is not here."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def screen(self, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        width, height = size
        mobile = width < 500
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": mobile})
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, url: str, size: tuple[int, int] = DESK, scheme: str = "light", *, fresh: bool = True) -> None:
        """The page at `url`, connected; `fresh`: without what earlier tests left in the browser."""
        self.screen(size, scheme)
        self.driver.get(url + "/")
        if fresh:
            self.js("localStorage.clear(); sessionStorage.clear()")
            self.driver.refresh()

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def probe(self, call: str, *arguments: Any) -> Any:
        """A call of probes.js, such as `painted('heat')`; `arguments` as args[0] and on. Its error is raised here."""
        ask = f"const args = [...arguments], done = args.pop(); {PROBES} (async () => {call})()"
        found = self.driver.execute_async_script(
            f"{ask}.then((answer) => done({{ answer }}), (error) => done({{ error: String(error) }}))", *arguments
        )
        assert "error" not in found, found
        return found["answer"]

    def find(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def text(self, css: str) -> str:
        """What is shown, of the first match; empty where there is none."""
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        return str(self.js("return document.activeElement?.id || document.activeElement?.ariaLabel || ''"))

    def wait(self, ready: Callable[[], Any], what: str, timeout_s: float = 90) -> Any:
        """Until `ready` gives something true; that."""
        deadline = time.monotonic() + timeout_s
        while not (found := ready()):
            assert time.monotonic() < deadline, f"waited for {what}; the page shows: {self.text('body')[:1500]}"
            time.sleep(0.05)
        return found

    def errors(self) -> list[str]:
        """What the console complained of since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requested(self) -> set[str]:
        """Every address that was asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}

    # ---- the chat ---------------------------------------------------------------------------------------------------

    def settings(self, **values: object) -> None:
        """Through the dialog, as a reader would: by the fields' ids."""
        self.find("#settings-open").click()
        for name, value in values.items():
            field = self.find(f"#settings #{name}")
            field.clear()
            field.send_keys(str(value))
        self.find("#settings button[value=save]").click()

    def send(self, text: str) -> None:
        """A long text is put into the field at once."""
        field = self.find("#prompt")
        if len(text) > 500:
            self.js("arguments[0].value = arguments[1]", field, text)
        else:
            field.send_keys(text)
        self.find("#send").click()

    def answer(self, timeout_s: float = 120) -> str:
        """The last answer, when it is whole."""
        self.wait(self.idle, "the end of the answer", timeout_s)
        return self.last("words")

    def idle(self) -> bool:
        return bool(self.js("return !document.querySelector('.running') && !document.getElementById('send').hidden"))

    def last(self, part: str) -> str:
        return self.text(f".message.assistant:last-child > .{part}")

    def messages(self) -> list[str]:
        """The words of all that are shown."""
        words = "return [...document.querySelectorAll('.message > .words')].map((e) => e.innerText)"
        return [str(text) for text in self.js(words)]

    def show(self, url: str, answer: str, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        """A kept chat with this answer, as if a model had given it: reasoning before it, a failure after it."""
        usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
        shared = {"children": [], "chosen": 0}
        nodes = {
            "root": {**shared, "id": "root", "children": ["u"]},
            "u": {**shared, "id": "u", "parent": "root", "role": "user", "text": "<b>Hi</b>", "children": ["a"]},
            "a": {
                **shared, "id": "a", "parent": "u", "role": "assistant", "model": "store", "text": answer,
                "usage": usage, "reasoning": "First **I** think.", "finish": "length",
                "error": {"kind": "failed", "detail": "it broke"},
            },
        }  # fmt: skip
        chat = json.dumps({"id": "c", "changed": 1, "nodes": nodes})
        self.open(url, size, scheme)
        self.js("localStorage.setItem('stoker.chat.c', arguments[0])", chat)
        self.js("localStorage.setItem('stoker.settings', '{\"open\": \"c\"}')")
        self.driver.refresh()
        self.wait(lambda: self.find("#link").get_attribute("data-state") == "on", "the connection")
