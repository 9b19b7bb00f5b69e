"""`stoker verify DIR`: read every byte of a store and compare checksums."""

import time
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(directory: Annotated[Path, typer.Argument(metavar="DIR", help="A store.")]) -> None:
    """Check every record, tensor and file of a store; names the first that is damaged."""
    from stoker.store.progress import byte_progress
    from stoker.store.reader import open_store
    from stoker.store.sizes import show_bytes

    store = open_store(directory)
    start = time.monotonic()
    with byte_progress("verifying", sum(extent.length for _, extent, _ in store.checks())) as progress:
        nbytes = store.verify(progress)
    seconds = max(time.monotonic() - start, 1e-9)
    speed = f"{show_bytes(nbytes)} read in {seconds:.1f} s ({show_bytes(int(nbytes / seconds))}/s)"
    print(f"{directory}: whole; {speed}, fingerprint {store.fingerprint[:16]}")
