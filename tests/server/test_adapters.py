"""LoRAs by the name of the model: MODEL:NAME takes one, in the same steps as requests that take another or none."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import stoker
from stoker.adapter.lora import LoraPair, write_lora
from stoker.generate.price import price
from stoker.store.reader import open_store
from tests.server.running import Server, http

PROMPT, TOKENS = "The quick brown fox", 10


def some_lora(store: Path, directory: Path, seed: int) -> Path:
    """Random pairs on every attention projection, large enough to change the words."""
    generator, lora = torch.Generator().manual_seed(seed), {}
    for name, tensor in open_store(store).dense.items():
        if "self_attn" in name and name.endswith("_proj.weight"):
            rows, columns = tensor.shape if tensor.spec is None else (tensor.spec.rows, tensor.spec.cols)
            a, b = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
            lora[name.removesuffix(".weight")] = LoraPair(a.bfloat16(), b.bfloat16(), 0.5)
    write_lora(directory, lora)
    return directory


@pytest.fixture(scope="module")
def loras(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("loras")
    return {name: some_lora(tiny_store, base / name, seed) for seed, name in enumerate(("one", "two"), 1)}


@pytest.fixture(scope="module")
def server(tiny_store: Path, loras: dict[str, Path]) -> Iterator[Server]:
    given = [word for name, path in loras.items() for word in ("--lora", f"{name}={path}")]
    path = os.environ.get("PYTHONPATH", "")
    arguments = (tiny_store, "--memory", "1500MiB", "--parallel", 4, "--strict-model", *given)
    with Server(*arguments, **({"PYTHONPATH": path} if path else {})) as running:
        yield running


def ask(server: Server, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    answer = http.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def expected(store: Path, adapter: Path | None) -> str:
    with stoker.load(store, memory="8GiB", adapter=adapter) as model:  # the budget counts the whole test process
        return model.generate(PROMPT, max_tokens=TOKENS, temperature=0).text


def test_a_price_includes_adapters(tiny_store: Path, loras: dict[str, Path]) -> None:
    with_them = price(tiny_store, loras=tuple((name, str(path)) for name, path in loras.items()))
    more = with_them.floor_bytes - price(tiny_store).floor_bytes
    assert more >= sum(file.stat().st_size for path in loras.values() for file in path.glob("*.safetensors")) // 2 > 0


def test_each_request_takes_its_own(server: Server, tiny_store: Path, loras: dict[str, Path]) -> None:
    texts = {"tiny": expected(tiny_store, None)} | {f"tiny:{n}": expected(tiny_store, p) for n, p in loras.items()}
    assert len(set(texts.values())) == 3, "the adapters must change the words, or this shows nothing"
    assert ask(server, "one") == texts["tiny:one"], "the adapter's name alone will do"
    models = ["tiny", "tiny:one", "tiny:two", "tiny:one", "tiny", "tiny:two"]
    with ThreadPoolExecutor(len(models)) as threads:
        for model, text in zip(models, threads.map(lambda name: ask(server, name), models), strict=True):
            assert text == texts[model], model


def test_models_are_listed_and_named(server: Server) -> None:
    listed = {model["id"]: model for model in http.get(f"{server.url}/v1/models").json()["data"]}
    assert set(listed) == {"tiny", "tiny:one", "tiny:two"}
    assert listed["tiny"]["routing"] == {"mode": "exact", "lossless": True} and listed["tiny"]["parent"] is None
    assert listed["tiny:one"]["parent"] == "tiny" and listed["tiny:one"]["routing"]["adapter"]["lora_rank"] == 4
    assert not listed["tiny:one"]["routing"]["lossless"]
    assert http.get(f"{server.url}/v1/models/tiny:two").json()["id"] == "tiny:two"
    body = {"model": "tiny:three", "prompt": PROMPT, "max_tokens": 1}
    assert http.post(f"{server.url}/v1/completions", json=body).status_code == 404
    answer = http.post(f"{server.url}/v1/completions", json=body | {"model": "tiny:one"}).json()
    assert answer["model"] == "tiny:one"
