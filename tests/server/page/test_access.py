"""The page for everybody: keyboard alone, a phone, both themes' contrast, a screen reader's view, and safe words."""

from itertools import pairwise

import pytest

from tests.server.page.browsing import PHONE, Browser
from tests.server.running import http

TAB, ENTER, SHIFT, ESCAPE, UP, RELEASE = "\ue004", "\ue007", "\ue008", "\ue00c", "\ue013", "\ue000"
RIGHT, DOWN = "\ue014", "\ue015"
HOSTILE = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> [x](javascript:window.pwned=1) '
    "`<b>` **<i>x</i>** <svg onload=window.pwned=1>\n\n```html\n<script>window.pwned=1</script>\n```\n"
)
RICH = (
    "# Title\n\nSome *em*, **strong**, ~~gone~~, `code`, [link](https://example.org/a_(b)), snake_case, 2 * 3 * 4.\n\n"
    "1. one\n2. two\n   - deep\n   - deeper\n\n> quote\n> more\n\n```python\nprint('" + "x" * 200 + "')\n```\n\n"
    "| a | b |\n|--:|:-:|\n| 1 | 2 |\n\n---\n\nEnd **unclosed `and"
)
DRAWN = (
    "<h3>Title</h3>",
    "<em>em</em>",
    "<strong>strong</strong>",
    "<del>gone</del>",
    "<code>code</code>",
    'href="https://example.org/a_(b)"',
    "snake_case, 2 * 3 * 4.",
    "<li>two<ul><li>deep</li><li>deeper</li></ul></li>",
    "<blockquote><p>quote\nmore</p></blockquote>",
    '<td class="right">1</td>',
    "<hr>",
    "End **unclosed `and",
)


def test_keyboard_alone(browser: Browser, demo: str) -> None:
    """Skip link, message, new line, send, stop, edit the last message, settings: no pointer, and the focus is seen."""
    browser.open(demo)
    browser.press(TAB)
    assert browser.text(":focus") == "Skip to the message field" and browser.find(":focus").rect["y"] >= 0
    browser.press(ENTER)
    assert browser.focused() == "prompt"
    browser.find("#prompt").send_keys("Name a river.", SHIFT + ENTER, RELEASE, "A long one, and tell its whole story.")
    assert browser.find("#prompt").get_property("value").count("\n") == 1 and browser.messages() == []
    browser.press(ENTER)
    assert browser.focused() == "prompt"
    browser.wait(lambda: len(browser.last("words")) > 5, "the first words")
    browser.press(ESCAPE)
    browser.answer(5)
    browser.press(UP)
    assert browser.focused() == "Your message"
    browser.press(ESCAPE)
    assert browser.all(".edit") == [] and browser.focused() == "Edit this message"
    wanted = {"scroll", "prompt", "send", "heat", "chats-open", "new", "theme", "settings-open", "Copy this answer"}
    for _ in range(60):
        browser.press(TAB)
        if browser.js("return document.activeElement !== document.body"):  # past the last one comes the browser itself
            style, width = browser.probe("outline()")
            assert style != "none" and width >= 2, browser.focused()
            wanted.discard(browser.focused())
        if not wanted:
            break
    assert not wanted
    browser.js("document.getElementById('heat').focus()")
    browser.press(RIGHT, DOWN)
    assert browser.text("#heat-read").startswith("Layer 1, expert 0:")
    browser.js("document.getElementById('settings-open').focus()")
    browser.press(ENTER)
    assert browser.focused() == "system"
    browser.press(ESCAPE)
    assert browser.focused() == "settings-open"


def test_words_never_become_markup(browser: Browser, demo: str) -> None:
    browser.errors()
    browser.show(demo, HOSTILE)
    assert browser.js("return window.pwned") is None
    assert browser.all(".message img, .message script, .message svg, .message b, .message a, .message i") == []
    assert "<img src=x onerror" in browser.last("words") and browser.text(".message.user > .words") == "<b>Hi</b>"
    assert browser.errors() == [], "the policy had nothing to stop"
    policy = http.get(demo).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_markdown(browser: Browser, demo: str) -> None:
    """Elements for marks; a text that grows letter by letter ends as if drawn at once; hostile text ends in time."""
    browser.show(demo, RICH)
    drawn = browser.js("return document.querySelector('.message.assistant > .words').innerHTML")
    assert [part for part in DRAWN if part not in drawn] == []
    assert browser.text(".code button") == "Copy"
    assert browser.probe("growsAlike(args[0])", RICH + "\n\n" + HOSTILE)
    hostile = [
        ">" * 20_000 + "x",
        "*a " * 20_000,
        "[a](" * 9_000,
        "- " * 9_000,
        "`" * 30_001,
        "|" * 20_000 + "\n|-|",
        "_" * 20_000,
        "\n".join("  " * i + "- x" for i in range(300)),
    ]
    assert browser.probe("drawingMs(args[0])", hostile) < 5_000


def test_reasoning_and_a_failed_answer(browser: Browser, demo: str) -> None:
    browser.show(demo, "Half an answ")
    assert browser.text(".reasoning summary") == "Reasoning: 3 words"
    assert not browser.find(".reasoning").get_property("open")
    browser.find(".reasoning summary").click()
    browser.wait(lambda: browser.text(".reasoning strong") == "I", "the reasoning")
    assert browser.text(".problem strong") == "The server failed" and browser.text(".problem p") == "It broke."
    assert "reached the most tokens" in browser.last("figures")


def test_phone(browser: Browser, demo: str) -> None:
    """Nothing is wider than the screen; the figures are a sheet that closes; what is touched is large enough."""
    browser.show(demo, RICH, PHONE)
    assert browser.probe("overflowing()") == [] and browser.probe("tooSmall()") == []
    assert not browser.find("#live").is_displayed()
    browser.find("#live-open").click()
    assert browser.find("#live").is_displayed() and browser.focused() == "live-close"
    browser.wait(lambda: browser.text("#memory-text"), "the figures")
    assert browser.probe("overflowing()") == [] and browser.probe("tooSmall()") == []
    browser.press(ESCAPE)
    assert not browser.find("#live").is_displayed() and browser.focused() == "live-open"
    for dialog in ("settings", "chats"):
        browser.find(f"#{dialog}-open").click()
        assert browser.probe("overflowing()") == [] and browser.probe("tooSmall()") == []
        browser.press(ESCAPE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Browser, demo: str, scheme: str) -> None:
    """Every text against what is behind it: as the system says, and as the button says against the system."""
    browser.show(demo, RICH, scheme=scheme)
    browser.wait(lambda: browser.text("#memory-text"), "the figures")
    browser.find(".reasoning summary").click()
    browser.js("const b = document.getElementById('banner'); b.hidden = false; b.append('Words')")
    background = browser.js("return getComputedStyle(document.body).backgroundColor")
    poor, kinds = browser.probe("poorContrast()")
    assert poor == [] and kinds > 20
    for _ in range(1 if scheme == "dark" else 2):
        browser.find("#theme").click()
    assert browser.js("return getComputedStyle(document.body).backgroundColor") != background
    assert browser.probe("poorContrast()")[0] == []
    browser.find("#settings-open").click()
    assert browser.probe("poorContrast()")[0] == []
    browser.press(ESCAPE)


def test_less_motion(browser: Browser, demo: str) -> None:
    browser.open(demo)
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.js(
        "const li = document.createElement('li'); li.className = 'message running';"
        "li.innerHTML = '<div class=words><p>x</p></div>'; document.getElementById('messages').append(li)"
    )
    cursor = "return getComputedStyle(document.querySelector('.running p'), '::after').animationName"
    assert browser.js(cursor) == "none"
    browser.screen()
    assert browser.js(cursor) == "blink"


USED = {"button", "textbox", "combobox", "spinbutton", "link", "image", "img", "Canvas", "dialog", "region"}
LANDMARKS = {"main", "banner", "complementary", "navigation", "log", "status", "list", "heading"}


def test_screen_reader(browser: Browser, demo: str) -> None:
    """By the browser's own accessibility tree: names for everything that is used, landmarks, headings in order."""
    browser.show(demo, RICH)
    browser.wait(lambda: browser.text("#memory-text"), "the figures")
    nodes = accessible(browser)
    assert [role for role, name in nodes if role in USED and not name.strip()] == []
    assert {role for role, _ in nodes} >= LANDMARKS and sum(role == "main" for role, _ in nodes) == 1
    for opened in ("settings", "chats"):
        browser.find(f"#{opened}-open").click()
        nodes = accessible(browser)
        assert ("dialog", opened.capitalize()) in nodes
        assert [role for role, name in nodes if role in USED and not name.strip()] == []
        browser.press(ESCAPE)
    levels = browser.probe("headingLevels()")
    assert levels[0] == 1 and all(below <= above + 1 for above, below in pairwise(levels)), levels
    assert browser.probe("brokenIds()") == [] and browser.all("[tabindex]:not([tabindex='0'])") == []
    assert browser.js("return document.documentElement.lang") == "en"


def accessible(browser: Browser) -> list[tuple[str, str]]:
    """(role, name) of everything that a screen reader meets."""
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
