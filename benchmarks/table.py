"""Writes the README's tables of speeds, one for each machine that was measured: `python benchmarks/table.py`.

engine.json is the latest run of `run_all`; a machine whose figures are to stay keeps a copy under a name of its own.
"""

import json
from pathlib import Path
from typing import Any

from stoker.bench.tables import put_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("engine.json", "engine_avx2.json")
ROWS = {
    "stoker 3GiB": "stoker, 3 GiB",
    "stoker 4GiB": "stoker, 4 GiB",
    "stoker again 4GiB": "stoker, 4 GiB, a second prompt",
    "llama.cpp mmap 4GiB": "llama.cpp, mmap, 4 GiB",
    "llama.cpp mmap 4GiB default read-ahead": "llama.cpp, mmap, 4 GiB, the system's read-ahead",
    "stoker 8GiB": "stoker, 8 GiB",
    "llama.cpp mmap 8GiB": "llama.cpp, mmap, 8 GiB",
    "llama.cpp mmap 8GiB default read-ahead": "llama.cpp, mmap, 8 GiB, the system's read-ahead",
    "stoker resident": "stoker, all in memory",
    "stoker resident, 8-bit activations": "stoker, all in memory, 8-bit activations (llama.cpp's precision)",
    "llama.cpp resident, repacked": "llama.cpp, all in memory, repacked",
}


def table(result: dict[str, Any]) -> str:
    origin, device = result["provenance"], result["device_bytes_per_s"]
    rounds = max(cell["decode_tok_s"]["n"] for cell in result["cells"].values())
    rate = " ({min:.2f} to {max:.2f})".format(**{k: device[k] / 1e9 for k in ("min", "max")})
    lines = [
        "",
        f"**{origin['cores']} cores of an {origin['cpu']}, {origin['isa']}.** Device:",
        f"{device['median'] / 1e9:.2f} GB/s{rate} of record-sized reads. Medians of {rounds} rounds, commit",
        f"{origin['commit']}.",
        "",
        "| engine and limit | prefill of 512, tok/s | decode, tok/s | read per token | peak RSS |",
        "|---|---|---|---|---|",
    ]
    for name, label in ROWS.items():
        if (cell := result["cells"].get(name)) is None:
            continue
        lines.append(
            f"| {label} | {cell['prefill_tok_s']['median']:.1f} | {cell['decode_tok_s']['median']:.2f} "
            f"| {cell['decode_bytes_per_token']['median'] / 1e6:.0f} MB "
            f"| {cell['rss_peak_bytes']['median'] / 2**30:.2f} GiB |"
        )
    return "\n".join(lines)


def main() -> None:
    results = [ROOT / "benchmarks/results" / name for name in RESULTS]
    tables = [table(json.loads(path.read_text())) for path in results if path.exists()]
    put_table(ROOT / "README.md", "results", "\n".join(tables))


if __name__ == "__main__":
    main()
