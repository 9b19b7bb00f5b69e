"""The official anthropic SDK against a real server on the demo model: blocks, events, stops, counts, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.running import Server, http

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    }
]


@pytest.fixture(scope="module")
def client(talking: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=talking.url, api_key="sesame", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def chat(talking: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talking.url}/v1", api_key="sesame", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    return client.messages.create(**({"model": "demo", "messages": QUESTION, "max_tokens": 10} | more))


def test_the_answer_is_that_of_the_other_api(client: anthropic.Anthropic, chat: openai.OpenAI) -> None:
    """Same messages, same tokens; system as text and as blocks is the same prompt."""
    messages: Any = [{"role": "system", "content": "Be brief."}, *QUESTION]
    expected = chat.chat.completions.create(model="demo", messages=messages, max_tokens=10)
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1234;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    for system in ("Be brief.", blocks):
        message = ask(client, system=system, metadata={"user_id": "me"})
        assert message.content[0].text == expected.choices[0].message.content
        assert (message.stop_reason, message.role, message.type) == ("end_turn", "assistant", "message")
        usage = message.usage
        assert expected.usage is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
        assert usage.output_tokens == expected.usage.completion_tokens


def test_events_come_in_the_order_of_the_api(client: anthropic.Anthropic, talking: Server) -> None:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 6, "stream": True}
    headers = {"x-api-key": "sesame", "anthropic-version": "2023-06-01", "anthropic-beta": "some-beta"}
    text = http.post(f"{talking.url}/v1/messages", json=body, headers=headers).text
    events = [
        (lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: ")))
        for lines in (block.splitlines() for block in text.strip().split("\n\n"))
        if lines[0].startswith("event: ")
    ]
    assert all(name == data["type"] for name, data in events)
    kinds = [name for name, _ in events if name != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and ("ping", {"type": "ping"}) in events
    start, delta = events[0][1]["message"], next(data for name, data in events if name == "message_delta")
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 6
    streamed = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert streamed == ask(client, max_tokens=6).content[0].text


def test_stop_sequences_are_told(client: anthropic.Anthropic) -> None:
    whole = ask(client).content[0].text
    message = ask(client, stop_sequences=["no such text", whole[8:14]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole[8:14])
    assert message.content[0].text == whole[:8]


def test_tools(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model="demo",
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=60,  # type: ignore[arg-type]
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        first = stream.get_final_message()
    (call,) = first.content
    assert first.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "get_weather"
    assert json.loads("".join(pieces)) == call.input and set(call.input) == {"city", "unit"} and len(pieces) > 3
    answer = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 degrees, rain"}]},
        {"type": "text", "text": "Is it warm?"},
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": answer}]  # type: ignore
    second = ask(client, messages=messages, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in second.content] == ["text"] and second.stop_reason in ("end_turn", "max_tokens")
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens - 64


def test_json_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    message = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=40)
    assert isinstance(json.loads(message.content[0].text)["n"], int) and message.stop_reason == "end_turn"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    for more in ({}, {"tools": TOOLS}, {"system": "Be brief."}):
        counted = client.messages.count_tokens(model="demo", messages=QUESTION, **more).input_tokens  # type: ignore
        usage = ask(client, max_tokens=1, **more).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: blocks of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "The"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"tempreature": 1}, "temperature?"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(client: anthropic.Anthropic, more: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, extra_body=more)
    body: Any = error.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"], body


def test_what_changes_nothing_is_taken(client: anthropic.Anthropic) -> None:
    taken = {
        "thinking": {"type": "enabled", "budget_tokens": 2}, "cache_control": {"type": "ephemeral"},
        "service_tier": "auto", "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    assert ask(client, extra_body=taken).content == ask(client).content


def test_errors_have_the_shape_of_the_api(client: anthropic.Anthropic, talking: Server) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.post("/v1/messages", body={"model": "demo", "messages": QUESTION}, cast_to=object)
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=talking.url, api_key="wrong", max_retries=0))
    ask(anthropic.Anthropic(base_url=talking.url, auth_token="sesame", max_retries=0), max_tokens=1)
