"""The bundled text and what becomes of texts of one's own."""

import json
from pathlib import Path

import pytest

from stoker.errors import OptionError
from stoker.evaluate.text import USES, Passage, bundled, read, text_hash, windows

DATA = Path(__file__).resolve().parents[2] / "stoker/evaluate/data"


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_the_bundled_text_is_two_halves_of_six_domains_under_permissive_licences() -> None:
    halves = [bundled(use) for use in USES]
    assert [len(half) for half in halves] == [30, 30]
    assert not {one.text for one in halves[0]} & {one.text for one in halves[1]}
    assert len({one.domain for one in halves[0]}) == 6 and len(bundled()) == 60
    licences = {one["licence"] for one in json.loads((DATA / "SOURCES.json").read_text())}
    assert licences <= {"public domain", "Apache-2.0", "BSD-3-Clause", "MIT"}
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 150_000


def test_windows_cover_a_document_once_and_never_cross_to_another() -> None:
    passages = [Passage("a", "x" * 100), Passage("b", "y" * 45), Passage("a", "z" * 33)]
    found = windows(passages, letters, window_tokens=32)
    assert [(one.document, len(one.ids)) for one in found] == [(0, 32), (0, 32), (0, 32), (2, 32), (1, 32)]
    assert all(len(set(one.ids)) == 1 for one in found)


def test_fewer_windows_are_spread_over_all() -> None:
    passages = [Passage("a", chr(65 + number) * 40) for number in range(20)]
    found = windows(passages, letters, most=4)
    assert [chr(one.ids[0]) for one in found] == ["A", "F", "K", "P"]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("words")
    (tmp_path / "many.jsonl").write_text('{"text": "one", "domain": "d"}\n\n{"text": "two"}\n')
    assert read(tmp_path / "plain.txt") == [Passage("plain", "words")]
    assert read(tmp_path / "many.jsonl") == [Passage("d", "one"), Passage("many", "two")]
    (tmp_path / "bad.jsonl").write_text('{"txt": "one"}\n')
    for name in ("bad.jsonl", "absent.txt"):
        with pytest.raises(OptionError, match=name):
            read(tmp_path / name)
    with pytest.raises(OptionError, match="too short"):
        windows([Passage("a", "short")], letters)


def test_the_hash_names_the_text() -> None:
    assert text_hash(bundled()) == text_hash(bundled()) != text_hash(bundled("calibrate"))
