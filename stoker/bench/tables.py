"""Tables that scripts write into pages: what stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""

import re
from pathlib import Path


def put_table(page: Path, name: str, text: str) -> None:
    """Replace the lines between the two marks by `text`. Raises ValueError unless the page has one such place."""
    pattern = rf"(<!-- {re.escape(name)}: [^\n]*-->\n).*?(<!-- end of {re.escape(name)} -->)"
    body = text.strip("\n")
    written, places = re.subn(pattern, lambda marks: f"{marks[1]}{body}\n{marks[2]}", page.read_text(), flags=re.DOTALL)
    if places != 1:
        raise ValueError(f"{page}: expected one place between marks of {name!r}, got {places}")
    page.write_text(written)
