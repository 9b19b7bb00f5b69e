"""`stoker bench` as a command: table, JSON, files, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from stoker.cli.bench import footnotes
from stoker.cli.main import build_app
from stoker.trace.reader import Trace

SMALL = ("--memory", "2GiB", "--prompt", 16, "--decode", 8, "--warmup", 2, "--threads", 1)


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def compared(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "result.json"
    done = bench(store, *SMALL, "--repeats", 2, "--vs-path", "exact", "--out", out)
    assert done.exit_code == 0, done.output
    return {"stdout": done.stdout, "stderr": done.stderr, "result": json.loads(out.read_text())}


def test_a_table_and_a_file(compared: dict[str, Any]) -> None:
    lines = compared["stdout"].splitlines()
    for title in ("prefill tok/s", "decode tok/s", "total s", "stall ms", "peak RSS"):
        assert title in lines[0]
    rows = [line.split()[:4] for line in lines[1:5]]
    assert rows == [["stoker", p, "lru", s] for p in ("auto", "exact") for s in ("cold", "warm")]
    assert "cold by direct reads (verified)" in compared["stdout"] and "device" in compared["stdout"]
    assert "round 2 of 2" in compared["stderr"] and "round" not in lines[0]
    result = compared["result"]
    assert result["kind"] == "stoker-bench" and result["version"] == 1
    for name in ("command", "commit", "cpu", "kernel", "date"):
        assert result["provenance"][name]
    assert result["options"]["prompt"] == 16 and result["model"]["experts"] == 8
    assert result["device_bytes_per_s"]["n"] == 3


def test_json_and_routes(store: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "r.npz", experts=np.stack([[random.permutation(8)[:2] for _ in range(40)] for _ in range(2)]))
    trace = tmp_path / "b.trace"
    arguments = ("--repeats", 1, "--routes", tmp_path / "r.npz", "--route-weights", "uniform", "--trace", trace)
    done = bench(store, *SMALL, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["model"]["routes"]["weights"] == "uniform" and result["provenance"]["commit"]
    assert "repeated" not in "".join(footnotes(result)), "26 tokens of 40"
    longer = {**result["model"], "routes": {**result["model"]["routes"], "repeated": 2.5}}
    assert "its 40 tokens are repeated 2.5 times" in footnotes({**result, "model": longer})[-1]
    recorded = Trace(trace)
    assert recorded.about["experts"] == 8 and recorded.about["bench"] == "stoker auto lru"
    weights = recorded.column("route.weights").reshape(-1, 2)
    assert np.allclose(weights[:, 0], weights[:, 1]) and len(weights) == 2 * (16 + 8 + 16 + 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--route-weights", "own"), "--routes"),
        (("--llama-python", "python3"), "--vs"),
        (("--no-mmap",), "--vs"),
        (("--vs", "vllm=x.gguf"), "llama.cpp=FILE.gguf"),
        (("--vs", f"llama.cpp={__file__}"), "--llama-python"),
        (("--trace", "/no-such-folder/t"), "no-such-folder"),
        (("--out", "/no-such-folder/r.json"), "no-such-folder"),
        (("--path", "exact", "--vs-policy", "lfru"), "no policy to compare"),
        (("--vs", "vllm=x.gguf", "--llama-python", "python3"), "llama.cpp=FILE.gguf"),
        (("--vs", f"llama.cpp={__file__}", "--llama-python", "no-such-python"), "no such interpreter"),
        (("--vs", f"llama.cpp={__file__}", "--llama-python", "python3", "--routes", "r.npz"), "its own experts"),
        (("--vs-path", "fast"), "whole_layer"),
        (("--vs-policy", "lru2"), "s3-fifo"),
        (("--vs-path", "auto"), "twice"),
        (("--routes", "gone.npz"), "gone.npz: no such file"),
        (("--ids", "gone.json"), "--ids"),
        (("--ids", "gone.json", "--prompt", "9"), "how many"),
        (("--prompt", "600"), "--ctx-size"),
        (("--ctx-size", "20", "--prompt", "16", "--decode", "8"), "--ctx-size"),
        (("--trace", "t", "--vs-path", "exact"), "one variant"),
        (("--memory", "lots"), "3GiB"),
        (("--read-ahead", "128"), "--read-ahead: has no effect"),
        (("--routing", "foo"), "--routing: unknown"),
        (("--vs-path", "fast"), "--vs-path"),
        (("--ids", "gone.json"), "--ids: there is no such file"),
    ],
)
def test_refusals_come_before_the_first_round(store: Path, arguments: tuple[str, ...], words: str) -> None:
    done = bench(store, "--memory", "2GiB", *arguments)
    assert done.exit_code == (1 if "gone.npz" in words else 2) and words in done.output, done.output
    assert "round 1" not in done.output and "Traceback" not in done.output


def test_a_missing_store(tmp_path: Path) -> None:
    done = bench(tmp_path / "gone")
    assert done.exit_code == 1 and "no such store" in done.output
