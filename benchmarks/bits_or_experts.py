"""4 bits streamed, 3 bits resident, or fewer experts a token? Speed on the 30B shape, beside quality on the testbed.

    python benchmarks/bits_or_experts.py STORE [--routes qwen3_general.npz] [--profile FILE] [--measure] [--page]

Models decode and the first token for experts of 4, 3 and 2 bits and 8, 6, 4, 2 experts a token at several budgets, with
recorded routes cut to the gate's first choices. --measure also runs what the engine can run (4 bits, fewer experts by
the config of a linked copy of STORE), each in a memory cgroup (root). --page writes the tables into
docs/bits-or-experts.md, with the testbed's quality.json. Every figure says whether it was measured or modelled.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.bench import worker
from stoker.bench.budgets import Divider
from stoker.bench.confine import run_confined
from stoker.bench.outlook import Assumptions, row
from stoker.bench.provenance import write_result
from stoker.bench.shapes import shape_of
from stoker.cli.probe import profile_for
from stoker.plan.forecast_routing import Replayed
from stoker.plan.profile import Profile, from_dict, load
from stoker.plan.routes import from_array
from stoker.quant.formats import RECORD_ALIGNMENT, ExpertLayout, align
from stoker.store.manifest import NAME as MANIFEST
from stoker.store.manifest import Manifest, read_manifest
from stoker.store.reader import open_store

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "bits_or_experts.json"
GIB = 1 << 30
BITS, EXPERTS_A_TOKEN, BUDGETS_GIB = (4, 3, 2), (8, 6, 4, 2), (4, 8, 12, 16)
MEASURED_K, MEASURED_GIB = (8, 4, 2), (4, 8)
PROMPT, WARM_UP, DECODE = 512, 8, 40


def main() -> None:
    arguments = parse()
    if arguments.store is not None:
        result = study(arguments)
        write_result(arguments.out, result)
    if arguments.page:
        from bits_page import write_page

        write_page(arguments.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = HERE.parents[1] / "shared" / "data"
    traces = Path(os.environ.get("STOKER_TRACES", shared))
    parser.add_argument("store", type=Path, nargs="?", help="a store of the 30B shape; without it only --page")
    parser.add_argument("--routes", type=Path, default=traces / "qwen3_general.npz", help="`experts` [L, T, K]")
    parser.add_argument(
        "--profile",
        type=Path,
        help="of the machine (`stoker probe --json`, or a result that holds one); default: the kept one",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--measure", nargs="*", type=int, metavar="GIB", help=f"also run what can be run (default: {MEASURED_GIB})"
    )
    parser.add_argument("--page", action="store_true", help="write the tables into docs/bits-or-experts.md")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    store = open_store(arguments.store)
    config = json.loads((arguments.store / "config.json").read_text())
    profile = machine(arguments)
    with np.load(arguments.routes) as file:
        experts_LTK = file["experts"]
    rows = [
        modelled(config, in_bits(store.manifest, bits), profile, experts_LTK[:, :, :k], bits, k)
        for bits in BITS
        for k in EXPERTS_A_TOKEN
    ]
    old = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    found = measure_all(arguments, experts_LTK) if arguments.measure is not None else old.get("measured", [])
    return {
        "what": "decode of the 30B shape by bits of the experts and experts a token; dense weights stay at 4 bits",
        "assumed": "an expert of 2 or 3 bits is computed at the byte rate of one of 4 bits: stoker has no such kernel",
        "routes": f"{arguments.routes.name}, the gate's first choices of each token",
        "profile": {"measured": profile.measured, "machine": profile.machine},
        "modelled": [one for found in rows for one in found],
        "measured": found,
    }


def machine(arguments: argparse.Namespace) -> Profile:
    """The named profile, also out of a result that holds one (results/forecast.json); else the kept one."""
    if arguments.profile is None:
        return profile_for(arguments.store, arguments.threads)[0]
    held = json.loads(arguments.profile.read_text()).get("profile")
    return from_dict(held) if held is not None else load(arguments.profile)


# ---- modelled --------------------------------------------------------------------------------------------------------


def in_bits(manifest: Manifest, bits: int) -> Manifest:
    """The same model with experts of `bits` bits: only the records' length differs."""
    return replace(manifest, pools=tuple(replace(p, layout=sized(p.layout, bits)) for p in manifest.pools))


def sized(layout: ExpertLayout, bits: int) -> ExpertLayout:
    """Codes shrink with the bits, scales and biases stay."""
    specs = [placed.spec for placed in (layout.gate, layout.up, layout.down)]
    nbytes = sum(spec.codes_bytes * bits // spec.format.bits + 2 * spec.scales_bytes for spec in specs)
    return replace(layout, record_bytes=align(nbytes, RECORD_ALIGNMENT))


def modelled(
    config: dict[str, Any], manifest: Manifest, profile: Profile, experts_LTK: np.ndarray, bits: int, k: int
) -> list[dict[str, Any]]:
    """One row a budget."""
    shape = shape_of(config, manifest, "30B", top_k=k)
    divider = Divider(config, manifest, shape, profile.costs.process_bytes, 4096)
    routing = Replayed(from_array(experts_LTK, n_experts=shape.experts), "replayed")
    assumed = Assumptions(routing, routing, routing, prompt_tokens=PROMPT)
    found = []
    for gib in BUDGETS_GIB:
        one = row(shape, profile, divider, gib * GIB, assumed)
        facts: dict[str, Any] = {
            "bits": bits,
            "experts_a_token": k,
            "budget_gib": gib,
            "record_bytes": shape.record_bytes,
        }
        if one.ledger is None or one.token is None or one.prompt is None:
            found.append(facts | {"refused": one.refused})
            continue
        facts |= {"resident_share": one.ledger.resident_share, "hit_rate": one.token.hit_rate}
        facts |= {"decode_tok_s": one.token.tokens_s, "band_tok_s": [one.low_tokens_s, one.high_tokens_s]}
        facts |= {"read_bytes_per_token": one.token.read_bytes, "stall_ms_per_token": one.token.stall_ms}
        found.append(facts | {"first_token_s": one.prompt.total_s})
    return found


# ---- measured --------------------------------------------------------------------------------------------------------


def measure_all(arguments: argparse.Namespace, experts_LTK: np.ndarray) -> list[dict[str, Any]]:
    """Every k at a budget before the next budget, so that drift between them falls on all alike."""
    found = []
    for gib in arguments.measure or MEASURED_GIB:
        for k in MEASURED_K:
            one = {"load_average_before": os.getloadavg()[0]} | measure(
                arguments, experts_LTK[:, : PROMPT + WARM_UP + DECODE, :k], gib, k
            )
            found.append({"bits": 4, "experts_a_token": k, "budget_gib": gib} | one)
            print(f"{gib} GiB, {k} experts a token: {one['decode_tok_s']:.2f} tok/s", file=sys.stderr, flush=True)
    return found


def measure(arguments: argparse.Namespace, experts_LTK: np.ndarray, gib: int, k: int) -> dict[str, Any]:
    """One cold run in a process and a cgroup of its own, along the recorded routes."""
    with tempfile.TemporaryDirectory(prefix="stoker-bits-") as folder:
        place = Path(folder)
        np.savez(place / "routes.npz", experts=experts_LTK)
        generator, vocabulary = random.Random(20261130), open_config(arguments.store)["vocab_size"]
        ids = [generator.randrange(vocabulary) for _ in range(PROMPT + WARM_UP + DECODE)]
        (place / "ids.json").write_text(json.dumps({"prompt": ids[:PROMPT], "decode": ids[PROMPT:]}))
        with fewer_experts(arguments.store, k) as store:
            words = [sys.executable, worker.__file__, "stoker", str(store), "--ids", str(place / "ids.json")]
            words += ["--routes", str(place / "routes.npz"), "--memory", f"{gib}GiB", "--warmup", str(WARM_UP)]
            run = run_confined([*words, "--threads", str(arguments.threads)], gib * GIB)
    names = ("decode_tok_s", "hit_rate", "stall_ms_per_token", "prefill_tok_s", "cgroup_peak_bytes", "dropped_experts")
    figures = {name: run[name] for name in names}
    return figures | {"first_token_s": run["prefill_s"], "read_bytes_per_token": run["decode_bytes_per_token"]}


@contextmanager
def fewer_experts(store: Path, k: int) -> Iterator[Path]:
    """A copy of a store by links, whose config says `k` experts a token; its manifest goes with the config."""
    with tempfile.TemporaryDirectory(prefix="stoker-k-") as folder:
        place = Path(folder)
        for file in store.iterdir():
            if file.name not in ("config.json", MANIFEST):
                (place / file.name).symlink_to(file.resolve())
        config = json.dumps(open_config(store) | {"num_experts_per_tok": k}).encode()
        manifest = read_manifest(store)
        sums = {**manifest.side_files, "config.json": f"{zlib.crc32(config):08x}"}
        (place / "config.json").write_bytes(config)
        (place / MANIFEST).write_text(replace(manifest, side_files=sums).dumps())
        yield place


def open_config(store: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((store / "config.json").read_text())
    return config


if __name__ == "__main__":
    main()
