"""`stoker cache list DIR`, `stoker cache clear DIR`: what a prefix cache holds on disk, and removing it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.generate.prefix.segments import Segment

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of `stoker serve --prefix-cache DIR`.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Show or remove what a prefix cache holds on disk.")
    group.command("list")(list_)
    group.command("clear")(clear)
    app.add_typer(group, name="cache")


def list_(directory: Directory) -> None:
    """Show what is kept of each model, read from the headers alone; a server may be using it."""
    from stoker.store.sizes import show_bytes

    found, damaged = _segments(directory)
    by_model: dict[bytes, list[Segment]] = {}
    for segment in found:
        by_model.setdefault(segment.fingerprint, []).append(segment)
    for fingerprint, segments in sorted(by_model.items(), key=lambda item: -max(one.used_ns for one in item[1])):
        tokens = sum(segment.tokens for segment in segments)
        age_s = time.time() - max(segment.used_ns for segment in segments) / 1e9
        size = show_bytes(sum(segment.nbytes for segment in segments))
        print(f"{fingerprint.hex()[:16]}  {size:>10}  {tokens:>9} tokens  {len(segments):>5} files  {_ago(age_s)}")
    total = show_bytes(sum(segment.nbytes for segment in found))
    models = _count(len(by_model), "model")
    print(f"{directory}: {total} of {models}" + (f"; {_count(damaged, 'damaged file')}" if damaged else ""))


def clear(directory: Directory) -> None:
    """Remove everything that is kept; refused while a server uses the directory."""
    from stoker.generate.prefix.disk import SUFFIX, remove_all
    from stoker.store.sizes import show_bytes

    _check(directory)
    nbytes = sum(file.stat().st_size for file in directory.glob(f"*{SUFFIX}"))
    print(f"{directory}: {_count(remove_all(directory), 'file')} removed, {show_bytes(nbytes)}")


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise OptionError("there is no such directory", where=str(directory))


def _segments(directory: Path) -> "tuple[list[Segment], int]":
    """Those that are whole, and how many are not."""
    from stoker.generate.prefix.segments import SUFFIX, Damaged, read_segment

    _check(directory)
    found, damaged = [], 0
    for file in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            found.append(read_segment(file))
        except FileNotFoundError:
            continue  # a server has just removed it
        except Damaged:
            damaged += 1
    return found, damaged


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _ago(seconds: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"used {count} {unit}{'s' if count > 1 else ''} ago"
    return "used just now"
