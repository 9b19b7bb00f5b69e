"""OpenAI's Responses API under the official SDK, on a real server with the demo model."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.running import Server

QUESTION = "What is the capital of France?"
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
GREET = {
    "type": "function",
    "name": "greet",
    "parameters": {"type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]},
}
TEXT = ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]


@pytest.fixture(scope="module")
def client(talking: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talking.url}/v1", api_key="sesame", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**({"model": "demo", "input": QUESTION, "max_output_tokens": 10} | more))


def test_the_answer_is_that_of_chat_completions(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = client.chat.completions.create(model="demo", messages=messages, max_tokens=10)
    text = expected.choices[0].message.content
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    for more in (
        {"instructions": "Be brief."},
        {"input": [{"role": "developer", "content": "Be brief."}, user]},
        {"input": [user], "instructions": "Be brief.", "metadata": {"a": "b"}, "prompt_cache_key": "k"},
    ):
        response = ask(client, **more)
        assert response.output_text == text and response.status == "completed" and response.store is False
        assert expected.usage is not None and response.usage.input_tokens == expected.usage.prompt_tokens
        assert response.usage.total_tokens == expected.usage.total_tokens
    cut = ask(client, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_events_of_text(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=QUESTION, max_output_tokens=10) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[2:5] == TEXT
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == ask(client).output_text and len(deltas) > 3


def test_a_conversation_of_function_calls(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: Any = {"model": "demo", "tools": TOOLS, "max_output_tokens": 60, "parallel_tool_calls": False}
    with client.responses.stream(input=items, tool_choice="required", **asked) as stream:
        events = list(stream)
        first = stream.get_final_response()
    (call,) = first.output
    assert call.type == "function_call" and call.status == "completed"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and set(json.loads(call.arguments)) == {"city"} and len(deltas) > 2
    items += [call.model_dump(exclude={"parsed_arguments"}, exclude_none=True)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees, rain"}]
    second = client.responses.create(input=items, tool_choice="none", **asked)
    assert [item.type for item in second.output] == ["message"]
    assert first.usage and second.usage
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 64
    named = client.responses.create(input=items, tool_choice={"type": "function", "name": "get_weather"}, **asked)
    assert [item.type for item in named.output] == ["function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_functions_in_a_namespace(client: openai.OpenAI, stream: bool) -> None:
    """As Codex groups its own: a call says from which namespace it is, and may come back so."""
    tools: Any = [{"type": "namespace", "name": "people", "description": "Of people", "tools": [GREET]}]
    more: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_output_tokens": 60}
    if stream:
        events = list(ask(client, stream=True, **more))
        output = events[-1].response.output
        added = next(event for event in events if event.type == "response.output_item.added")
        assert added.item.namespace == "people"
    else:
        output = ask(client, **more).output
    (call,) = [item for item in output if item.type == "function_call"][:1]
    assert (call.name, call.namespace) == ("greet", "people")
    again = [
        {"role": "user", "content": "Greet Ada."},
        {"type": "function_call", "call_id": call.call_id, "name": "greet", "arguments": "{}", "namespace": "people"},
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    assert ask(client, input=again, tools=tools, max_output_tokens=16).status in ("completed", "incomplete")


def test_formats(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    assert set(json.loads(ask(client, text={"format": form}, max_output_tokens=40).output_text)) == {"n"}
    response = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=16)
    assert response.output_text.startswith("{")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools[0].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [GREET, {"type": "function", "name": "no name"}]}]},
            "tools[0].tools[1].name",
        ),
        ({"tools": [{"type": "function", "name": "f", "tools": [GREET]}]}, "tools[0].tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "stoker:?"}]},
            "input[0].encrypted",
        ),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, extra_body=more)
    body: Any = error.value.body
    assert named in f"{body['param']} {body['message']}" and body["type"] == "invalid_request_error", body


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    taken = {
        "store": False, "reasoning": {"effort": "high", "summary": "auto"}, "service_tier": "auto",
        "include": ["reasoning.encrypted_content"], "stream_options": None, "truncation": "disabled",
    }  # fmt: skip
    assert ask(client, extra_body=taken).output_text == ask(client).output_text


def test_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, input="word " * 5000)
    assert error.value.code == "context_length_exceeded" and "4096" in str(error.value)
