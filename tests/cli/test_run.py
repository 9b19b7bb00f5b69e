"""`stoker run` on a real store: what goes where, endings, refusals."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import stoker as stoker_package
from stoker.cli.main import build_app
from tests.cli.conftest import ENVIRONMENT, stoker, stoker_command

PROMPT = "What is the capital of France?"
BUDGET = ("--memory", "2GiB")


def run(*arguments: object, stdin: str = "") -> Result:
    """`stoker run` inside this process: the same code but for the interpreter's start."""
    return CliRunner().invoke(build_app(), ["run", *map(str, arguments)], input=stdin)


@pytest.fixture(scope="module")
def expected(store: Path) -> dict[str, str]:
    """What the Python door says to the same prompts."""
    with stoker_package.load(store, memory="8GiB") as model:
        chat = model.generate([{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0.0)
        system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
        return {
            "chat": chat.text,
            "raw": model.generate(PROMPT, max_tokens=24).text,
            "system": model.generate(system, max_tokens=24).text,
            "sampled": model.generate(PROMPT, max_tokens=24, temperature=0.9, top_k=30, min_p=0.01, seed=5).text,
        }


def test_text_to_stdout_the_rest_to_stderr(store: Path, expected: dict[str, str]) -> None:
    done = run(store, PROMPT, "-n", 24, *BUDGET)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected["chat"] + "\n"
    for word in ("KV cache", "budget", "expert slots", "path auto"):
        assert word in done.stderr
    for word in ("TTFT", "tok/s", "hits", "MB/token", "stall", "length"):
        assert word in done.stderr.splitlines()[-1]
    assert done.stderr.strip().splitlines()[-1].startswith("prompt ")


def test_json_is_one_object(store: Path, expected: dict[str, str]) -> None:
    done = run(store, PROMPT, "-n", 24, "--json", "--path", "exact", *BUDGET)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["text"] == expected["chat"], "the path never changes the output"
    assert report["usage"]["completion_tokens"] == len(report["token_ids"]) == 24
    assert report["finish_reason"] == "length" and report["timings"]["ttft_ms"] > 0
    assert report["ledger"]["budget_bytes"] == 2 << 30 and report["options"]["path"] == "exact"
    decode = report["stats"]["decode"]
    assert decode["hits"] + decode["misses"] > 0 and decode["dropped_experts"] == 0
    assert report["stats"]["total"]["demand_bytes"] > 0


def test_raw_system_sampling_and_pipe(store: Path, expected: dict[str, str]) -> None:
    raw = run(store, "-", "--raw", "-n", 24, *BUDGET, stdin=PROMPT)
    assert raw.stdout == expected["raw"] + "\n", raw.stderr
    system = run(store, "--system", "Be brief.", "-n", 24, *BUDGET, stdin=PROMPT)
    assert system.stdout == expected["system"] + "\n", system.stderr
    flags = ("--temperature", 0.9, "--top-k", 30, "--min-p", 0.01, "--seed", 5)
    sampled = run(store, PROMPT, "--raw", "-n", 24, *flags, *BUDGET)
    assert sampled.stdout == expected["sampled"] + "\n", sampled.stderr


def test_stop_and_trace(store: Path, expected: dict[str, str], tmp_path: Path) -> None:
    stop = expected["raw"][5:9]
    trace = tmp_path / "run.trace"
    done = run(store, PROMPT, "--raw", "-n", 24, "--stop", stop, "--stop", "zzz", "--trace", trace, *BUDGET)
    assert done.stdout == expected["raw"][: expected["raw"].index(stop)] + "\n", done.stderr
    assert done.stderr.strip().endswith("stop")
    summary = CliRunner().invoke(build_app(), ["trace", "summary", str(trace), "--json"])
    assert summary.exit_code == 0 and json.loads(summary.stdout), summary.stderr


def test_without_a_template(plain_store: Path) -> None:
    done = run(plain_store, PROMPT, "-n", 8, *BUDGET)
    assert done.exit_code == 0 and len(done.stdout) > 1, done.stderr
    for extra in (("--chat",), ("--system", "x")):
        refused = run(plain_store, PROMPT, *extra, *BUDGET)
        assert refused.exit_code == 2 and "no chat template" in refused.stderr and refused.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--memory", "64MiB"), 3, "--memory"),
        (("--memory", "lots"), 2, "3GiB"),
        (("--path", "fast"), 2, "whole_layer"),
        (("--policy", "lru2"), 2, "lru"),
        (("--ctx-size", "100000000"), 2, "ctx-size"),
        (("-n", "600"), 2, "context is too long"),
    ],
)
def test_refusals_come_before_heavy_work(store: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    done = run(store, PROMPT, "--memory", "2GiB", *arguments)
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert word in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--top-p", "0.5", "--temperature", "0"), "top_p does nothing"),
        (("--top-p", "1.5"), "--top-p"),
        (("--system", "x", "--raw"), "--system"),
        (("--max-tokens", "0"), "max-tokens"),
        (("--threads", "0"), "threads"),
    ],
)
def test_wrong_options_need_no_model(arguments: tuple[str, ...], word: str) -> None:
    done = CliRunner().invoke(build_app(), ["run", "no-such-model", "x", *arguments])
    assert done.exit_code == 2 and word in done.output


def test_what_people_meet_in_a_shell(store: Path, expected: dict[str, str]) -> None:
    """One run in a process of its own, with both streams as they are."""
    done = stoker("run", store, PROMPT, "-n", 24, *BUDGET)
    assert (done.returncode, done.stdout) == (0, expected["chat"] + "\n"), done.stderr
    first, last = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert first.startswith("interpreter and libraries") and last.startswith("prompt ")


def test_an_empty_prompt(store: Path) -> None:
    done = run(store, "--raw", *BUDGET, stdin="")
    assert done.exit_code == 2 and "prompt is empty" in done.stderr


def test_interrupt_ends_the_answer_with_its_line(store: Path) -> None:
    process = subprocess.Popen(
        stoker_command("run", store, PROMPT, "--raw", *BUDGET),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    assert err.strip().endswith("cancelled") and "Traceback" not in err
    assert out.endswith("\n")


def test_a_reader_that_leaves_is_no_accident(store: Path) -> None:
    process = subprocess.Popen(
        stoker_command("run", store, PROMPT, "--raw", *BUDGET),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=180) == 141
    assert process.stderr is not None
    err = process.stderr.read().decode()
    assert "Traceback" not in err and "Exception ignored" not in err and "BrokenPipe" not in err
