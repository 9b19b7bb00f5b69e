"""What may be a body, and what an auth header may say: bytes in, data or a refusal that names the place out."""

import json
import tracemalloc
from typing import Any

import pytest
from starlette.datastructures import Headers

from stoker.errors import ContextError, OptionError
from stoker.server.anthropic.request import MessagesRequest
from stoker.server.anthropic.request import to_turn as messages_to_turn
from stoker.server.auth import check_host, check_key, check_origin, same_key
from stoker.server.errors import RequestError, render
from stoker.server.limits import parse, parse_object
from stoker.server.openai.chat_request import ChatRequest, to_turn
from stoker.server.openai.completions import CompletionRequest
from stoker.server.openai.fields import refuse_unsupported
from stoker.server.settings import Settings

LIMITS = Settings(max_depth=8, max_values=100, max_messages=3)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b" \n ", "empty"),
        (b"\xff\xfe{}", "byte 0"),
        (b'{"a": "\xe9"}', "byte 7"),
        (b'{"a": 1', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"[1, 2]", "array"),
        (b'"text"', "string"),
        (b"null", "null"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "twice"),
        (b'{"x": {"secret": 1, "secret": 1}}', "'secret'"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"\\uDC00": 1}', "surrogate"),
        (b'{"a":' * 9 + b"1" + b"}" * 9, "at most 8 levels"),
        (b'{"a":' + b"[" * 100_000, "too many values"),
        (b'{"a": [' + b"1," * 200 + b"1]}", "too many values"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_what_is_no_body(body: bytes, word: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_object(body, LIMITS)
    assert error.value.status == 400 and word in str(error.value), error.value


def test_depth_past_the_parser_itself() -> None:
    deep = b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with pytest.raises(RequestError, match="nested too deeply"):
        parse_object(deep, Settings())


@pytest.mark.parametrize("text", ["plain", "ünïcödé 🙂", '"quoted" [{,:}] \\', "[,"])
def test_what_is_one(text: str) -> None:
    assert parse_object(json.dumps({"a": text}).encode(), LIMITS) == {"a": text}
    assert parse_object(json.dumps({"a": text * 50}, ensure_ascii=False).encode(), LIMITS) == {"a": text * 50}


def test_values_are_counted_before_they_are_made() -> None:
    body = b'{"a": [' + b"[]," * 2_500_000 + b"1]}"
    tracemalloc.start()
    with pytest.raises(RequestError, match="too many values"):
        parse_object(body, Settings())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(body)


def test_an_unclosed_string_takes_no_longer_than_any_other() -> None:
    body = b'{"a": "' + b'\\"' * 2_000_000
    with pytest.raises(RequestError, match="not JSON"):
        parse_object(body, Settings())


MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def chat(**fields: Any) -> Any:
    body: dict[str, Any] = {"model": "m", "messages": MESSAGES, **fields}
    refuse_unsupported(body)
    return to_turn(parse(ChatRequest, body), LIMITS)


@pytest.mark.parametrize(
    ("fields", "field", "word"),
    [
        ({"tempratur": 1}, "tempratur", "did you mean temperature"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"n": 0}, "n", "greater"),
        ({"n": 1.5}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"top_logprobs": 3}, "top_logprobs", "without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
        ({"stop": ""}, "stop", ""),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": ["x", ""]}, "stop[1]", "at least 1"),
        ({"store": True}, "store", "False"),
        ({"service_tier": "flex"}, "service_tier", "auto"),
        ({"functions": []}, "functions", "use tools"),
        ({"audio": {"voice": "x"}}, "audio", "text"),
        ({"prediction": {"type": "content"}}, "prediction", ""),
        ({"modalities": ["audio"]}, "modalities[0]", "text"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": MESSAGES * 4}, "messages", "at most 3"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "names its call"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", "tools"),
        (said({"type": "image_url", "image_url": {}}), "messages[0].content[0]", "'image_url' are not supported"),
        (said({"type": "input_audio"}), "messages[0].content[0]", "input_audio"),
        (said({"type": "file", "file": {}}), "messages[0].content[0]", "'file'"),
        (said({"text": "x"}), "messages[0].content[0].type", "missing"),
        (said({"type": "text"}), "messages[0].content[0].text", "text"),
        (said({"type": "text", "text": "x", "bold": 1}), "messages[0].content[0].bold", "unknown"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "no such"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "server's"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "low"),
        ({"metadata": "x"}, "metadata", "dictionary"),
    ],
)  # fmt: skip
def test_a_field_is_refused_by_its_name(fields: dict[str, Any], field: str, word: str) -> None:
    with pytest.raises(RequestError) as error:
        asked = chat(**fields)
        parse(ChatRequest, {"model": "m", "messages": MESSAGES, **fields}).asked(None)
        raise AssertionError(f"accepted: {asked}")
    assert error.value.field == field and word in str(error.value), (error.value.field, str(error.value))
    status, body, _ = render(error.value, "openai")
    assert status == 400 and body["error"]["param"] == field and body["error"]["type"] == "invalid_request_error"


def test_what_changes_nothing_is_accepted() -> None:
    turn = chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", n=None, temperature=None, functions=None,
        prompt_cache_key="k", safety_identifier="s", modalities=["text"],
    )  # fmt: skip
    assert turn.messages == MESSAGES and turn.template == {} and turn.max_tokens is None


def test_a_conversation_becomes_a_turn() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}], "reasoning": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
    ]
    turn = chat(messages=messages, max_tokens=5, max_completion_tokens=3, stop="END", reasoning_effort="low")
    assert turn.messages[0] == {"role": "system", "content": "Be brief."}
    assert turn.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}
    assert turn.messages[2] == {"role": "tool", "content": "42", "tool_call_id": "call_1"}
    assert turn.max_tokens == 3 and turn.stop == ("END",) and turn.template == {"reasoning_effort": "low"}


def test_choices_draw_apart() -> None:
    asked = parse(CompletionRequest, {"model": "m", "prompt": "x", "seed": 7, "temperature": 0.5})
    seeds = [asked.asked(None, choice)["seed"] for choice in range(3)]
    assert seeds == [7, 8, 9]
    negative = parse(CompletionRequest, {"model": "m", "prompt": "x", "seed": -1}).asked(None)["seed"]
    assert 0 <= negative < 2**63


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("openai", "this model's maximum context length is 4096 tokens (as served: --ctx-size)"),
        ("anthropic", "prompt is too long: 5000 tokens > 4096 maximum"),
    ],
)
def test_a_full_context_in_the_words_that_agents_know(dialect: Any, words: str) -> None:
    error = ContextError("too long")
    error.asked_tokens, error.limit_tokens = 5000, 4096
    status, body, _ = render(error, dialect)
    assert status == 400 and words in body["error"]["message"] and "5000" in body["error"]["message"]
    assert body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "assistant", "content": "I begin"}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "image"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"text": "x"}]}, "missing_field"),
        ({"role": "user", "content": []}, "invalid_value"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}, "unknown_field"),
    ],
)
def test_every_refusal_of_a_message_has_a_code(message: dict[str, Any], code: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [message]}
    with pytest.raises(RequestError) as refusal:
        messages_to_turn(parse(MessagesRequest, body), LIMITS)
    assert refusal.value.code == code


# ---- who may ask ----------------------------------------------------------------------------------------------------

KEYED = Settings(api_key="secret", cors=("https://app.example",))


@pytest.mark.parametrize(
    ("headers", "path", "allowed"),
    [
        ({}, "/v1/models", False),
        ({"authorization": "Bearer secret"}, "/v1/models", True),
        ({"authorization": "bearer  secret "}, "/v1/models", True),
        ({"authorization": "Basic secret"}, "/v1/models", False),
        ({"authorization": "secret"}, "/v1/models", False),
        ({"authorization": "Bearer Secret"}, "/v1/models", False),
        ({"authorization": "Bearer secret2"}, "/v1/models", False),
        ({"authorization": "Bearer "}, "/v1/models", False),
        ({"x-api-key": "secret"}, "/v1/messages", True),
        ({"x-api-key": "wrong"}, "/v1/messages", False),
        ({}, "/health", True),
        ({}, "/health/live", True),
        ({}, "/", True),
        ({}, "/static/app.js", True),
        ({}, "/metrics", False),
        ({}, "/live", False),
        ({}, "/openapi.json", False),
        ({}, "/static", False),
    ],
)
def test_keys(headers: dict[str, str], path: str, allowed: bool) -> None:
    try:
        check_key(Headers(headers), path, KEYED)
    except RequestError as error:
        assert not allowed
        for dialect, kind in (("openai", "authentication_error"), ("anthropic", "authentication_error")):
            status, body, answer = render(error, dialect)  # type: ignore[arg-type]
            assert status == 401 and body["error"]["type"] == kind and answer["WWW-Authenticate"] == "Bearer"
            assert "secret" not in json.dumps(body)
    else:
        assert allowed


def test_keys_of_other_alphabets() -> None:
    key = "schlüssel"
    assert same_key(key, key) and same_key(key.encode().decode("latin-1"), key) and not same_key("schlussel", key)
    assert not same_key("", "x") and not same_key("?", "東") and same_key("東".encode().decode("latin-1"), "東")
    with pytest.raises(OptionError, match="--api-key"):
        Settings(api_key="  ")


@pytest.mark.parametrize(
    ("host", "served", "allowed"),
    [
        ("localhost:8080", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("[::1]:8080", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("", "127.0.0.1", True),
        ("evil.example:8080", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("evil.example", "0.0.0.0", True),
    ],
)
def test_dns_rebinding(host: str, served: str, allowed: bool) -> None:
    try:
        check_host(Headers({"host": host}), Settings(host=served))
    except RequestError as error:
        assert not allowed and error.status == 403
    else:
        assert allowed


@pytest.mark.parametrize(
    ("origin", "method", "allowed"),
    [
        (None, "POST", True),
        ("http://localhost:8080", "POST", True),
        ("https://app.example", "POST", True),
        ("https://evil.example", "POST", False),
        ("http://localhost:9999", "POST", False),
        ("null", "POST", False),
        ("http://[bad", "POST", False),
        ("https://evil.example", "GET", True),
        ("https://evil.example", "OPTIONS /live", True),
        ("https://evil.example", "GET /live", False),
        ("https://evil.example", "GET /live/stream", False),
        ("https://evil.example", "HEAD /metrics", False),
        ("https://app.example", "GET /metrics", True),
        ("http://localhost:8080", "GET /live", True),
        (None, "GET /metrics", True),
    ],
)
def test_other_sites_scripts(origin: str | None, method: str, allowed: bool) -> None:
    method, _, path = method.partition(" ")
    headers = {"host": "localhost:8080"} | ({"origin": origin} if origin is not None else {})
    try:
        check_origin(Headers(headers), method, path or "/v1/models", KEYED)
    except RequestError as error:
        assert not allowed and error.status == 403
    else:
        assert allowed
