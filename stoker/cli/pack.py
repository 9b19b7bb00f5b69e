"""`stoker pack SRC DST`: turn a published checkpoint into a store. Sizes first, then progress, then a summary."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stoker.store.packplan import PackPlan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("pack")(pack)


def pack(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint: config.json and safetensors.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The store's directory.")],
    bits: Annotated[
        int | None, typer.Option(metavar="4|8|16", help="Bits per weight; 16 keeps bf16 (default: 4).")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="32|64|128", help="Weights that share a scale (default: 64).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the sizes, check the room, write nothing.")] = False,
) -> None:
    """Pack a checkpoint into a store; run again after an interruption, it continues.

    Checkpoints that MLX quantised (4 or 8 bits) are packed byte for byte.
    """
    from stoker.checkpoint.source import open_checkpoint
    from stoker.store.disk import require_room
    from stoker.store.pack import needed_bytes, pack, packed_bytes
    from stoker.store.packplan import PackOptions, plan_pack
    from stoker.store.progress import byte_progress

    plan = plan_pack(open_checkpoint(source), PackOptions(bits, group_size))
    _show_plan(plan, packed_bytes(plan))
    require_room(destination, needed_bytes(plan, destination))
    if dry_run:
        print("dry run: nothing was written")
        return
    with byte_progress("packing", packed_bytes(plan)) as progress:
        manifest = pack(plan, destination, progress)
    print(f"packed {destination}  fingerprint {manifest.fingerprint()[:16]}")
    print(f'next: stoker run {destination} "Hello"')


def _show_plan(plan: "PackPlan", nbytes: int) -> None:
    from stoker.store.describe import sizes_of, top_k_of
    from stoker.store.sizes import show_bytes

    sizes = sizes_of(plan.manifest, top_k_of(plan.checkpoint.config))
    pools = plan.manifest.pools
    records = ", ".join(f"{size:,} bytes" for size in sizes.record_bytes)
    print(f"{plan.manifest.source['name']}  {plan.manifest.source['model_type']}  {', '.join(sizes.formats)}")
    print(
        f"  experts {show_bytes(sizes.expert_bytes)}: {len(pools)} layers of {pools[0].experts}, records of {records}"
    )
    print(f"  dense   {show_bytes(sizes.dense_bytes)}")
    print(f"  total   {show_bytes(nbytes)}, from {show_bytes(plan.checkpoint.nbytes)}")
    for line in plan.manifest.notes["left_out"]:
        print(f"  left out: {line}")
    for name in plan.manifest.notes["kept_bf16"]:
        print(f"  kept as bf16, its columns do not fit the group: {name}")
    sys.stdout.flush()
