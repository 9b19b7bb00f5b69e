"""`stoker probe [DIR]`: measure this machine for the forecast, once, and keep the result.

Owns what is printed. The measuring is stoker/bench/probe.py, the file's form stoker/plan/profile.py.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.errors import OptionError

if TYPE_CHECKING:
    from stoker.plan.profile import Profile


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("probe")(probe)


def probe(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where models lie, or a store (default: here).")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Default: physical cores.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again although a profile is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure disk, memory and kernels in about half a minute; predict, plan and tune use the result."""
    profile, path = profile_for(directory or Path.cwd(), threads, force=force)
    if as_json:
        print(json.dumps(profile.as_dict(), indent=1))
    else:
        print("\n".join(lines(profile)))
        print(f"kept in {path}")


def profile_for(place: Path, threads: int | None, *, force: bool = False) -> "tuple[Profile, Path]":
    """The kept profile of this machine and the disk under `place`, or a new one; and where it is kept."""
    from stoker.plan import profile as profiles
    from stoker.runtime import budget

    if not place.is_dir():
        raise OptionError("not a directory", where="DIR", got=str(place))
    count = threads or budget.default_threads()
    kept = None if force else profiles.cached(place, count)
    if kept is not None:
        return kept, profiles.cache_path(kept.machine)
    from stoker.bench.probe import measure
    from stoker.cli.common import note

    if not force:
        note("no profile of this machine yet: measuring it once, about half a minute")
    found = measure(place, count, progress=lambda what: note(f"measuring {what} ..."))
    return found, profiles.save(found)


def lines(profile: "Profile") -> list[str]:
    """The profile for people."""
    kernels, waits, costs = profile.kernels, profile.waits, profile.costs
    reads = ", ".join(f"{rate / 1e9:.1f} GB/s with {n}" for n, rate in kernels.read_bytes_s.items())
    return [
        f"{profile.machine['cpu']}, {profile.threads} threads, {kernels.isa}; device {profile.machine['device']}",
        f"memory        {reads} thread{'s' if profile.threads > 1 else ''}",
        f"one token     dense {kernels.matvec_bytes_s / 1e9:.1f} GB/s, experts {kernels.experts_bytes_s / 1e9:.1f}, "
        f"after a wait dense {waits.dense_bytes_s / 1e9:.1f}, an expert alone {waits.alone_bytes_s / 1e9:.1f}",
        f"many tokens   dense {_rates(kernels.dense_macs_s)}; experts {_rates(kernels.expert_macs_s)} GMAC/s by rows",
        f"attention     {kernels.attention_macs_s['decode'] / 1e9:.0f} GMAC/s a token, "
        f"{kernels.attention_macs_s['prefill'] / 1e9:.0f} in a prompt",
        f"fixed costs   step {costs.step_ms:.2f} ms, layer {costs.layer_ms:.3f} ms "
        f"(transformers' own attention {costs.plain_layer_ms:.3f}, not all in memory +{costs.keep_ms:.3f}), "
        f"miss {costs.miss_ms:.3f} ms, wait {costs.wait_ms:.3f} ms, process {costs.process_bytes / 2**20:.0f} MiB",
        f"first use of memory {profile.first_use.alone_bytes_s / 1e9:.2f} GB/s, beside computing "
        f"{profile.first_use.bytes_s / 1e9:.2f}, holding up {profile.first_use.holds:.0%} of it",
        f"reads beside computing at {waits.progress:.0%} of their pace, holding up {waits.holds:.0%} of a prompt's",
        f"disk          {profile.backend}, {'direct' if profile.direct else 'buffered: direct reads are refused'}; "
        f"through the page cache {profile.buffered_bytes_s / 1e9:.2f} GB/s",
        *_disk_table(profile),
        f"measured {profile.measured} in {profile.seconds:.0f} s",
    ]


def _rates(by_rows: dict[int, float]) -> str:
    return ", ".join(f"{rate / 1e9:.0f} at {rows}" for rows, rate in by_rows.items())


def _disk_table(profile: "Profile") -> list[str]:
    """A line a record size: bursts from idle (ms until all are there), then back to back (GB/s)."""
    found = []
    for size in sorted({burst.record_bytes for burst in profile.bursts}):
        bursts = [burst for burst in profile.bursts if burst.record_bytes == size]
        rates = [one for one in profile.sustained if one.record_bytes == size]
        asked = ", ".join(f"{burst.reads}: {burst.last_ms:.2f} ms" for burst in bursts)
        steady = ", ".join(f"{one.depth}: {one.bytes_s / 1e9:.2f} GB/s" for one in rates)
        found.append(f"  {size / 1e6:6.2f} MB    at once {asked};  steady, by depth {steady}")
    return found
