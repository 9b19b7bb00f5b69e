"""Runs as a user starts them: killed and gone on with, by two processes, within their budget, refused with reasons."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.conftest import Packer

TIMEOUT_S = 400


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(file, np.random.default_rng(0).integers(3, 150, 6000))
    return file


def command(stage: str, store: Path, out: Path, text: Path, steps: int, *more: str) -> list[str]:
    shared = ["--sequences", "4", "--sequence-tokens", "24", "--threads", "1", "--memory", "6GiB", "--hold", "memory"]
    where = [str(store), str(out), "--text", str(text)]
    return ["-m", "stoker", "train", stage, *where, "--steps", str(steps), *shared, *more]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
    )


def curve(out: Path, stage: str) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (out / "training" / stage / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def test_a_killed_run_goes_on_to_the_same_curve(packed: Packer, text: Path, tmp_path: Path) -> None:
    store, steps = packed("qwen3_moe", 4), 30
    whole = run(command("heads", store, tmp_path / "whole", text, steps))
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "killed"
    arguments = [sys.executable, *command("heads", store, out, text, steps)]
    started = subprocess.Popen(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    metrics, deadline = out / "training" / "heads" / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 26):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert len(curve(out, "heads")) < steps, "it was to be killed on its way"
    again = run(command("heads", store, out, text, steps))
    assert again.returncode == 0, again.stderr
    assert curve(out, "heads") == curve(tmp_path / "whole", "heads")
    assert (out / "heads.safetensors").read_bytes() == (tmp_path / "whole" / "heads.safetensors").read_bytes()


def test_two_processes_train_as_one(packed: Packer, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    store = packed("qwen3_moe", 4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `accelerate launch --cpu` starts one process unless it has mpirun; torchrun sets what Accelerate reads.
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    launch += ["--master_port", str(port)]
    for stage, more in (
        ("heads", []),
        ("sft", []),
        ("distill", ["--answer-tokens", "8", "--prompt-tokens", "4", "--k", "1"]),
    ):
        one = run(command(stage, store, tmp_path / f"one-{stage}", text, 5, *more))
        assert one.returncode == 0, one.stderr
        two = run([*launch, *command(stage, store, tmp_path / f"two-{stage}", text, 5, *more)], CUDA_VISIBLE_DEVICES="")
        assert two.returncode == 0, two.stderr
        begun = json.loads((tmp_path / f"two-{stage}" / "training" / stage / "run.json").read_text())
        assert begun["processes"] == 2
        ours, theirs = curve(tmp_path / f"two-{stage}", stage), curve(tmp_path / f"one-{stage}", stage)
        assert len(ours) == 5
        assert np.allclose(np.array(ours), np.array(theirs), rtol=2e-4), (stage, ours, theirs)


def test_all_stages_in_one_command(packed: Packer, text: Path, tmp_path: Path) -> None:
    store, out = packed("qwen3_moe", 4), tmp_path / "adapter"
    limits = ["--steps", "3", "--sequences", "4", "--sequence-tokens", "48", "--memory", "6GiB", "--threads", "1"]
    done = run(["-m", "stoker", "train", "all", str(store), str(text), str(out), *limits])
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert [stage["stage"] for stage in manifest["recipe"]["stages"]] == ["heads", "sft", "distill"]
    assert manifest["quality"]["ratio_95"][0] <= manifest["quality"]["ratio"] <= manifest["quality"]["ratio_95"][1]
    assert f"stoker serve {store} --routing prerouter --adapter {out}" in done.stdout


def test_a_streamed_run_keeps_its_budget(packed: Packer, text: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from stoker.runtime.budget import peak_resident_bytes; from stoker.cli.main import build_app\n"
        "try: build_app()(sys.argv[1:])\nexcept SystemExit: print('peak', peak_resident_bytes())"
    )
    arguments = command("sft", packed("qwen3_moe", 4), tmp_path / "out", text, 3)[2:]
    limit = 900 << 20
    arguments[arguments.index("6GiB")], arguments[arguments.index("memory")] = str(limit), "stream"
    done = run(["-c", program, *arguments])
    found = re.search(r"peak (\d+)", done.stdout)
    assert found, done.stderr
    assert int(found.group(1)) <= limit


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--memory", "300MiB"], "budget is too small"),
        (["--k", "99"], "1 to 8"),
        (["--owners", "7"], "owners"),
        (["--loss", "other"], "kl, set"),
        (["--hold", "magic"], "auto, memory, stream"),
        (["--text", "missing.npy"], "missing.npy"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_what_cannot_be_is_refused(more: list[str], said: str, packed: Packer, text: Path, tmp_path: Path) -> None:
    done = run(command("heads", packed("qwen3_moe", 4), tmp_path / "out", text, 2, *more))
    assert done.returncode in (2, 3), (done.returncode, done.stderr)
    assert said in done.stderr and "Traceback" not in done.stderr


def test_an_adapter_brings_its_own_shapes(packed: Packer, text: Path, tmp_path: Path) -> None:
    """What heads and LoRA are is the adapter's: an option that asks for others is refused by its name, not ignored."""
    store, first, second = packed("qwen3_moe", 4), tmp_path / "heads", tmp_path / "sft"
    done = run(command("heads", store, first, text, 2, "--hidden", "32", "--one-ahead", "--owners", "0"))
    assert done.returncode == 0, done.stderr
    done = run(command("sft", store, second, text, 2, "--adapter", str(first), "--rank", "4"))
    assert done.returncode == 0, done.stderr
    asked = [("heads", ["--hidden", "64"], "--hidden: "), ("heads", ["--next-token"], "--next-token, --one-ahead: ")]
    asked += [("heads", ["--owners", "1"], "--owners: "), ("sft", ["--rank", "8"], "--rank: ")]
    asked += [
        ("distill", ["--prompt-tokens", "4", "--alpha", "9"], "--alpha: "),
        ("roster", ["--roster-size", "4"], "--adapter: "),
    ]
    for stage, more, where in asked:
        refused = run(command(stage, store, tmp_path / "no", text, 2, "--adapter", str(second), *more))
        assert refused.returncode == 2 and where in refused.stderr, (stage, more, refused.stderr)
        assert not (tmp_path / "no" / "manifest.json").exists()
    same = ["--hidden", "32", "--one-ahead", "--owners", "0"]
    done = run(command("heads", store, tmp_path / "on", text, 2, "--adapter", str(second), *same))
    assert done.returncode == 0, done.stderr


def test_another_run_in_the_same_directory_is_refused(packed: Packer, text: Path, tmp_path: Path) -> None:
    store, out = packed("qwen3_moe", 4), tmp_path / "out"
    assert run(command("heads", store, out, text, 2)).returncode == 0
    other = run(command("heads", store, out, text, 2, "--seed", "1"))
    assert other.returncode == 2 and "another run" in other.stderr and "seed" in other.stderr


def test_the_report_draws_a_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "loss": 5 - s / 10, "grad_norm": 1.0, "agreement": 0.5, "seconds": 0.1} for s in range(30)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(["-m", "stoker", "report", str(metrics), "--out", str(tmp_path / "page.html")])
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "from 5.0000" in page and page.count("<path") >= 6
    metrics.write_text('{"other": 1}\n')
    wrong = run(["-m", "stoker", "report", str(metrics), "--out", str(tmp_path / "page.html")])
    assert wrong.returncode == 1 and "metrics.jsonl:1" in wrong.stderr
