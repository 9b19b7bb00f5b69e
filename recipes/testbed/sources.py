"""Where the testbed's text comes from: packages, the licence of each, and how to find the documents in it.

Owns the list alone. Every package is a Debian or PyPI package that says in its own copyright file what is stated here.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["html", "text", "roff", "python", "dictionary", "chat"]
DOMAINS = ("prose", "reference", "documentation", "code", "chat", "german")


@dataclass(frozen=True)
class Source:
    """Files of one package. glob: relative to the unpacked package; kind: how `clean` reads them."""

    domain: str
    package: str
    glob: str
    kind: Kind
    licence: str
    registry: Literal["debian", "pypi"] = "debian"


FAQ = "GPL-2 (An Anarchist FAQ)"
PSF = "PSF-2.0 (Python Software Foundation)"
HANDBOOK = "GPL-2.0+ or CC-BY-SA-3.0 (The Debian Administrator's Handbook)"
MAN_PAGES = "free documentation licences of the Linux man-pages, page by page (Verbatim, GPL-2+, BSD, public domain)"

SOURCES = (
    Source("prose", "anarchism", "usr/share/doc/anarchism/html/*.html", "html", FAQ),
    Source("reference", "dict-gcide", "usr/share/dictd/gcide.index", "dictionary", "GPL-1+ (GCIDE, GNU project)"),
    Source("reference", "dict-foldoc", "usr/share/dictd/foldoc.index", "dictionary", "GFDL-1.1+ (FOLDOC)"),
    Source("reference", "dict-jargon", "usr/share/dictd/jargon.index", "dictionary", "public domain (the Jargon File)"),
    Source("documentation", "python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.txt", "text", PSF),
    Source("documentation", "git-doc", "usr/share/doc/git-doc/**/*.txt", "text", "GPL-2 (Git)"),
    Source("documentation", "debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html", "html", HANDBOOK),
    Source("documentation", "manpages", "usr/share/man/man*/*.gz", "roff", MAN_PAGES),
    Source("documentation", "manpages-dev", "usr/share/man/man*/*.gz", "roff", MAN_PAGES),
    Source("code", "libpython3.11-stdlib", "usr/lib/python3.11/**/*.py", "python", PSF),
    Source("code", "libpython3.11-minimal", "usr/lib/python3.11/**/*.py", "python", PSF),
    Source("code", "libpython3.11-testsuite", "usr/lib/python3.11/**/*.py", "python", PSF),
    Source("chat", "chitchat-dataset", "chitchat_dataset/dataset.json", "chat", "MIT (BYU PCC lab)", "pypi"),
    Source("german", "manpages-de", "usr/share/man/de/man*/*.gz", "roff", "GPL-3+ (manpages-l10n)"),
    Source("german", "debian-handbook", "usr/share/doc/debian-handbook/html/de-DE/*.html", "html", HANDBOOK),
    Source("german", "debian-reference-de", "usr/share/debian-reference/ch*.de.html", "html", "GPL-2+"),
    Source("german", "developers-reference-de", "usr/share/developers-reference/de/_sources/*.txt", "text", "GPL-2"),
)
