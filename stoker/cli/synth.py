"""`stoker synth SHAPE DIR`: a store of a known shape of seeded random weights, to measure speed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.quant.formats import WeightFormat
    from stoker.store.synth_shapes import SynthShape


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("synth")(synth)


def synth(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="qwen3-30b-a3b, qwen3.5-35b-a3b, or either with -mini.")
    ],
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="The store's directory.")] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the same weights as a Q4_0 GGUF too (group size 32).")
    ] = None,
    gguf_only: Annotated[bool, typer.Option("--gguf-only", help="Write the GGUF and no store.")] = False,
    group_size: Annotated[
        int | None, typer.Option(metavar="32|64", help="Weights that share a scale (default: 64, with --gguf 32).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer or more layers than the shape has.")] = None,
) -> None:
    """Write a model of random weights with true shapes: it computes at full speed and says nothing sensible."""
    from stoker.quant.formats import WeightFormat
    from stoker.store.synth_gguf import FORMAT, check_gguf_options
    from stoker.store.synth_shapes import shape as find_shape

    if group_size not in (None, 32, 64):
        raise OptionError("unsupported group size", where="--group-size", expected="32 or 64", got=group_size)
    if gguf_only and (gguf is None or directory is not None):
        raise OptionError("--gguf-only writes no store", where="--gguf-only", expected="--gguf FILE and no DIR")
    if directory is None and not gguf_only:
        raise OptionError("there is no directory to write to", where="DIR")
    model = find_shape(shape, layers)
    wanted = group_size or (32 if gguf is not None else 64)
    fmt = FORMAT if wanted == 32 else WeightFormat("affine", 4, wanted)
    if gguf is not None:
        check_gguf_options(model, fmt)
    if directory is not None:
        _write_store(directory, model, fmt, seed)
    if gguf is not None:
        _write_gguf(gguf, model, seed)


def _write_store(directory: Path, model: "SynthShape", fmt: "WeightFormat", seed: int) -> None:
    from stoker.store.progress import byte_progress
    from stoker.store.sizes import show_bytes
    from stoker.store.synth import RandomWeights, store_bytes, write_store

    total = store_bytes(model, RandomWeights(model, fmt, seed))
    with byte_progress("writing", total) as progress:
        manifest = write_store(directory, model, fmt, seed, progress)
    print(f"wrote {directory}: {fmt.label()}, {show_bytes(total)}, fingerprint {manifest.fingerprint()[:16]}")


def _write_gguf(path: Path, model: "SynthShape", seed: int) -> None:
    from stoker.store.progress import byte_progress
    from stoker.store.sizes import show_bytes
    from stoker.store.synth_gguf import gguf_bytes, write_gguf

    with byte_progress("writing GGUF", gguf_bytes(model)) as progress:
        nbytes = write_gguf(path, model, seed, progress)
    print(f"wrote {path}: Q4_0, {show_bytes(nbytes)}")
