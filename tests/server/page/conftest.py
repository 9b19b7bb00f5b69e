"""One browser and two servers for all tests of the page."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.page.browsing import Browser, chromium
from tests.server.running import Server

CTX = 1024
KEY = "correct-horse-battery-staple"


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def browser(downloads: Path) -> Iterator[Browser]:
    with chromium(downloads) as browser:
        yield browser


class Servers:
    """demo: real words, one answer at a time and one in the queue. locked: a tiny model that reasons, behind a key."""

    def __init__(self, demo_store: Path, thinking_store: Path) -> None:
        self._demo_store = demo_store
        with ThreadPoolExecutor(2) as starting:
            demo, locked = starting.submit(self._start_demo), starting.submit(
                Server, thinking_store, "--memory", "1GiB", "--api-key", KEY
            )  # fmt: skip
        self.demo, self.locked = demo.result(), locked.result()

    def _start_demo(self) -> Server:
        small = ("--ctx-size", CTX, "--parallel", 1, "--queue", 1)
        return Server(self._demo_store, "--memory", "1GiB", *small)

    def alive(self) -> Server:
        """The demo server, started again where a test has killed it."""
        if self.demo.process.poll() is not None:
            self.demo = self._start_demo()
        return self.demo


@pytest.fixture(scope="session")
def thinking_store(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny store with a template that opens a block of reasoning for the answer."""
    store = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(tiny_store, store)
    template = store / "chat_template.jinja"
    text, end = template.read_text(), "assistant\n{% endif %}"
    opened = text.replace(end, "assistant\n<think>\n{% endif %}{# </think> #}")
    assert "<think>" in opened
    template.write_text(opened)
    return store


@pytest.fixture(scope="session")
def servers(browser: Browser, demo_store: Path, thinking_store: Path) -> Iterator[Servers]:
    started = Servers(demo_store, thinking_store)
    yield started
    for server in (started.demo, started.locked):
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def demo(servers: Servers) -> str:
    """The demo server's address."""
    return servers.alive().url
