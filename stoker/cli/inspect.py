"""`stoker inspect PATH`: what a store or a checkpoint is and how large it would be, from headers alone."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stoker.store.describe import Description, Sizes


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A store or a checkpoint directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show layers, experts, record sizes and the least memory, without reading weights."""
    from stoker.store.describe import describe

    description = describe(path)
    if as_json:
        print(json.dumps(description.as_dict(), indent=2))
    else:
        print("\n".join(_lines(description)))


def _lines(d: "Description") -> list[str]:
    lines = [
        f"{d.path}: {d.kind}, {d.model_type}",
        f"  layers        {d.layers}, of which {d.moe_layers} with experts",
        f"  experts       {d.experts_per_layer} a layer, {d.top_k} a token, {d.hidden_size} x {d.expert_width}",
        f"  fingerprint   {d.fingerprint}",
    ]
    for name, sizes in d.sizes.items():
        lines += _size_lines(f"{name} bits" if name.isdigit() else name, sizes)
    lines += [f"  {reason.replace('_', ' ')}: {line}" for reason, found in d.notes.items() for line in found]
    return lines


def _size_lines(name: str, sizes: "Sizes | str") -> list[str]:
    from stoker.store.sizes import show_bytes

    if isinstance(sizes, str):
        return [f"  {name}: not possible", *(f"    {line}" for line in sizes.splitlines())]
    records = ", ".join(f"{size:,}" for size in sizes.record_bytes)
    return [
        f"  {name}: {', '.join(sizes.formats)}",
        f"    total {show_bytes(sizes.total_bytes)}: experts {show_bytes(sizes.expert_bytes)}, "
        f"dense {show_bytes(sizes.dense_bytes)}; records of {records} bytes",
        f"    least memory about {show_bytes(sizes.floor_bytes)}, context not counted",
    ]
