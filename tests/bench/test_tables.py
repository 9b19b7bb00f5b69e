"""A table goes between its marks and leaves the rest of the page alone."""

from pathlib import Path

import pytest

from stoker.bench.tables import put_table


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    around = "a\n<!-- one: by x.py -->\n{}<!-- end of one -->\nb\n<!-- two: by y -->\n{}<!-- end of two -->\n"
    page.write_text(around.format("old\n", ""))
    put_table(page, "one", "\n| 1 \\1 |\n| 2 |\n")
    put_table(page, "two", "new")
    wanted = around.format("| 1 \\1 |\n| 2 |\n", "new\n")
    assert page.read_text() == wanted
    put_table(page, "two", "new")
    assert page.read_text() == wanted


@pytest.mark.parametrize("text", ["nothing", "<!-- one: x -->\nno end", "<!-- one: x -->\n<!-- end of one -->\n" * 2])
def test_a_page_without_one_such_place_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="'one'"):
        put_table(page, "one", "table")
    assert page.read_text() == text
