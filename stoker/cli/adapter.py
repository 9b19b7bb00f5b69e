"""`stoker adapter init|inspect`: adapters that nobody has trained yet, and what an adapter is."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.adapter.manifest import Manifest


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Adapters: prerouter heads and LoRA beside a store.", no_args_is_help=True)
    group.command("init")(init)
    group.command("inspect")(inspect)
    app.add_typer(group, name="adapter")


def init(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A packed store (see `stoker pack`).")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the adapter.")],
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Experts a token uses (default: the model's own number).")
    ] = None,
    owners: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="Layers that predict the next one: 3-10,12 (default: all that can)."),
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Width of a head's inner layer.")] = 512,
    random: Annotated[
        bool, typer.Option("--random", help="Random heads, to measure speed: routes that mean nothing.")
    ] = False,
    next_token: Annotated[
        bool, typer.Option("--next-token/--one-ahead", help="Heads also see the token that the route is for, or not.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random parts.")] = 0,
) -> None:
    """Make prerouter heads that nobody has trained: they apply the next layer's gate one token early."""
    if directory.exists() and any(directory.iterdir()):
        raise OptionError("the directory is not empty", where=str(directory), remedy="name a new one")
    from stoker.adapter.init import init_adapter
    from stoker.store.reader import open_store

    adapter = init_adapter(
        open_store(store), directory, top_k=k, owners=layers_of(owners), hidden=hidden, random=random,
        next_token=next_token, seed=seed,
    )  # fmt: skip
    print("\n".join(_lines(directory, adapter.manifest)))


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An adapter in stoker's format.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as one JSON object.")] = False,
) -> None:
    """Show what an adapter holds, for which store it was made, how, and what was measured."""
    from stoker.adapter.manifest import read_manifest

    manifest = read_manifest(directory)
    print(json.dumps(manifest.as_dict(), indent=2) if as_json else "\n".join(_lines(directory, manifest)))


def layers_of(text: str | None) -> list[int] | None:
    """3-10,12 as numbers. Raises OptionError."""
    if text is None:
        return None
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        raise OptionError("not layers", where="--owners", expected="numbers and ranges: 3-10,12", got=text) from None
    return sorted(set(found))


def _lines(directory: Path, m: "Manifest") -> list[str]:
    lines = [f"{directory}: for {m.model} (fingerprint {m.base}), {m.top_k} experts a token"]
    if m.heads is not None:
        owners = m.heads.owners
        lines.append(
            f"  heads     {len(owners)}, layers {owners[0]} to {owners[-1]} predict the next; "
            f"{m.heads.width}{' x 2' if m.heads.next_scale else ''} + 2 x {m.heads.experts} -> {m.heads.hidden} -> "
            f"{m.heads.experts}{', the token that the route is for seen' if m.heads.next_scale else ''}"
        )
    if m.lora is not None:
        lines.append(f"  LoRA      rank {m.lora.rank}, scale {m.lora.scale:g}, {len(m.lora.targets)} linears")
    if m.roster is not None:
        lines.append(f"  roster    {_flat(m.roster)}")
    lines.append(f"  recipe    {_flat(m.recipe) or 'not told'}")
    lines += [f"  data      {name} {digest}" for name, digest in m.data.items()]
    lines.append(f"  measured  {_flat(m.quality) or 'nothing'}")
    return lines


def _flat(data: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items())
