"""Plain text out of what packages hold: HTML, manual pages, dictd dictionaries, conversations, source files.

Owns one function a kind, each from a file to documents. Knows nothing of domains, splits or duplicates.
"""

import gzip
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ENTRIES_A_PAGE = 16  # of a dictionary: one document, like a page of it
SKIPPED = {"script", "style", "nav", "head", "title"}
BLOCKS = {"p", "div", "li", "ul", "ol", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "tr", "table", "dt"}
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def documents(path: Path, kind: str) -> Iterator[str]:
    """The documents in one file, cleaned; empty ones are left out."""
    if kind == "dictionary":
        found: Iterator[str] = dictionary(path)
    elif kind == "chat":
        found = conversations(path)
    else:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8", errors="ignore")
        found = iter([{"html": html, "roff": roff}.get(kind, str)(text)])
    for one in found:
        text = tidy(one)
        if text:
            yield text


def tidy(text: str) -> str:
    """No carriage returns, no space before a line's end, never more than one empty line in a row."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\x0c", "\n").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping: list[str] = []
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self.skipping.append(tag)
        self.preformatted += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self.skipping and self.skipping[-1] == tag:
            self.skipping.pop()
        self.preformatted = max(0, self.preformatted - (tag == "pre"))
        if tag in BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html(text: str) -> str:
    """The visible text, one paragraph a block; indentation is dropped."""
    parser = _Text()
    parser.feed(text)
    return re.sub(r"\n +", "\n", re.sub(r" +\n", "\n", "".join(parser.parts)))


ESCAPES = {"\\-": "-", "\\e": "\\", "\\(bu": "*", "\\(aq": "'", "\\(dq": '"', "\\(co": "(c)", "\\&": "", "\\/": ""}
ESCAPES |= {"\\,": "", "\\|": "", "\\^": "", "\\ ": " ", "\\~": " ", "\\(en": "-", "\\(em": "--", "\\c": "", "\\%": ""}
ESCAPES |= {"\\(lq": '"', "\\(rq": '"', "\\(oq": "'", "\\(cq": "'", "\\(ha": "^", "\\(ti": "~", "\\(ga": "`"}
ALTERNATING = (".BR", ".IR", ".RB", ".RI", ".BI", ".IB")  # two fonts in turn, nothing between the words
HEADINGS = (".SH", ".SS", ".Sh", ".Ss")
BREAKS = (".PP", ".P", ".LP", ".TP", ".IP", ".HP", ".Pp", ".It", ".sp", ".RS", ".RE", ".EX", ".EE")
DROPPED = (".TH", ".Dd", ".Dt", ".Os", ".de", ".ds", ".if", ".ie", ".el", ".nr", ".so", ".nh", ".ad", ".ft", ".in")
DROPPED += (".ta", ".ti", ".br", ".nf", ".fi", ".UE", ".ME", ".ns", ".rs", ".na", ".hy", ".PD", ".TS", ".TE", "..")
DROPPED += (".hw", ".tr", ".rm", ".rr", ".ps", ".ne", ".bp", ".ll", ".mk", ".als", ".Bl", ".El", ".Bd", ".Ed")


def roff(text: str) -> str:
    """A manual page's text: headings, paragraphs, the words of font requests; what only lays out is dropped."""
    out: list[str] = []
    for line in text.split("\n"):
        if line.startswith((".\\", "'\\", "'")):
            continue
        if not line.startswith("."):
            out.append(_inline(line))
            continue
        request, _, rest = line.partition(" ")
        between = "" if request in ALTERNATING else " "
        words = _inline(between.join(_arguments(rest)))
        if request in HEADINGS:
            out += ["", words, ""]
        elif request in BREAKS:
            out.append("")
            if request == ".IP" and words:
                out.append(re.sub(r" \d+$", "", words))
        elif not request.startswith(DROPPED) and words:
            out.append(words)
    return re.sub(r"\n{2,}(?=[A-Z ]+\n\n)", "\n\n", "\n".join(out))


def _arguments(rest: str) -> list[str]:
    return [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]


def _inline(line: str) -> str:
    line = re.sub(r'\\".*', "", line)
    line = re.sub(r"\\f(\[[^]]*\]|\(..|.)", "", line)
    line = re.sub(r"\\s[-+]?\d", "", line)
    line = re.sub(r"\\\*(\[[^]]*\]|\(..|.)", "", line)
    line = re.sub(r"\\m\[[^]]*\]|\\[vhw]'[^']*'", "", line)
    line = re.sub(r"\\\((?:..)|\\[^(\[]", lambda found: ESCAPES.get(found[0], ""), line)
    return re.sub(r"\\\[[^]]*\]", "", line)


def dictionary(index: Path) -> Iterator[str]:
    """Pages of a dictd dictionary: its entries in the order of the file, ENTRIES_A_PAGE to a page."""
    body = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
    places = set()
    for line in index.read_text(encoding="utf-8", errors="ignore").splitlines():
        headword, start, length = line.split("\t")[:3]
        if not headword.startswith("00"):
            places.add((_number(start), _number(length)))
    ordered = sorted(places)
    for first in range(0, len(ordered), ENTRIES_A_PAGE):
        page = ordered[first : first + ENTRIES_A_PAGE]
        yield "\n\n".join(body[low : low + size].decode("utf-8", errors="ignore").strip() for low, size in page)


def _number(text: str) -> int:
    value = 0
    for letter in text:
        value = value * 64 + DIGITS.index(letter)
    return value


def conversations(path: Path) -> Iterator[str]:
    """One document a conversation, its two sides called A and B in order of appearance; no names, no times."""
    for one in json.loads(path.read_text()).values():
        names: dict[str, str] = {}
        lines: list[str] = []
        for message in (message for turn in one["messages"] for message in turn):
            side = names.setdefault(message["sender"], "AB"[min(len(names), 1)])
            said = re.sub(r"\s+", " ", message["text"]).strip()
            if said:
                lines.append(f"{side}: {said}")
        if len(lines) > 3:
            yield "\n".join(lines)
