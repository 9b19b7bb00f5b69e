"""Makes the testbed's corpus: fetch packages, clean, split by document, drop duplicates, write text and its record.

    python -m recipes.testbed.corpus [--directory models/testbed/corpus]

Writes DOMAIN.SPLIT.jsonl (one {"text": ...} a line) under the directory, which git ignores, and `corpus.json` beside
this file: packages with version, hash and licence, and documents, bytes and hash of every file written. The same
packages give the same bytes. Whole documents go to one split; a paragraph that a test or validation document holds
is taken out of the training documents, also when it is only nearly the same.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from recipes.testbed.clean import documents
from recipes.testbed.sources import DOMAINS, SOURCES, Source

HERE = Path(__file__).parent
RECORD = HERE / "corpus.json"
CORPUS = Path("models/testbed/corpus")
SPLITS = ("test", "valid", "train")  # the order of duplicate removal: what is tested stays whole
PERCENT = {"test": 3, "valid": 2}
MOST_BYTES = 13_000_000  # of a domain: no domain drowns the others
LEAST_CHARACTERS = 200  # of a document
PARAGRAPH_CHARACTERS = 60  # shorter ones may recur: headings, "Yes.", braces
SHINGLE_WORDS = 8
SHINGLE_SHARE = 4  # one in so many shingles is remembered
NEAR = 0.5  # a paragraph is a near duplicate with this share of known shingles


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the testbed's corpus out of packages.")
    parser.add_argument("--directory", type=Path, default=CORPUS, help="where the text goes (80 MB; packages: 250 MB)")
    options = parser.parse_args()
    made = make(options.directory)
    RECORD.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    for domain, splits in made["domains"].items():
        print(domain, {split: f"{figures['bytes'] / 1e6:.2f} MB" for split, figures in splits.items()})


def make(directory: Path) -> dict:
    """Fetch, clean and write; the record that goes into corpus.json."""
    packages = {source.package: fetch(source, directory / "packages") for source in SOURCES}
    roots = {name: directory / "packages" / name for name in packages}
    seen, figures = Seen(), {}
    for domain in DOMAINS:
        texts = gather([source for source in SOURCES if source.domain == domain], roots)
        figures[domain] = {split: write(directory, domain, split, texts[split], seen) for split in SPLITS}
    return {
        "packages": packages,
        "sources": [asdict(source) for source in SOURCES],
        "rules": {
            "split": "sha256 of the document, percent: " + json.dumps(PERCENT),
            "most_bytes_a_domain": MOST_BYTES,
            "near_duplicate": f"{NEAR} of a paragraph's {SHINGLE_WORDS}-word shingles, one in {SHINGLE_SHARE} kept",
        },
        "domains": figures,
        "duplicates_dropped": {"paragraphs": seen.exact, "near_paragraphs": seen.near},
    }


def fetch(source: Source, directory: Path) -> dict[str, str]:
    """Download and unpack one package into directory/NAME; its version and the sha256 of its archive."""
    root, archives = directory / source.package, directory / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    pattern = f"{source.package}_*.deb" if source.registry == "debian" else f"{source.package.replace('-', '_')}-*.whl"
    if not list(archives.glob(pattern)):
        debian = ["apt-get", "download", source.package]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", source.package]
        subprocess.run(debian if source.registry == "debian" else pip, cwd=archives, check=True)
    (archive,) = archives.glob(pattern)
    if not root.exists():
        unpack = ["dpkg-deb", "-x", archive, root] if archive.suffix == ".deb" else ["unzip", "-q", archive, "-d", root]
        subprocess.run(unpack, check=True)
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"archive": archive.name, "sha256": digest, "registry": source.registry, "licence": source.licence}


def gather(sources: list[Source], roots: dict[str, Path]) -> dict[str, list[str]]:
    """The documents of one domain by split, ordered by their hash, at most MOST_BYTES in all."""
    by_hash: dict[str, str] = {}
    for source in sources:
        for path in sorted(roots[source.package].glob(source.glob)):
            if path.is_file() and not path.is_symlink():
                for text in documents(path, source.kind):
                    if len(text) >= LEAST_CHARACTERS:
                        by_hash[hashlib.sha256(text.encode()).hexdigest()] = text
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    total = 0
    for digest, text in sorted(by_hash.items()):
        size = len(text.encode())
        if total + size > MOST_BYTES:
            continue
        total += size
        texts[split_of(digest)].append(text)
    return texts


def split_of(digest: str) -> str:
    """By the last digits of the document's hash: the first ones order the documents."""
    place = int(digest[-8:], 16) % 100
    if place < PERCENT["test"]:
        return "test"
    return "valid" if place < PERCENT["test"] + PERCENT["valid"] else "train"


class Seen:
    """Paragraphs that were written already, exactly and by their shingles."""

    def __init__(self) -> None:
        self.paragraphs: set[bytes] = set()
        self.shingles: set[int] = set()
        self.exact = self.near = 0

    def fresh(self, text: str) -> str:
        """`text` without the paragraphs that were written before; remembers the others."""
        kept = [paragraph for paragraph in text.split("\n\n") if self._is_fresh(paragraph)]
        return "\n\n".join(kept)

    def _is_fresh(self, paragraph: str) -> bool:
        if len(paragraph) < PARAGRAPH_CHARACTERS:
            return True
        words = re.findall(r"\w+", paragraph.lower())
        digest = hashlib.blake2b(" ".join(words).encode(), digest_size=12).digest()
        if digest in self.paragraphs:
            self.exact += 1
            return False
        marks = shingles(words)
        if len(marks) >= 3 and sum(mark in self.shingles for mark in marks) > NEAR * len(marks):
            self.near += 1
            return False
        self.paragraphs.add(digest)
        self.shingles.update(marks)
        return True


def shingles(words: list[str]) -> list[int]:
    """Hashes of runs of SHINGLE_WORDS words; those divisible by SHINGLE_SHARE, so the same wherever the run stands."""
    hashes = [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") for word in words]
    marks = []
    for first in range(len(hashes) - SHINGLE_WORDS + 1):
        mark = 0
        for one in hashes[first : first + SHINGLE_WORDS]:
            mark = (mark * 1_000_003 + one) & (2**61 - 1)
        if mark % SHINGLE_SHARE == 0:
            marks.append(mark)
    return marks


def write(directory: Path, domain: str, split: str, texts: list[str], seen: Seen) -> dict[str, int | str]:
    digest, count, size = hashlib.sha256(), 0, 0
    with open(directory / f"{domain}.{split}.jsonl", "wb") as file:
        for text in texts:
            kept = seen.fresh(text)
            if len(kept) >= LEAST_CHARACTERS:
                line = json.dumps({"text": kept}, ensure_ascii=False).encode() + b"\n"
                file.write(line)
                digest.update(line)
                count, size = count + 1, size + len(kept.encode())
    return {"documents": count, "bytes": size, "sha256": digest.hexdigest()}


def read(domain: str, split: str, directory: Path = CORPUS) -> Iterator[str]:
    """The documents of one file that `make` wrote."""
    with open(directory / f"{domain}.{split}.jsonl", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


if __name__ == "__main__":
    main()
