"""`stoker predict` on a store, a checkpoint, a GGUF and a Hub id: sizes agree with packing, no weights are fetched.

The Hub is a local server with range requests, reached through HF_ENDPOINT like any mirror.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.bench.budgets import Divider
from stoker.bench.shapes import shape_of
from stoker.checkpoint.gguf_header import read_gguf_file
from stoker.checkpoint.remote import hub_name
from stoker.errors import BudgetError, CheckpointError
from stoker.plan import profile as profiles
from stoker.store.describe import describe
from stoker.store.headers import open_headers
from tests.cli.conftest import stoker
from tests.generate.stores import pack, write_checkpoint
from tests.plan.machines import machine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("predict") / "checkpoint")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profiles.save(machine(), tmp_path_factory.mktemp("profile") / "profile.json")


@dataclass
class Hub:
    """One repository, `example/model`, from a directory. `ranges`: whether range requests are answered."""

    directory: Path
    ranges: bool = True
    sent_bytes: int = 0
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    served = Hub(checkpoint)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            prefix = "/example/model/resolve/main/"
            path = served.directory / self.path.removeprefix(prefix)
            if not self.path.startswith(prefix) or not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if self.path.startswith(prefix) else "RepoNotFound")
                self.end_headers()
                return
            body, wanted = path.read_bytes(), self.headers.get("Range")
            if wanted and served.ranges:
                first, last = wanted.removeprefix("bytes=").split("-")
                part = body[int(first) : int(last) + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}")
            else:
                part = body
                self.send_response(200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            served.sent_bytes += len(part)
            self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()


def predicted(model: object, profile: Path, *options: object, **environment: str) -> dict[str, Any]:
    done = stoker("predict", model, "--profile", profile, "--json", *options, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_sizes_before_packing_are_those_after(checkpoint: Path, profile: Path, tmp_path: Path) -> None:
    before = predicted(checkpoint, profile, "--memory", "1GiB")
    for bits in ("4", "8"):
        store = pack(checkpoint, tmp_path / bits, "--bits", bits, "--group-size", 32)
        after = predicted(store, profile, "--memory", "1GiB")["formats"]["as stored"]
        sized = before["formats"][bits]
        assert sized["record_bytes"] == after["record_bytes"] and sized["floor_bytes"] == after["floor_bytes"]
        assert sized["dense_bytes"] == after["dense_bytes"]
        assert sized["rows"] == after["rows"], "the same model, the same forecast"
    assert before["formats"]["8"]["disk_bytes"] > 1.5 * before["formats"]["4"]["disk_bytes"]


def test_the_hub_is_asked_for_headers_alone(hub: Hub, profile: Path, checkpoint: Path, tmp_path: Path) -> None:
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    remote = predicted("example/model", profile, "--memory", "1GiB", **home)
    local = predicted(checkpoint, profile, "--memory", "1GiB")
    assert remote["formats"] == local["formats"] and remote["kind"] == local["kind"]
    assert remote["fetched_bytes"] == hub.sent_bytes, "what it says it fetched is what was sent"
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert remote["published_bytes"] == weights
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is downloaded"


def test_a_long_header_takes_a_second_request(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from stoker.checkpoint import remote

    point_at(hub, monkeypatch, tmp_path)
    monkeypatch.setattr(remote, "FIRST_BYTES", 64)
    found = open_headers("example/model")
    assert {"4", "8"} <= set(found.manifests)
    assert sum("safetensors" in path and "index" not in path for path in hub.asked) >= 3


def test_a_server_without_ranges_is_refused_and_not_read(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    point_at(hub, monkeypatch, tmp_path)
    hub.ranges = False
    with pytest.raises(CheckpointError, match="range requests"):
        open_headers("example/model")


def test_a_model_that_is_not_there(hub: Hub, profile: Path, tmp_path: Path) -> None:
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = stoker("predict", "example/nothing", "--profile", profile, **home)
    assert done.returncode == 1 and "no such model" in done.stderr and "Traceback" not in done.stderr


def test_offline_says_so_and_asks_nobody(hub: Hub, profile: Path, tmp_path: Path) -> None:
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = stoker("predict", "example/model", "--profile", profile, **home)
    assert done.returncode == 1 and "HF_HUB_OFFLINE" in done.stderr and not hub.asked


def test_an_unreachable_hub_is_one_error(profile: Path, tmp_path: Path) -> None:
    home = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = stoker("predict", "example/model", "--profile", profile, **home)
    assert done.returncode == 1 and "cannot be reached" in done.stderr and "Traceback" not in done.stderr


def point_at(hub: Hub, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """This process's huggingface_hub, which read its settings when it was imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model as a store (group 32) and as a GGUF."""
    base = tmp_path_factory.mktemp("twins")
    done = stoker("synth", "qwen3-30b-a3b-mini", base / "store", "--gguf", base / "model.gguf")
    assert done.returncode == 0, done.stderr
    return base / "store", base / "model.gguf"


def test_a_gguf_has_the_shape_of_the_store(twins: tuple[Path, Path], profile: Path) -> None:
    store, gguf = twins
    whole = describe(store)
    header = read_gguf_file(gguf)
    assert header.metadata["general.architecture"] == "qwen3moe"
    found = open_headers(str(gguf))
    assert found.kind == "gguf" and found.published_bytes == gguf.stat().st_size
    pools = found.manifests["4"].pools
    assert len(pools) == whole.moe_layers and pools[0].experts == whole.experts_per_layer
    spec = pools[0].layout.gate.spec
    assert (spec.rows, spec.cols) == (whole.expert_width, whole.hidden_size)
    assert predicted(gguf, profile)["formats"]["4"]["rows"]


def test_a_gguf_on_the_hub_is_read_as_far_as_its_header(
    twins: tuple[Path, Path], hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from stoker.checkpoint import gguf_header

    hub.directory = twins[1].parent
    point_at(hub, monkeypatch, tmp_path)
    monkeypatch.setattr(gguf_header, "PIECE_BYTES", 4096)
    found = open_headers("example/model/model.gguf")
    assert found.manifests.keys() == open_headers(str(twins[1])).manifests.keys()
    assert found.fetched_bytes == hub.sent_bytes < twins[1].stat().st_size / 2


@pytest.mark.parametrize("cut", [3, 20, 200, 2000])
def test_a_gguf_that_is_cut_short_is_named(twins: tuple[Path, Path], tmp_path: Path, cut: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(twins[1].read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"cut short|GGUF"):
        open_headers(str(path))


def test_names() -> None:
    name = hub_name("Qwen/Qwen3-30B-A3B@refs/pr/1")
    assert name is not None and (name.repo, name.file, name.revision) == ("Qwen/Qwen3-30B-A3B", None, "refs/pr/1")
    name = hub_name("someone/model-GGUF/Q4_0/model.gguf")
    assert name is not None and (name.repo, name.file) == ("someone/model-GGUF", "Q4_0/model.gguf")
    assert hub_name("no-slash") is None and hub_name("/absolute/path") is None


def test_the_printed_forecast_says_what_it_assumes(twins: tuple[Path, Path], profile: Path) -> None:
    done = stoker("predict", twins[0], "--profile", profile, "--memory", "1GiB", "--memory", "1MiB", "--simple")
    assert done.returncode == 0, done.stderr
    for told in ("assumed:", "band:", "floor", "tok/s", "too small", "it runs", "the trap"):
        assert told in done.stdout, told
    wrong = stoker("predict", twins[0], "--profile", profile, "--routing", "nonsense")
    assert wrong.returncode == 2 and "uniform" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "foo"), "--policy: unknown policy"),
        (("--policy", "min"), "`stoker simulate` replays it"),
        (("--policy", "lru:4"), "--policy: an argument"),
        (("--policy", "foo", "--routing", "uniform"), "--policy: unknown policy"),
        (("--ctx-size", "10000000"), "--ctx-size: longer"),
        (("--routing", "synthetic:general:600"), "--routing synthetic:general:600: routes of another"),
    ],
)
def test_what_does_not_fit_is_named(
    twins: tuple[Path, Path], checkpoint: Path, profile: Path, arguments: tuple[str, ...], told: str
) -> None:
    model = checkpoint if "synthetic:general:600" in arguments else twins[0]
    done = stoker("predict", model, "--profile", profile, *arguments)
    assert done.returncode == 2 and told in done.stderr, done.stderr


def test_the_budget_that_is_named_leaves_the_process_room(twins: tuple[Path, Path]) -> None:
    """A run whose process starts 30 MiB larger than the probe's still fits the floor that predict names."""
    headers = open_headers(str(twins[0]))
    (manifest,) = headers.manifests.values()
    shape = shape_of(headers.config, manifest, "model")
    named = Divider(headers.config, manifest, shape, 400 << 20, 512)
    larger = Divider(headers.config, manifest, shape, 430 << 20, 512)
    assert larger.divide(named.floor_bytes) and larger.divide(named.ladder()[0])
    with pytest.raises(BudgetError) as refused:
        named.divide(named.floor_bytes - (40 << 20))
    assert "libraries 432 MiB" in str(refused.value), "the refusal names what surely works"


def test_rows_beyond_this_machine_are_marked(twins: tuple[Path, Path], profile: Path) -> None:
    done = stoker(
        "predict", twins[0], "--profile", profile, "--memory", "2GiB", "--memory", "auto", "--memory", "24GiB"
    )
    assert done.returncode == 0 and done.stdout.count("more than this machine's 16.0 GiB") >= 1
    assert "of this machine's 16.0 GiB" in done.stdout.splitlines()[-1]
