"""The official openai SDK against a real server on the demo model: every field's effect, every refusal's shape."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import stoker
from tests.server.running import Server, http

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BUDGET = "1500MiB"


@pytest.fixture(scope="module")
def server(demo_store: Path) -> Iterator[Server]:
    with Server(demo_store, "--memory", BUDGET, "--parallel", 2, "--queue", 6, "--alias", "demo") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="not needed", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo_store: Path) -> dict[str, Any]:
    """What the Python door (and so `stoker run`) says."""
    with stoker.load(demo_store, memory="8GiB") as model:
        sampling: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11}
        greedy = model.generate(QUESTION, max_tokens=24)
        return {
            "greedy": greedy,
            "sampled": model.generate(QUESTION, max_tokens=24, **sampling),
            "sampled+1": model.generate(QUESTION, max_tokens=24, **sampling | {"seed": 12}),
            "penalised": model.generate(QUESTION, max_tokens=24, presence_penalty=1.5, frequency_penalty=0.5),
            "raw": model.generate("The capital of France is", max_tokens=16),
            "ids": model.encode("The capital of France is"),
            "biased": model.generate(QUESTION, max_tokens=8, logit_bias={greedy.token_ids[0]: -100.0}),
        }


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=QUESTION, **{"max_tokens": 24} | more)  # type: ignore


def test_models(client: openai.OpenAI, demo_store: Path) -> None:
    (model,) = client.models.list().data
    about: Any = model
    assert model.id == demo_store.name and model.object == "model" and model.owned_by == "stoker"
    assert about.context_length == 4096 and about.routing == {"mode": "exact", "lossless": True}
    assert about.formats == ["affine-4 g32 f16"] and about.state == "loaded" and about.aliases == ["demo"]
    assert client.models.retrieve("demo").id == model.id
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("../../etc/passwd")
    assert error.value.code == "model_not_found"


def test_equals_a_run(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    greedy = chat(client)
    assert greedy.choices[0].message.content == expected["greedy"].text
    assert greedy.choices[0].finish_reason == expected["greedy"].finish_reason
    assert greedy.usage.prompt_tokens == expected["greedy"].usage.prompt_tokens
    assert greedy.usage.completion_tokens == expected["greedy"].usage.completion_tokens
    assert greedy.usage.total_tokens == greedy.usage.prompt_tokens + greedy.usage.completion_tokens
    assert greedy.usage.completion_tokens_details.reasoning_tokens == 0
    assert greedy.system_fingerprint.startswith("fp_") and greedy.object == "chat.completion"
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "extra_body": {"top_k": 40, "min_p": 0.01}}
    sampled = chat(client, **sampling)
    assert sampled.choices[0].message.content == expected["sampled"].text != expected["greedy"].text
    assert chat(client, presence_penalty=1.5, frequency_penalty=0.5).choices[0].message.content == (
        expected["penalised"].text
    )
    first = str(expected["greedy"].token_ids[0])
    assert chat(client, logit_bias={first: -100}, max_tokens=8).choices[0].message.content == expected["biased"].text
    # Agents send both; the most likely token survives every filter.
    cold = chat(client, temperature=0, top_p=0.5)
    assert cold.choices[0].message.content == expected["greedy"].text


def test_n_choices(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "extra_body": {"top_k": 40, "min_p": 0.01}}
    answer = chat(client, n=2, **sampling)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [expected["sampled"].text, expected["sampled+1"].text], "seeds count up from the one that is given"
    assert answer.usage.prompt_tokens == expected["greedy"].usage.prompt_tokens, "a prompt counts once"
    streamed = ["", ""]
    for chunk in chat(client, n=2, stream=True, **sampling):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_streaming(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    options = {"include_usage": True, "include_progress": True}
    chunks = list(chat(client, stream=True, stream_options=options))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected["greedy"].text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == expected["greedy"].finish_reason and set(reasons[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected["greedy"].token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    progress = [chunk.progress for chunk in chunks if getattr(chunk, "progress", None)]
    prompt_tokens = expected["greedy"].usage.prompt_tokens
    assert progress and progress[-1]["done"] == progress[-1]["total"] == prompt_tokens
    plain = list(chat(client, stream=True))
    assert not any(getattr(chunk, "progress", None) or not chunk.choices for chunk in plain)


def test_ends(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    text = expected["greedy"].text
    stop = text[8:13]
    stopped = chat(client, stop=["zzzz", stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)] and stopped.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(client, stop=stop, stream=True)]
    assert "".join(pieces) == text[: text.index(stop)]
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3, "the smaller bound holds"
    whole = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Say yes."}], max_tokens=200
    )
    assert whole.choices[0].finish_reason == "stop" and whole.usage is not None
    assert whole.usage.completion_tokens < 200


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=8).choices[0]
    entries = answer.logprobs.content
    assert "".join(entry.token for entry in entries) == answer.message.content and len(entries) >= 7
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token and entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the most likely"
    chunks = [c for c in chat(client, logprobs=True, max_tokens=8, stream=True) if c.choices[0].logprobs]
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in entries]
    assert chat(client, max_tokens=2).choices[0].logprobs is None


def test_half_characters_have_bytes(client: openai.OpenAI, server: Server) -> None:
    """Text whose tokens are parts of characters: their bytes together are the text."""
    text = "🧑‍🚀 ᚠᛇᚻ"
    pieces = http.post(f"{server.url}/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    ids = [piece["id"] for piece in pieces]
    assert any("�" in piece["piece"] for piece in pieces)
    biases = {str(token): 100 for token in ids}
    answer: Any = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=12, logprobs=True, logit_bias=biases
    )  # fmt: skip
    told = b"".join(bytes(entry.bytes) for entry in answer.choices[0].logprobs.content)
    assert told.decode(errors="replace") == answer.choices[0].message.content


def test_completions(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    prompt, text = "The capital of France is", expected["raw"].text
    one = client.completions.create(model="demo", prompt=prompt)
    assert one.choices[0].text == text and one.usage is not None and one.usage.completion_tokens == 16
    assert one.choices[0].finish_reason == "length" and one.object == "text_completion"
    many = client.completions.create(model="demo", prompt=[prompt, prompt], n=2, max_tokens=4, echo=True)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert all(text.startswith(choice.text.removeprefix(prompt)) for choice in many.choices)
    assert all(choice.text.startswith(prompt) for choice in many.choices)
    assert many.usage is not None and many.usage.prompt_tokens == 2 * len(expected["ids"])
    assert client.completions.create(model="demo", prompt=expected["ids"]).choices[0].text == text
    assert client.completions.create(model="demo", prompt=[expected["ids"]]).choices[0].text == text
    with client.completions.create(model="demo", prompt=prompt, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == text
    logprobs = client.completions.create(model="demo", prompt=prompt, logprobs=2, max_tokens=5).choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert text.startswith("".join(logprobs.tokens)) and len(logprobs.top_logprobs or []) == 5
    assert [text[at : at + len(token)] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_refused_completions(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", **fields)
    assert error.value.param == param and error.value.type == "invalid_request_error" and error.value.code


def test_a_context_that_is_too_long_says_both_numbers(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.completions.create(model="demo", prompt=[1] * 5000),
        lambda: client.completions.create(model="demo", prompt="word " * 5000),
        lambda: client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 5000}]),
        lambda: client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "w" * 4_000_000}]),
    ):
        started = time.monotonic()
        with pytest.raises(openai.BadRequestError) as error:
            ask()
        assert error.value.code == "context_length_exceeded" and "4096" in error.value.message, error.value.message
        asked = [int(word) for word in error.value.message.replace(",", " ").split() if word.isdigit()]
        assert max(asked) > 4096 and time.monotonic() - started < 60
    assert chat(client, max_tokens=1_000_000, stop=" ").usage.completion_tokens > 0, "an upper bound may be too high"


def test_errors_have_the_sdks_shape(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, extra_body={"temprature": 1})
    assert error.value.code == "unknown_field" and error.value.param == "temprature"
    assert "did you mean temperature" in error.value.message
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="'image_url' are not supported"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [image]}])  # type: ignore
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="x")
    assert http.get(f"{server.url}/v1/chat/completions").status_code == 405
    other = client.chat.completions.create(model="gpt-4o-mini", messages=QUESTION, max_tokens=1)  # type: ignore
    assert other.model == "store", "one model answers to any name"


def test_a_full_queue_is_tried_again(client: openai.OpenAI, server: Server) -> None:
    busy = [chat(client, max_tokens=120, stream=True, extra_body={"ignore_eos": True}) for _ in range(8)]
    with pytest.raises(openai.RateLimitError) as error:
        chat(client, max_tokens=1)
    assert error.value.code == "queue_full" and float(error.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError):
        chat(client, max_tokens=1, n=3, stream=True)
    for stream in busy[1:]:
        stream.close()
    patient = client.with_options(max_retries=5)
    assert chat(patient, max_tokens=1).usage.completion_tokens == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in busy[0]), "the others do not notice"


def test_tokenizer_paths(server: Server, expected: dict[str, Any]) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return http.post(server.url + path, json=body).json()

    text = "The capital of France is"
    answer = post("/tokenize", {"content": text})
    assert answer == {"tokens": expected["ids"], "count": len(expected["ids"]), "max_model_len": 4096}
    assert post("/tokenize", {"prompt": text})["tokens"] == expected["ids"]
    pieces = post("/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == text
    assert post("/detokenize", {"tokens": expected["ids"]})["content"] == text
    templated = post("/tokenize", {"messages": QUESTION})
    assert templated["count"] == expected["greedy"].usage.prompt_tokens
    assert post("/tokenize", {"content": "x", "prompt": "x"})["error"]["param"] == "content"
    assert post("/detokenize", {"tokens": [10**9]})["error"]["param"] == "tokens"


def test_health_and_the_log(server: Server, client: openai.OpenAI) -> None:
    health = http.get(f"{server.url}/health")
    assert health.status_code == 200 and health.json()["ready"] is True
    assert http.get(f"{server.url}/health/live").json() == {"status": "alive"}
    secret = "xyzzy plugh"
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": secret}], max_tokens=6)
    server.wait_for_line("6 tokens at")
    line = next(line for line in server.log.splitlines() if "6 tokens at" in line)
    for word in ("store:", "% cached", "TTFT", "tok/s", "hits", "MB/token", "stall", "length"):
        assert word in line, line
    assert "xyzzy" not in server.log and "capital" not in server.log, "prompts are logged when asked for alone"


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(_references, node.values()))
    return set().union(*map(_references, node)) if isinstance(node, list) else set()


def test_openapi_describes_what_there_is(server: Server) -> None:
    described = http.get(f"{server.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["additionalProperties"] is False and body["properties"]
        assert {"200", "400", "429"} <= set(described["paths"][path]["post"]["responses"])
    assert "$defs" not in json.dumps(described)
    names = set(described["components"]["schemas"])
    assert {"openai.ChatRequest.Tool", "openai.ChatRequest.Message"} <= names and _references(described) <= names
